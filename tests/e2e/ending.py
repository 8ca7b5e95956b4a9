"""Ends whatever a test left behind, by pid: controllers first, else they would bring the nodes back."""

from __future__ import annotations

from pathlib import Path

from areal_sky.adapters import processes
from areal_sky.adapters.store import EventStore
from areal_sky.core.events import ControllerStarted


def end_everything(home: Path) -> None:
    for db in home.glob("clusters/*/events.db"):
        store = EventStore(db)
        pids = [r.event.pid for r in store.read() if isinstance(r.event, ControllerStarted)]
        store.close()
        processes.kill([p for p in pids if b"controller" in command(p)])
    for pids in processes.marked(f"{home}/clusters/").values():
        processes.kill(pids)


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
