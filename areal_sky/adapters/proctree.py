"""Process trees on this machine: who belongs to a process, how long it could run, how much memory it holds.

Reads /proc where there is one (Linux), else asks psutil. Finding children means looking at every process, so that
is done once a second at most; reading the threads of known processes is cheap.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path

import psutil

GIB = 1024**3
REFRESH_S = 1.0
PROC = Path("/proc")


class ProcessTrees:
    """A view of all process trees, at most `REFRESH_S` old."""

    def __init__(self) -> None:
        self._refreshed_s: float | None = None
        self._children: dict[int, list[int]] = {}
        self._rss: dict[int, float] = {}

    def refresh(self, now_s: float) -> None:
        """Look at all processes again if the last look is too old (or the clock was set back)."""
        if self._refreshed_s is not None and 0 <= now_s - self._refreshed_s < REFRESH_S:
            return
        self._refreshed_s = now_s
        self._children = _children_of_all()
        self._rss = {}

    def of(self, pid: int) -> tuple[int, ...]:
        """`pid` and all its descendants; empty when `pid` does not run (a zombie does not)."""
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return ()
        except psutil.Error:
            return ()
        tree = [pid]
        for member in tree:  # grows while it is walked
            tree.extend(self._children.get(member, ()))
        return tuple(tree)

    def age_s(self, pid: int, now_s: float) -> float:
        """Seconds since the process was started; 0 when it is gone."""
        try:
            return max(0.0, now_s - psutil.Process(pid).create_time())
        except psutil.Error:
            return 0.0

    def runnable_ns(self, tree: Sequence[int]) -> dict[tuple[int, int], int]:
        """(process, thread) -> nanoseconds that it ran or stood ready to run, since its start."""
        total: dict[tuple[int, int], int] = {}
        for pid in tree:
            with contextlib.suppress(OSError, psutil.Error, ValueError, IndexError):
                total.update(_threads_ns(pid))
        return total

    def rss_gib(self, tree: Sequence[int]) -> float:
        """Resident memory of the tree as of the last refresh; pages that its processes share count in each."""
        for pid in tree:
            if pid not in self._rss:
                try:
                    self._rss[pid] = psutil.Process(pid).memory_info().rss / GIB
                except psutil.Error:
                    self._rss[pid] = 0.0
        return math.fsum(self._rss[pid] for pid in tree)


def _threads_ns(pid: int) -> dict[tuple[int, int], int]:
    tasks = PROC / str(pid) / "task"
    if not (tasks.parent / "schedstat").exists():  # no Linux, or a kernel without scheduler statistics
        cpu = psutil.Process(pid).cpu_times()
        return {(pid, pid): int((cpu.user + cpu.system) * 1e9)}
    total: dict[tuple[int, int], int] = {}
    for thread in tasks.iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):  # ended between the two looks
            ran_ns, waited_ns = (thread / "schedstat").read_text().split()[:2]
            total[(pid, int(thread.name))] = int(ran_ns) + int(waited_ns)
    return total


def _children_of_all() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for pid in psutil.pids():
        try:
            parent = _parent(pid)
        except (OSError, ValueError, IndexError, psutil.Error):
            continue
        children.setdefault(parent, []).append(pid)
    return children


def _parent(pid: int) -> int:
    stat = PROC / str(pid) / "stat"
    if not PROC.is_dir():
        return psutil.Process(pid).ppid()
    # "pid (name with any characters) state ppid ...": the last parenthesis ends the name
    return int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
