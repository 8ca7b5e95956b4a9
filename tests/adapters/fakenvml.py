"""Builds the stand-in for NVIDIA's library (fake_nvml.c), for tests and benchmarks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_nvml.c")


def compiler() -> str | None:
    return shutil.which("gcc") or shutil.which("cc")


def build(folder: Path) -> Path:
    """Puts libnvidia-ml.so.1 into `folder`, which LD_LIBRARY_PATH shall name. Needs a C compiler."""
    cc = compiler()
    assert cc is not None
    target = folder / "libnvidia-ml.so.1"
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([cc, *flags, "-o", str(target), str(SOURCE), "-lm"], check=True)
    return folder
