"""The pretend GPUs of a local node. Their load is real: it follows the tasks that run on the node.

A task's runner leaves `<node_dir>/running/<task_id>.<rank>.json` while it runs. From that:

- utilization: the share of the time since the last read in which the task's process tree had something to run.
  It is taken from the kernel's run time plus run-queue wait, so that a task that shares its CPU core with others is
  still seen as busy: NVML's number too says "a kernel was there", not "how much of the chip it used". Threads add up,
  to 1 at most. A process that is born and dies between two reads is not seen.
- memory: the tree's resident memory, spread evenly over its GPUs.
- temperature and power: made up, a first-order answer to the utilization (constants below).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from areal_sky.adapters.proctree import ProcessTrees
from areal_sky.core.model import NodeShape
from areal_sky.core.telemetry import GpuSample, Validity

DEFAULT_MEMORY_GIB = 80.0
# Typical of a data-centre card in a cooled room; nothing depends on them but what `top` shows.
IDLE_CELSIUS, BUSY_CELSIUS, CELSIUS_TIME_S = 34.0, 76.0, 20.0
IDLE_WATTS, BUSY_WATTS, WATTS_TIME_S = 60.0, 400.0, 1.0


@dataclass(frozen=True, slots=True)
class RunningRank:
    """One rank of a task that runs on this node, as its runner declared it. `gpus` are the node's GPU numbers."""

    task_id: str
    rank: int
    gpus: tuple[int, ...]
    pid: int
    kind: str


def running_ranks(node_dir: Path) -> tuple[RunningRank, ...]:
    """Who runs on the node of that folder. A file that is half written or damaged is left out: it will be back."""
    ranks: list[RunningRank] = []
    folder = node_dir / "running"
    for name in _names(folder):
        if not name.endswith(".json"):
            continue
        path = f"{folder}/{name}"
        try:
            told = os.stat(path)  # noqa: PTH116 - as for _names
            ranks.append(_rank(path, told.st_ino, told.st_mtime_ns, told.st_size))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return tuple(ranks)


@lru_cache(256)
def _rank(path: str, *_: int) -> RunningRank:
    """What the file says, read once for each of its states."""
    raw = json.loads(Path(path).read_text())
    return RunningRank(
        task_id=str(raw["task_id"]),
        rank=int(raw["rank"]),
        gpus=tuple(int(g) for g in raw["gpus"]),
        pid=int(raw["pid"]),
        kind=str(raw.get("kind", "")),
    )


def marks(node_dir: Path) -> frozenset[str]:
    """Ids of the tasks that asked for their node to be watched closely; see `telemetry.watch_closely`."""
    return frozenset(_names(node_dir / "watched"))


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - a fraction of glob's price, and paid each second
    except OSError:
        return []


@dataclass(slots=True)
class _Device:
    celsius: float = IDLE_CELSIUS
    watts: float = IDLE_WATTS
    utilization: float = 0.0
    memory_gib: float = 0.0


@dataclass(slots=True)
class _Load:
    gpus: tuple[int, ...]
    utilization: float
    rss_gib: float


@dataclass(slots=True)
class _Seen:
    """What the last read knew of one rank."""

    pid: int
    threads_ns: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])


class SimulatedGpuReader:
    """A GpuReader over the running tasks of one pretend node."""

    def __init__(self, node_dir: Path | str, shape: NodeShape):
        self._node_dir = Path(node_dir)
        self._total_gib = shape.gpu_memory_gib or DEFAULT_MEMORY_GIB
        self._name = f"{shape.accelerator or 'GPU'} (simulated)"
        self._devices = [_Device() for _ in range(math.ceil(shape.gpus))]
        self._trees = ProcessTrees()
        self._seen: dict[tuple[str, int], _Seen] = {}
        self._last_s: float | None = None

    def read(self, now_s: float) -> Sequence[GpuSample]:
        """One sample per device. The first read of all spans the tasks' whole lives."""
        elapsed_s = None if self._last_s is None else now_s - self._last_s
        if elapsed_s is None or elapsed_s > 0:  # else two reads at one instant, or a clock set back: as before
            loads = self._loads(now_s, elapsed_s)
            for index, device in enumerate(self._devices):
                mine = [load for load in loads if index in load.gpus]
                device.utilization = min(1.0, math.fsum(load.utilization for load in mine))
                used = math.fsum(load.rss_gib / len(load.gpus) for load in mine)
                device.memory_gib = min(self._total_gib, used)
                _settle(device, elapsed_s or 0.0)
        self._last_s = now_s
        return tuple(self._sample(index, now_s) for index in range(len(self._devices)))

    def relieve(self) -> bool:
        return False

    def close(self) -> None:
        self._seen.clear()

    def _loads(self, now_s: float, elapsed_s: float | None) -> list[_Load]:
        self._trees.refresh(now_s)
        loads: list[_Load] = []
        seen: dict[tuple[str, int], _Seen] = {}
        for rank in running_ranks(self._node_dir):
            if not rank.gpus:
                continue
            tree = self._trees.of(rank.pid)
            if not tree:
                continue  # its process is gone, the file is not yet
            key = (rank.task_id, rank.rank)
            before = self._seen.get(key)
            threads_ns = self._trees.runnable_ns(tree)
            if before is None or before.pid != rank.pid:
                # New to us: what it did since its birth, over its age, but not over less than the time since we looked.
                age_s = max(self._trees.age_s(rank.pid, now_s), elapsed_s or 0.0, 1e-3)
                utilization = sum(threads_ns.values()) / 1e9 / age_s
            else:
                ran_ns = sum(max(0, ns - before.threads_ns.get(t, 0)) for t, ns in threads_ns.items())
                utilization = ran_ns / 1e9 / (elapsed_s or 1.0)
            seen[key] = _Seen(rank.pid, threads_ns)
            loads.append(_Load(rank.gpus, min(1.0, utilization), self._trees.rss_gib(tree)))
        self._seen = seen
        return loads

    def _sample(self, index: int, now_s: float) -> GpuSample:
        device = self._devices[index]
        return GpuSample(
            device=index,
            t_s=now_s,
            name=self._name,
            utilization_frac=device.utilization,
            memory_used_gib=device.memory_gib,
            memory_total_gib=self._total_gib,
            temperature_celsius=round(device.celsius, 1),
            power_watts=round(device.watts, 1),
            validity=Validity.KNOWN,
        )


def _settle(device: _Device, elapsed_s: float) -> None:
    """Move temperature and power towards what this utilization would settle at."""
    celsius = IDLE_CELSIUS + (BUSY_CELSIUS - IDLE_CELSIUS) * device.utilization
    watts = IDLE_WATTS + (BUSY_WATTS - IDLE_WATTS) * device.utilization
    device.celsius += (celsius - device.celsius) * (1 - math.exp(-elapsed_s / CELSIUS_TIME_S))
    device.watts += (watts - device.watts) * (1 - math.exp(-elapsed_s / WATTS_TIME_S))
