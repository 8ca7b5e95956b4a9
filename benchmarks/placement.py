"""GPUs that stay unallocated when a cluster is full: our placement, best fit, fragmentation gradient descent.

`--nodes CSV --pods CSV`: machines and pods in the format of Alibaba gpu-v2023; without them a small synthetic cluster,
made here from a seed. As in Weng et al. (USENIX ATC'23), pods are drawn from the list at random, with replacement, and
arrive one by one, never to leave; one that does not fit is passed by. Arrivals end once what they asked for is
`SATURATED` times all GPUs. Per policy the mean over `SEEDS` draws of unallocated GPUs / all GPUs, at the end and when
the arrivals had asked for as many GPUs as there are (`at_100`).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from areal_sky.adapters.traces import TraceNode, TracePod, read_alibaba_nodes, read_alibaba_pods
from areal_sky.core.admission import Admission, Entry, Place
from areal_sky.core.gangs import Ask
from areal_sky.core.model import Bundle
from areal_sky.core.order_policies import FifoOrder
from areal_sky.core.room import NodeRoom
from areal_sky.errors import InvalidInput
from benchmarks.fgd import BestFit, FragmentationDescent

SATURATED = 1.3
SEEDS = (1, 2, 3)


class Placing(Protocol):
    """A cluster that pods come to."""

    def place(self, pod: TracePod) -> bool: ...


class Ours:
    """The production engine: every pod a task of one bundle."""

    def __init__(self, nodes: Sequence[TraceNode]):
        self._engine = Admission(FifoOrder(), patience_s=float("inf"))
        self._n = 0
        for n in nodes:
            room = NodeRoom(n.name, "main", (1.0,) * n.gpus, n.cpus, n.memory_gib, n.model, n.gpus > 0, n.name)
            self._engine.set_node(room)

    def place(self, pod: TracePod) -> bool:
        self._n += 1
        bundle = Bundle(gpus=pod.gpus * pod.gpu_share, cpus=pod.cpus, memory_gib=pod.memory_gib)
        entry = Entry(str(self._n), self._n, Ask(bundle, 1, accelerators=pod.models), submitted_s=float(self._n))
        self._engine.submit(entry)
        if any(isinstance(d, Place) for d in self._engine.decide(float(self._n))):
            return True
        self._engine.ended(entry.task_id, float(self._n))
        return False


def measure(nodes: str | None = None, pods: str | None = None) -> dict[str, Any]:
    if (nodes is None) != (pods is None):
        raise InvalidInput("--nodes and --pods go together")
    if nodes is not None and pods is not None:
        machines, list_ = read_alibaba_nodes(Path(nodes)), read_alibaba_pods(Path(pods))
    else:
        machines, list_ = synthetic()
    policies: dict[str, Callable[[], Placing]] = {
        "ours": lambda: Ours(machines),
        "best_fit": lambda: BestFit(machines),
        "fgd": lambda: FragmentationDescent(machines, list_),
    }
    figures: dict[str, Any] = {"unallocated_gpu_frac": {}, "at_100": {}}
    for name, make in policies.items():
        runs = [fill(make(), machines, arrivals(list_, machines, seed)) for seed in SEEDS]
        figures["unallocated_gpu_frac"][name] = statistics.fmean(end for end, _ in runs)
        figures["at_100"][name] = statistics.fmean(middle for _, middle in runs)
    left = figures["unallocated_gpu_frac"]
    over = {f"ours_minus_{peer}": left["ours"] - left[peer] for peer in ("fgd", "best_fit")}
    return {**figures, **over}


def arrivals(pods: Sequence[TracePod], nodes: Sequence[TraceNode], seed: int) -> list[TracePod]:
    """Pods as they come, until they have asked for `SATURATED` times all GPUs. Raises InvalidInput without any GPU."""
    total = sum(n.gpus for n in nodes)
    if not total or not any(p.gpus for p in pods):
        raise InvalidInput("placement: no node or no pod has a GPU")
    lots = random.Random(seed)
    out: list[TracePod] = []
    asked = 0.0
    while asked < SATURATED * total:
        out.append(lots.choice(pods))
        asked += out[-1].gpu_request
    return out


def fill(cluster: Placing, nodes: Sequence[TraceNode], coming: Sequence[TracePod]) -> tuple[float, float]:
    """Unallocated share of all GPUs at the end, and when the arrivals had asked for all GPUs."""
    total = float(sum(n.gpus for n in nodes))
    asked = used = 0.0
    at_100: float | None = None
    for pod in coming:
        asked += pod.gpu_request
        if cluster.place(pod):
            used += pod.gpu_request
        if at_100 is None and asked >= total:
            at_100 = 1 - used / total
    return 1 - used / total, 1 - used / total if at_100 is None else at_100


def synthetic() -> tuple[tuple[TraceNode, ...], tuple[TracePod, ...]]:
    """40 machines of two sizes; pods with whole GPUs, shares of one, and none. Made up, from a seed."""
    lots = random.Random(1)
    big = [TraceNode(f"big-{i:02}", 96.0, 384.0, 8, "A") for i in range(20)]
    small = [TraceNode(f"small-{i:02}", 32.0, 128.0, 2, "B") for i in range(20)]
    pods: list[TracePod] = []
    for i in range(400):
        gpus, share = lots.choice(((0, 0.0), (1, 1.0), (1, 1.0), (1, 0.8), (1, 0.5), (1, 0.3), (2, 1.0), (8, 1.0)))
        cpus = max(2.0, gpus * lots.choice((4.0, 8.0, 11.0)))
        pods.append(TracePod(f"pod-{i}", cpus, 4 * cpus, gpus, share, ("A",) if gpus == 8 else ()))
    return tuple(big + small), tuple(pods)
