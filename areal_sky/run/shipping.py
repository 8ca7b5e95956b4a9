"""A wheel of the areal_sky that runs here, for the machines of a cluster: head and nodes speak exactly its dialect.

Packed from the files of the running package (a checkout's or an installation's alike), with no build tool and no
network. The same code gives the same bytes, so a wheel is packed once and found again by its content.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

from areal_sky import data
from areal_sky.errors import StateError
from areal_sky.home import home

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip file can hold
_FILE_MODE = 0o644 << 16
_WHEEL = "Wheel-Version: 1.0\nGenerator: areal-sky\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def wheel() -> Path:
    """The wheel's path under the state folder, packed first if this code has none yet. Its name tells the version
    alone, so that files which name it do not change with every line of code.

    Raises StateError when areal_sky is not installed here (an editable install will do), or the disk says no.
    """
    try:
        dist = distribution("areal-sky")
    except PackageNotFoundError:
        raise StateError("areal-sky runs from a folder that is not installed: `pip install -e` it first") from None
    try:
        files = dict(sorted(_contents(dist)))
        digest = hashlib.sha256()
        for name, content in files.items():
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        path = home() / "wheels" / digest.hexdigest()[:16] / f"areal_sky-{dist.version}-py3-none-any.whl"
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.write_bytes(_packed(files, dist))
            temporary.replace(path)
    except OSError as e:
        raise StateError(f"cannot pack areal_sky for the machines: {e}") from None
    return path


def _contents(dist: Distribution) -> Iterator[tuple[str, bytes]]:
    """Name in the wheel and bytes of every file but RECORD."""
    package = Path(data.__file__).resolve().parent
    yield from _tree(package, PurePosixPath("areal_sky"))
    if not (package / "_shipped").is_dir():  # a checkout: these folders lie at its root
        for name in data.NAMES:
            yield from _tree(data.data_dir(name), PurePosixPath("areal_sky/_shipped") / name)
    info = _info(dist)
    yield f"{info}/METADATA", (dist.read_text("METADATA") or "").encode()
    yield f"{info}/entry_points.txt", (dist.read_text("entry_points.txt") or "").encode()
    yield f"{info}/WHEEL", _WHEEL.encode()


def _tree(folder: Path, to: PurePosixPath) -> Iterator[tuple[str, bytes]]:
    for path in folder.rglob("*"):
        hidden = any(part.startswith((".", "__pycache__")) for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden and path.suffix != ".pyc":
            yield str(to / path.relative_to(folder).as_posix()), path.read_bytes()


def _packed(files: dict[str, bytes], dist: Distribution) -> bytes:
    record = f"{_info(dist)}/RECORD"
    lines = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**files, record: "\n".join([*lines, f"{record},,", ""]).encode()}.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = _FILE_MODE
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return out.getvalue()


def _info(dist: Distribution) -> str:
    return f"areal_sky-{dist.version}.dist-info"


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
