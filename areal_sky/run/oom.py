"""Whether the kernel has killed something for want of memory: what an exit by SIGKILL alone does not tell."""

from __future__ import annotations

from pathlib import Path

OOM_KILLED = "the kernel killed it: out of memory"


def oom_kills(root: Path = Path("/")) -> int:
    """How often the kernel has done so since the start of this control group, or of the machine; 0 if it says nothing.

    cgroup v2: `oom_kill` in memory.events (Documentation/admin-guide/cgroup-v2.rst); v1: in memory.oom_control; else
    the machine's own count in /proc/vmstat, which counts those of all groups.
    """
    counts = [0]
    for file in (*_of_group(root), root / "proc/vmstat"):
        try:
            words = [line.split() for line in file.read_text().splitlines()]
        except OSError:
            continue
        counts += [int(w[1]) for w in words if len(w) == 2 and w[0] == "oom_kill" and w[1].isdigit()]
    return max(counts)


def _of_group(root: Path) -> list[Path]:
    """The files that count for the control group of this process."""
    found: list[Path] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            found.append(root / "sys/fs/cgroup" / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            found.append(root / "sys/fs/cgroup/memory" / path.lstrip("/") / "memory.oom_control")
    return found
