"""Pretend machines of this host as the orphan sweep needs them: found by their processes' mark, ended by pid."""

from __future__ import annotations

import os
import time
from pathlib import Path

from areal_sky.adapters import processes
from areal_sky.core.orphans import NodeFound

END_S = 5.0


def pretend_nodes() -> tuple[NodeFound, ...]:
    """Every marked node with processes of this user, whichever state folder it belongs to.

    A mark is `<cluster's state folder>::<replica>/<index>`. Processes that see other files (containers) are left out:
    their folder is not ours to look for, even if it is called the same.
    """
    found: dict[tuple[str, str], dict[str, list[int]]] = {}
    for mark, pids in processes.marked("/").items():
        folder, _, node = mark.rpartition("::")
        replica, _, index = node.rpartition("/")
        mine = [p for p in pids if _is_here(p)]
        if folder and replica and index.isdigit() and mine:
            found.setdefault((folder, replica), {})[mark] = mine
    return tuple(
        NodeFound(
            folder=folder,
            replica=replica,
            marks=tuple(sorted(marks)),
            pids=(pids := tuple(sorted(p for ps in marks.values() for p in ps))),
            started_s=min((t for p in pids if (t := processes.identity(p)) is not None), default=time.time()),
            folder_exists=Path(folder, "events.db").exists(),
        )
        for (folder, replica), marks in sorted(found.items())
    )


def end_marked(marks: tuple[str, ...]) -> list[int]:
    """Kills every process of this user with exactly one of these marks; returns the pids that would not go."""
    until_s = time.monotonic() + END_S
    while True:
        left = [p for m in marks for p in processes.marked(m).get(m, []) if _is_here(p)]
        if not left or time.monotonic() > until_s:
            return left
        processes.kill(left)
        time.sleep(0.05)


def _is_here(pid: int) -> bool:
    """Ours to judge: this user's, with the same view of the disk, and not this very process."""
    if pid == os.getpid():
        return False
    try:
        same_user = Path("/proc", str(pid)).stat().st_uid == os.getuid()
        same_view = Path("/proc", str(pid), "ns/mnt").readlink() == Path("/proc/self/ns/mnt").readlink()
    except OSError:
        return False
    return same_user and same_view
