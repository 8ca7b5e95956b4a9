"""What the kernel says of the memory that this process may use: how much of it is in use, and who was killed for it.

The limit of a container, a Slurm job or another control group counts where there is one, else the machine's memory.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

GIB = 2**30
OOM_KILLED = "the kernel killed it: out of memory"
ROOT = Path("/")


class MemoryUse(NamedTuple):
    """GiB. What the kernel could give back at once (the page cache) is not used."""

    used_gib: float
    total_gib: float


def memory_use(root: Path = ROOT) -> MemoryUse | None:
    """Of that which is nearest to its end: the machine, this control group, or one above it. None if nothing is said.

    /proc/meminfo's MemAvailable; cgroup v2: memory.current less `inactive_file`, against memory.max; v1 alike
    (Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst). A limit above the machine's memory is none.
    """
    machine = _numbers(root / "proc/meminfo")
    if not {"MemTotal:", "MemAvailable:"} <= machine.keys():
        return None
    total = machine["MemTotal:"] * 1024
    found = [(total - machine["MemAvailable:"] * 1024, total)]
    for folder, v2 in _groups(root):
        limit, used, cache = (
            ("memory.max", "memory.current", "inactive_file") if v2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )  # fmt: skip
        most, held = _number(folder / limit), _number(folder / used)
        if most < total and held < math.inf:
            found.append((held - _numbers(folder / "memory.stat").get(cache, 0), most))
    used_b, total_b = min(found, key=lambda x: x[1] - x[0])
    return MemoryUse(used_b / GIB, total_b / GIB)


def oom_kills(root: Path = ROOT) -> int:
    """How often the kernel has killed for want of memory since the start of this control group, or of the machine; 0
    if it says nothing.

    cgroup v2: `oom_kill` in memory.events; v1: in memory.oom_control; else the machine's own count in /proc/vmstat,
    which counts those of all groups.
    """
    files = [folder / ("memory.events" if v2 else "memory.oom_control") for folder, v2 in _groups(root, above=False)]
    return int(max(_numbers(file).get("oom_kill", 0) for file in (*files, root / "proc/vmstat")))


def _groups(root: Path, above: bool = True) -> list[tuple[Path, bool]]:
    """The folders of the control groups that this process's memory counts in, and whether they are of v2."""
    found: list[tuple[Path, bool]] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, name = [*line.split(":", 2), "", ""][:3]
        v2 = controllers == ""
        if v2 or "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup" / ("" if v2 else "memory")
            own = top / name.lstrip("/")
            found += [(own, v2), *((p, v2) for p in own.parents if above and p.is_relative_to(top))]
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _number(file: Path) -> float:
    """The number in it; infinity when it says `max` or is not there."""
    text = _text(file).strip()
    return float(text) if text.isdigit() else math.inf


def _numbers(file: Path) -> dict[str, float]:
    """Lines of a name and a number."""
    words = (line.split() for line in _text(file).splitlines())
    return {w[0]: float(w[1]) for w in words if len(w) >= 2 and w[1].isdigit()}
