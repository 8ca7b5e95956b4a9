"""Finds what is wrong in a stream of GPU windows, machines' memory and task reports, without being told what is usual.

Devices are looked at in devicewatch.py, tasks in taskwatch.py, the ranks of one in gangwatch.py. Everything is bounded:
what is not heard of any more is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from areal_sky.core.devicewatch import DeviceWatch, is_calm
from areal_sky.core.findings import Finding, Kind, Where
from areal_sky.core.heartbeat import HostMemory, RankOn
from areal_sky.core.memoryleak import LeakWatch
from areal_sky.core.taskwatch import TaskWatch
from areal_sky.core.telemetry import GpuWindow
from areal_sky.core.windowcodec import Batch

FORGET_S = 600.0  # a device that was not heard of for longer
SILENT_S = 60.0  # nothing is said of the memory of a machine that is silent for longer: it may have run out
MAX_TASKS = 20_000
SAME_S = 0.02  # a window's end on the head's clock varies with how long its heartbeat took

DeviceKey = tuple[str, int, int]  # replica, node, device


class Run(NamedTuple):
    """One attempt of a task that runs. `phase_low`: it has said that it leaves its GPUs idle."""

    task_id: str
    attempt: int
    phase_low: bool = False


class _Node:
    """What was heard of a node. Who runs there changes rarely, and so what follows from it is kept."""

    __slots__ = ("devices", "heard_s", "key", "memory", "owners", "ranks", "runs", "seen", "tasks", "where")

    def __init__(self, replica: str, index: int):
        self.key = (replica, index)
        self.devices: dict[int, DeviceWatch] = {}
        self.seen: dict[int, float] = {}  # each device's newest window
        self.heard_s = 0.0
        self.memory = LeakWatch()  # of the machine
        self.runs: frozenset[Run] = frozenset()  # on it when its memory was last looked at
        self.ranks: Sequence[RankOn] = ()
        self.owners: dict[int, str] = {}  # device -> the one task whose only rank there has it
        self.tasks: dict[str, list[RankOn]] = {}
        self.where: dict[int, Where] = {}

    def run(self, ranks: Sequence[RankOn]) -> None:
        if ranks == self.ranks:
            return
        self.ranks, self.owners, self.tasks, self.where = ranks, {}, {}, {}
        for r in ranks:
            self.tasks.setdefault(r.task_id, []).append(r)
            for gpu in r.gpus:
                self.owners[gpu] = "" if gpu in self.owners else r.task_id

    def see_memory(self, memory: HostMemory, runs: frozenset[Run]) -> None:
        """One run more fills memory as it starts: growth counts from then on."""
        if not runs <= self.runs:
            self.memory.begin(memory.at_s)
        self.runs = runs
        self.memory.see(memory.at_s, memory.used_gib)
        self.memory.look(memory.at_s, memory.total_gib)

    def machine(self) -> Where:
        return Where("", None, *self.key, tasks=tuple(sorted(self.tasks)))

    def place(self, device: int) -> Where:
        where = self.where.get(device)
        if where is None:
            tasks = tuple(sorted(t for t, ranks in self.tasks.items() if any(device in r.gpus for r in ranks)))
            where = self.where[device] = Where("", None, *self.key, device, tasks)
        return where


class Detector:
    """Told of windows, reports and runs as they come; `findings` says what is wrong now."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[str, int], _Node] = {}
        self._suspects: dict[DeviceKey, DeviceWatch] = {}  # the healthy, nearly all, are not looked at again
        self._filling: dict[tuple[str, int], _Node] = {}  # whose memory runs out
        self._forgot_s = 0.0
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

    def heard(
        self, replica: str, index: int, ranks: Sequence[RankOn], windows: Batch, memory: HostMemory | None = None
    ) -> None:
        """Windows of one node, and who runs there. What is sent twice, since our answer was lost, counts once."""
        node = self._nodes.get((replica, index))
        if node is None:
            node = self._nodes[replica, index] = _Node(replica, index)
        node.run(ranks)
        if memory is not None:
            node.heard_s = memory.at_s
            node.see_memory(memory, frozenset(Run(t, self._runs.get(t, 0)) for t in node.tasks))
            if node.memory.leak is not None:
                self._filling[node.key] = node
            else:
                self._filling.pop(node.key, None)
        windows = windows.newer(node.seen, windows["end_s"], SAME_S)
        if not windows:
            return
        node.heard_s = windows["end_s"][-1]
        calm = is_calm(windows)
        for number, places in windows.places.items():
            device = node.devices.get(number)
            if device is None:
                device = node.devices[number] = DeviceWatch()
            owner = node.owners.get(number, "")
            device.see(windows, places, (owner, self._runs.get(owner, 0)) if owner else None, calm)
            if device.suspicious():
                self._suspects[replica, index, number] = device
        for task_id, mine in node.tasks.items():
            if (task := self._tasks.get(task_id)) is not None:
                _see_gang(task, node.key, mine, windows)

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
        self._forget_silent(now_s)
        for key, device in list(self._suspects.items()):
            node = self._nodes[key[:2]]
            where = node.place(key[2])
            peers = [d.latest for n, d in node.devices.items() if n != key[2] and d.latest is not None]
            for f in device.findings(where, peers, now_s):
                if f.kind is not Kind.MEMORY_LEAK:
                    found.append(f)
                    continue
                task_id = where.tasks[0] if where.tasks else ""
                if task_id not in leaks or _left_s(f) < _left_s(leaks[task_id]):
                    leaks[task_id] = f
            if not device.suspicious():
                del self._suspects[key]
        # The GPUs of a gang leak alike: the one that is full first speaks for all.
        for task_id, f in leaks.items():
            found.append(replace(f, where=Where(task_id), evidence=f"{f.where}: {f.evidence}"))
        for node in self._filling.values():
            if node.memory.leak is not None and now_s - node.heard_s <= SILENT_S:
                found.append(node.memory.leak.finding(node.machine(), "the machine's memory"))
        for task in self._tasks.values():
            found.extend(task.findings(now_s))
        return found

    def devices(self) -> Iterator[tuple[Where, GpuWindow]]:
        """The latest window of every device."""
        for node in self._nodes.values():
            for number, device in node.devices.items():
                if device.latest is not None:
                    yield node.place(number), device.latest

    def _forget_silent(self, now_s: float) -> None:
        if now_s - self._forgot_s > FORGET_S / 10:
            self._forgot_s = now_s
            for key in [k for k, n in self._nodes.items() if now_s - n.heard_s > FORGET_S]:
                self._forget(key)

    def _forget(self, key: tuple[str, int]) -> None:
        node = self._nodes.pop(key, None)
        self._filling.pop(key, None)
        for device in node.devices if node is not None else ():
            self._suspects.pop((*key, device), None)


def _see_gang(task: TaskWatch, node: tuple[str, int], ranks: Sequence[RankOn], windows: Batch) -> None:
    """What the GPUs of a task's ranks on a node tell of it, second by second."""
    task.see_loads(windows, windows.in_time(list({gpu for r in ranks for gpu in r.gpus})))
    for r in ranks:
        if (gpu := next((g for g in r.gpus if g in windows.places), None)) is not None:
            task.gang.places[r.rank] = (*node, gpu)
            task.gang.see_gpus(r.rank, windows, r.gpus)


def _left_s(leak: Finding) -> float:
    return leak.metrics["seconds_to_oom"]
