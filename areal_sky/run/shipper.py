"""Brings what a rank writes from its node to the head, in order and without loss; picks out what it says of itself.

What the head has is given back to the node's disk once it is more than KEEP_BYTES: a hole takes its place in the file,
so offsets stay. A rank that writes for weeks fills no disk.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import Any

from areal_sky.errors import ArealSkyError, InvalidInput, NotFound, Refused, Unauthorized

CHUNK_BYTES = 256 * 2**10
KEEP_BYTES = 64 * 2**20
METRIC_MARK = "AREAL_SKY_METRIC"
CHECKPOINT_MARK = "AREAL_SKY_CHECKPOINT"
PHASE_MARK = "AREAL_SKY_PHASE"
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
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
        self._checkpoint_due = False
        self._phase_due: tuple[str, bool] | None = None
        self._freed = 0
        self._offset = 0
        self._line = b""  # the unfinished last line, for metrics
        self._measured = 0  # how far metrics were read

    def has_news(self) -> bool:
        try:
            told = not (self._due or self._checkpoint_due or self._phase_due)
            return not told or self._path.stat().st_size > self._offset
        except OSError:
            return False

    def push(self, *, last: bool = False) -> bool:
        """Sends what is new; True when nothing is left to send (or nobody to send it to)."""
        try:
            while data := self._read():
                self._look_for_marks(data)
                # surrogateescape carries bytes that are no UTF-8, so that offsets stay those of the file
                text = data.decode("utf-8", "surrogateescape")
                if self._url:
                    self._offset = self._head().push_log(*self._whose, self._offset, text)
                else:
                    self._offset += len(data)
            self._free()
            if last:
                self._look_for_marks(b"\n")
            self._tell()
        except (Unauthorized, NotFound, InvalidInput, Refused):
            self._due, self._checkpoint_due, self._phase_due = {}, False, None
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

    def _tell(self) -> None:
        """What the rank has said of itself goes to the head."""
        task_id = self._whose[0]
        if self._due and self._url:
            self._head().track_metrics(task_id, self._due, self._whose[2])
        self._due = {}
        if self._checkpoint_due and self._url:
            self._head().checkpointed(task_id)
        self._checkpoint_due = False
        if self._phase_due is not None and self._url:
            self._head().enter_phase(task_id, *self._phase_due)
        self._phase_due = None

    def _free(self) -> None:
        if not self._url or self._offset - self._freed < 2 * KEEP_BYTES:
            return
        until = self._offset - KEEP_BYTES
        # A file system that has no holes keeps what it has.
        with contextlib.suppress(OSError, AttributeError), self._path.open("r+b") as file:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.fallocate(file.fileno(), _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(until))
        self._freed = until

    def _look_for_marks(self, data: bytes) -> None:
        if self._whose[3] != "out" or self._offset < self._measured:
            return  # seen before: the head asked for it again
        self._measured = self._offset + len(data)
        *lines, self._line = (self._line + data).split(b"\n")
        self._line = self._line[:MAX_LINE_BYTES]
        for line in lines:
            if not line.startswith(b"AREAL_SKY_"):
                continue
            text = line.decode("utf-8", "replace")
            mark, *words = text.split()
            if mark == METRIC_MARK:
                self._due.update(parse_metrics(text))
            elif mark == CHECKPOINT_MARK:
                self._checkpoint_due = True
            elif mark == PHASE_MARK and words:
                self._phase_due = words[0], "low" in words[1:]


def parse_metrics(line: str) -> dict[str, float]:
    """`AREAL_SKY_METRIC reward=0.5 step=3` -> values, NaN and infinities too; what is no number is left out."""
    values: dict[str, float] = {}
    for word in line.split()[1:]:
        name, _, text = word.partition("=")
        try:
            value = float(text)
        except ValueError:
            continue
        if name:
            values[name[:64]] = value
    return values
