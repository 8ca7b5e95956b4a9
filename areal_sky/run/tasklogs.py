"""What ranks wrote, kept on the head: `logs/<task_id>/<attempt>.<rank>.<out|err>`, bytes as they came.

Offsets are bytes. Runners push chunks by offset, so a chunk that comes twice changes nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from areal_sky.errors import InvalidInput, StateError

Stream = Literal["out", "err"]
MAX_STREAM_BYTES = 256 * 2**20  # beyond it, output stays only on the node
_TASK_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CUT = "\n[areal_sky: the rest of this output was too long to keep on the head; it is on the node]\n"


class TaskLogs:
    def __init__(self, folder: Path, max_bytes: int = MAX_STREAM_BYTES):
        self._folder = folder
        self._max_bytes = max_bytes

    def append(self, task_id: str, attempt: int, rank: int, stream: str, offset: int, data: bytes) -> int:
        """Adds what is new in the chunk; returns the offset wanted next (less than sent when a part is missing).

        Raises InvalidInput, StateError.
        """
        path = self._path(task_id, attempt, rank, stream)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            size = path.stat().st_size if path.exists() else 0
            if size >= self._max_bytes:
                return offset + len(data)  # told as taken: the runner shall go on
            if offset > size:
                return size
            fresh = data[size - offset :]
            if size + len(fresh) > self._max_bytes:
                # Padded up to the limit, so that every later chunk is seen as beyond it.
                fresh = fresh[: max(0, self._max_bytes - size)] + _CUT.encode()
            if fresh:
                created = not path.exists()
                with path.open("ab") as file:
                    file.write(fresh)
                if created:
                    path.chmod(0o600)
            return max(size, offset + len(data))
        except OSError as e:
            raise StateError(f"cannot write {path}: {e.strerror or e}") from None

    def read(
        self, task_id: str, attempt: int, rank: int, stream: str, offset: int, limit: int = 256 * 2**10
    ) -> tuple[str, int, bool]:
        """(text, offset to go on from, whether that is the end for now). A character is never cut in two.

        A negative offset counts from the end. Raises InvalidInput, StateError.
        """
        path = self._path(task_id, attempt, rank, stream)
        try:
            size = path.stat().st_size
            if offset < 0:
                offset = max(0, size + offset)
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(limit)
        except FileNotFoundError:
            return "", max(0, offset), True
        except OSError as e:
            raise StateError(f"cannot read {path}: {e.strerror or e}") from None
        whole = _whole_characters(data)
        if 0 < whole < len(data):
            data = data[:whole]
        return data.decode("utf-8", "replace"), offset + len(data), offset + len(data) >= size

    def last_words(self, task_id: str, attempt: int, rank: int, stream: str = "err") -> str:
        """The last 4 KiB that the rank wrote."""
        return self.read(task_id, attempt, rank, stream, -4096)[0]

    def _path(self, task_id: str, attempt: int, rank: int, stream: str) -> Path:
        if not _TASK_ID.fullmatch(task_id):
            raise InvalidInput(f"{task_id[:40]!r} is no task id")
        if stream not in ("out", "err"):
            raise InvalidInput(f"stream {stream[:10]!r} is neither out nor err")
        if attempt < 0 or rank < 0:
            raise InvalidInput("attempt and rank count from 0")
        return self._folder / task_id / f"{attempt}.{rank}.{stream}"


def _whole_characters(data: bytes) -> int:
    """How many leading bytes hold whole UTF-8 characters (bytes that are no UTF-8 count as whole)."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            need = 2 if byte >> 5 == 0b110 else 3 if byte >> 4 == 0b1110 else 4 if byte >> 3 == 0b11110 else 1
            return len(data) - back if need > back else len(data)
    return len(data)
