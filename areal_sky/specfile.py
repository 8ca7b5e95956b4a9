"""Specs from files: the part of reading one that touches the disk."""

from __future__ import annotations

import sys
from pathlib import Path

from areal_sky.errors import Mistake, SpecError
from areal_sky.spec import ClusterSpec, load_text
from areal_sky.spec.marks import MAX_TEXT_BYTES


def read_spec(path: str | Path, now_s: float | None = None) -> ClusterSpec:
    """The spec in the file at `path`; `-` is standard input. `now_s` (Unix time) is what deadlines are held against.

    Raises SpecError with every mistake, an unreadable file included.
    """
    return load_text(read_text(path), "<stdin>" if str(path) == "-" else str(path), now_s)


def read_text(path: str | Path) -> str:
    """The text of a spec file; `-` is standard input. Raises SpecError when it cannot be a spec."""
    name = "<stdin>" if str(path) == "-" else str(path)
    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
        else:
            with Path(path).open("rb") as file:
                data = file.read(MAX_TEXT_BYTES + 1)  # no more: it may be a disk image, or /dev/zero
    except IsADirectoryError:
        raise _mistake(name, "is a directory, expected a YAML file") from None
    except FileNotFoundError:
        raise _mistake(name, f"no such file, expected a YAML file{_near(Path(path))}") from None
    except PermissionError:
        raise _mistake(name, "may not be read by this user, expected a readable YAML file") from None
    except (OSError, ValueError) as e:  # ValueError: a NUL in the path
        raise _mistake(name, f"cannot be read ({getattr(e, 'strerror', None) or e}), expected a YAML file") from None
    if len(data) > MAX_TEXT_BYTES:
        raise _mistake(name, f"has more than {MAX_TEXT_BYTES:,} bytes, expected a spec")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        before = data[: e.start].decode("utf-8-sig", errors="replace")
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
        raise SpecError([Mistake(name, line, column, "not UTF-8 text, expected a YAML file in UTF-8")]) from None


def _mistake(name: str, what: str) -> SpecError:
    return SpecError([Mistake(name, 1, 1, what)])


def _near(path: Path) -> str:
    """The same name with the other YAML ending, if that exists."""
    for suffix in (".yaml", ".yml", ".sky.yaml"):
        other = path.with_name(path.name.removesuffix(path.suffix) + suffix) if path.name else path
        if other.is_file():
            return f", did you mean `{other}`?"
    return ""
