"""What ranks wrote, kept on the head: `logs/<task_id>/<attempt>.<rank>.<out|err>`, bytes as they came.

Offsets are bytes from the first that the rank ever wrote. Runners push chunks by offset, so a chunk that comes twice
changes nothing. Of each stream the latest is kept, in two segments: the current one, and before it `....old@<offset>`
with the whole segment before. When the current one is full it becomes the old one, and the older is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from areal_sky.errors import InvalidInput, StateError

Stream = Literal["out", "err"]
SEGMENT_BYTES = 64 * 2**20  # a rank's stream keeps at least this much and at most twice as much
_TASK_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class TaskLogs:
    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES):
        self._folder = folder
        self._segment_bytes = segment_bytes

    def append(self, task_id: str, attempt: int, rank: int, stream: str, offset: int, data: bytes) -> int:
        """Adds what is new in the chunk; returns the offset wanted next (less than sent when a part is missing).

        Raises InvalidInput, StateError.
        """
        path = self._path(task_id, attempt, rank, stream)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            base = self._base(path)
            size = base + (path.stat().st_size if path.exists() else 0)
            if offset > size:
                return size
            fresh = data[size - offset :]
            while fresh:
                room = self._segment_bytes - (size - base)
                if room <= 0:
                    self._rotate(path, base)
                    base = size
                    continue
                created = not path.exists()
                with path.open("ab") as file:
                    file.write(fresh[:room])
                if created:
                    path.chmod(0o600)
                size += len(fresh[:room])
                fresh = fresh[room:]
            return max(size, offset + len(data))
        except OSError as e:
            raise StateError(f"cannot write {path}: {e.strerror or e}") from None

    def read(
        self, task_id: str, attempt: int, rank: int, stream: str, offset: int, limit: int = 256 * 2**10
    ) -> tuple[str, int, bool]:
        """(text, offset to go on from, whether that is the end for now). A character is never cut in two.

        A negative offset counts from the end. What was dropped is said in its place. Raises InvalidInput, StateError.
        """
        path = self._path(task_id, attempt, rank, stream)
        try:
            segments = list(self._segments(path))
            if not segments:
                return "", max(0, offset), True
            first, end = segments[0][1], segments[-1][1] + segments[-1][2]
            if offset < 0:
                offset = max(first, end + offset)
            dropped = ""
            if offset < first:
                dropped = f"[areal_sky: {first - offset:,} bytes of earlier output are no longer kept]\n"
                offset = first
            data = b""
            for file, base, size in segments:
                if base <= offset + len(data) < base + size and len(data) < limit:
                    with file.open("rb") as opened:
                        opened.seek(offset + len(data) - base)
                        data += opened.read(limit - len(data))
        except FileNotFoundError:  # rotated meanwhile: the next read finds it
            return "", max(0, offset), False
        except OSError as e:
            raise StateError(f"cannot read {path}: {e.strerror or e}") from None
        whole = _whole_characters(data)
        if 0 < whole < len(data):
            data = data[:whole]
        return dropped + data.decode("utf-8", "replace"), offset + len(data), offset + len(data) >= end

    def last_words(self, task_id: str, attempt: int, rank: int, stream: str = "err") -> str:
        """The last 4 KiB that the rank wrote."""
        return self.read(task_id, attempt, rank, stream, -4096)[0]

    def _segments(self, path: Path) -> Iterator[tuple[Path, int, int]]:
        """(file, offset of its first byte, bytes), the oldest first."""
        base = 0
        olds = {int(old.name.rpartition("@")[2]): old for old in path.parent.glob(f"{path.name}.old@*")}
        for first, old in sorted(olds.items()):
            size = old.stat().st_size
            yield old, first, size
            base = first + size
        if path.exists():
            yield path, base, path.stat().st_size

    def _base(self, path: Path) -> int:
        """The offset of the current segment's first byte."""
        return max((first + size for file, first, size in self._segments(path) if file != path), default=0)

    def _rotate(self, path: Path, base: int) -> None:
        # The name says where a segment begins, so a crash between the two steps leaves only one segment too many.
        older = list(path.parent.glob(f"{path.name}.old@*"))
        path.rename(path.with_name(f"{path.name}.old@{base}"))
        for old in older:
            old.unlink()

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
