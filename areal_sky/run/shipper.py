"""Brings what a rank writes from its node to the head, in order and without loss; picks metrics out of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_sky.errors import ArealSkyError, InvalidInput, NotFound, Unauthorized

CHUNK_BYTES = 256 * 2**10
METRIC_MARK = "AREAL_SKY_METRIC"
MAX_LINE_BYTES = 64 * 2**10  # of a line that may be a metric; output without line ends must not pile up


class LogShipper:
    """Follows one log file and brings it to the head."""

    def __init__(self, task_id: str, attempt: int, rank: int, stream: str, path: Path, url: str, token: str):
        """`url` empty: there is no head to bring it to."""
        self._whose = (task_id, attempt, rank, stream)
        self._path = path
        self._url, self._token = url, token
        self._client: Any = None
        self._due: dict[str, float] = {}  # metrics that the head does not have yet
        self._offset = 0
        self._line = b""  # the unfinished last line, for metrics
        self._measured = 0  # how far metrics were read

    def has_news(self) -> bool:
        try:
            return bool(self._due) or self._path.stat().st_size > self._offset
        except OSError:
            return False

    def push(self, *, last: bool = False) -> bool:
        """Sends what is new; True when nothing is left to send (or nobody to send it to)."""
        try:
            while data := self._read():
                self._look_for_metrics(data)
                # surrogateescape carries bytes that are no UTF-8, so that offsets stay those of the file
                text = data.decode("utf-8", "surrogateescape")
                if self._url:
                    self._offset = self._head().push_log(*self._whose, self._offset, text)
                else:
                    self._offset += len(data)
            if last:
                self._look_for_metrics(b"\n")
            if self._due and self._url:
                self._head().track_metrics(self._whose[0], self._due)
            self._due = {}
        except (Unauthorized, NotFound, InvalidInput):
            self._due = {}
            return True  # asking again will not help
        except ArealSkyError:
            return False
        except OSError:
            return True  # the file is gone: somebody cleared the node's folder
        return True

    def _head(self) -> Any:
        if self._client is None:
            from areal_sky.adapters.gateway_client import GatewayClient  # not before the command runs: httpx is slow

            self._client = GatewayClient(self._url, self._token)
        return self._client

    def _read(self) -> bytes:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            return file.read(CHUNK_BYTES)

    def _look_for_metrics(self, data: bytes) -> None:
        if self._whose[3] != "out" or self._offset < self._measured:
            return  # seen before: the head asked for it again
        self._measured = self._offset + len(data)
        *lines, self._line = (self._line + data).split(b"\n")
        self._line = self._line[:MAX_LINE_BYTES]
        for line in lines:
            if line.startswith(METRIC_MARK.encode()):
                self._due.update(parse_metrics(line.decode("utf-8", "replace")))


def parse_metrics(line: str) -> dict[str, float]:
    """`AREAL_SKY_METRIC reward=0.5 step=3` -> values; what is no number is left out."""
    values: dict[str, float] = {}
    for word in line.split()[1:]:
        name, _, text = word.partition("=")
        try:
            value = float(text)
        except ValueError:
            continue
        if name and abs(value) != float("inf") and value == value:
            values[name[:64]] = value
    return values
