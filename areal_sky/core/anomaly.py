"""Finds what is wrong in a stream of GPU windows and task reports, without being told what is usual.

Devices are looked at in devicewatch.py, tasks in taskwatch.py, the ranks of one in gangwatch.py. Everything is bounded:
what is not heard of any more is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from areal_sky.core.devicewatch import DeviceWatch
from areal_sky.core.findings import Finding, Kind, Where
from areal_sky.core.taskwatch import TaskWatch
from areal_sky.core.telemetry import GpuWindow

FORGET_S = 600.0  # a device that was not heard of for longer
MAX_TASKS = 20_000
SAME_S = 0.02  # a window's end on the head's clock varies with how long its heartbeat took

DeviceKey = tuple[str, int, int]  # replica, node, device


class Run(NamedTuple):
    """One attempt of a task that runs. `phase_low`: it has said that it leaves its GPUs idle."""

    task_id: str
    attempt: int
    phase_low: bool = False


class RankOn(NamedTuple):
    """A rank on a node, and the GPUs that it has there."""

    task_id: str
    rank: int
    gpus: tuple[int, ...]


class Detector:
    """Told of windows, reports and runs as they come; `findings` says what is wrong now."""

    def __init__(self) -> None:
        self._devices: dict[tuple[str, int], dict[int, DeviceWatch]] = {}
        self._on: dict[DeviceKey, tuple[str, ...]] = {}  # tasks of each device
        self._runs: dict[str, int] = {}
        self._tasks: dict[str, TaskWatch] = {}

    # ------------------------------------------------------------ what is told

    def run(self, runs: Iterable[Run], now_s: float) -> None:
        """All that runs now: what does no longer is forgotten, what is new (or runs anew) is learnt afresh."""
        known = {r.task_id: r for r in runs}
        for gone in [t for t, attempt in self._runs.items() if t not in known or known[t].attempt != attempt]:
            del self._runs[gone], self._tasks[gone]
        for task_id, r in known.items():
            if task_id not in self._tasks:
                if len(self._tasks) >= MAX_TASKS:
                    continue
                self._runs[task_id], self._tasks[task_id] = r.attempt, TaskWatch(task_id)
            self._tasks[task_id].enter_phase(r.phase_low, now_s)

    def heard(self, replica: str, index: int, ranks: Sequence[RankOn], windows: Sequence[GpuWindow]) -> None:
        """Windows of one node, and who runs there. What is sent twice counts once."""
        devices = self._devices.setdefault((replica, index), {})
        for w in windows:
            device = devices.get(w.device)
            if device is None:
                device = devices[w.device] = DeviceWatch()
            elif device.latest is not None and w.end_s <= device.latest.end_s + SAME_S:
                continue  # sent twice, since our answer was lost
            mine = [r for r in ranks if w.device in r.gpus]
            key = (replica, index, w.device)
            if mine:
                self._on[key] = tuple(sorted({r.task_id for r in mine}))
            else:
                self._on.pop(key, None)
            owner = mine[0].task_id if len(mine) == 1 else ""
            device.see(w, f"{owner}.{self._runs.get(owner, 0)}" if owner else "")
            for r in mine:
                task = self._tasks.get(r.task_id)
                if task is not None:
                    task.see_load(w.utilization_mean, w.start_s, w.end_s)
                    task.gang.places[r.rank] = key
                    task.gang.see_gpu(r.rank, w.end_s, w.utilization_mean, w.sm_clock_mhz)

    def left(self, replica: str, index: int) -> None:
        """The node has said that it leaves."""
        self._forget((replica, index))

    def reported(
        self, task_id: str, attempt: int, values: Mapping[str, float], t_s: float, rank: int | None = None
    ) -> None:
        """Values that a task tells of itself, NaN included."""
        task = self._tasks.get(task_id)
        if task is not None and self._runs[task_id] == attempt:
            task.see_report(t_s, values, rank)

    # ------------------------------------------------------------ what follows

    def findings(self, now_s: float) -> list[Finding]:
        """Everything that is wrong now."""
        found: list[Finding] = []
        leaks: dict[str, Finding] = {}
        for node, devices in list(self._devices.items()):
            latest = [d.latest for d in devices.values() if d.latest is not None]
            if all(now_s - w.end_s > FORGET_S for w in latest):
                self._forget(node)
                continue
            for number, device in devices.items():
                if not device.suspicious():
                    continue
                where = self._where(node, number)
                peers = [w for w in latest if w.device != number]
                for f in device.findings(where, peers, now_s):
                    if f.kind is not Kind.MEMORY_LEAK:
                        found.append(f)
                        continue
                    task_id = where.tasks[0] if where.tasks else ""
                    if task_id not in leaks or _left_s(f) < _left_s(leaks[task_id]):
                        leaks[task_id] = f
        # The GPUs of a gang leak alike: the one that is full first speaks for all.
        for task_id, f in leaks.items():
            found.append(replace(f, where=Where(task_id), evidence=f"{f.where}: {f.evidence}"))
        for task in self._tasks.values():
            found.extend(task.findings(now_s))
        return found

    def devices(self) -> Iterator[tuple[Where, GpuWindow]]:
        """The latest window of every device."""
        for node, devices in self._devices.items():
            for number, device in devices.items():
                if device.latest is not None:
                    yield self._where(node, number), device.latest

    def _where(self, node: tuple[str, int], device: int) -> Where:
        return Where("", None, *node, device, self._on.get((*node, device), ()))

    def _forget(self, node: tuple[str, int]) -> None:
        for device in self._devices.pop(node, {}):
            self._on.pop((*node, device), None)


def _left_s(leak: Finding) -> float:
    return leak.metrics["seconds_to_oom"]
