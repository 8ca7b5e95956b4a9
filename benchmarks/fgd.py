"""Peers of the placement benchmark: best fit, and fragmentation gradient descent.

Fragmentation gradient descent (FGD): Weng et al., "Beware of Fragmentation", USENIX ATC'23, section 4, done anew. The
fragmentation of a node for a task type is what is left of its GPUs that the type cannot use: all of it where the type
does not fit (or wants no GPU), else the devices with less room than one device's share of it. It is weighed with how
often each type comes; a pod goes where it makes this grow least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from areal_sky.adapters.traces import TraceNode, TracePod

EPS = 1e-6
Array = Any  # numpy's own types say nothing about shapes


class PeerCluster:
    """What is free on each node, kept by numpy: devices in columns, -1 where a node has fewer."""

    def __init__(self, nodes: Sequence[TraceNode]):
        most = max(n.gpus for n in nodes)
        self.gpus = np.array([[1.0] * n.gpus + [-1.0] * (most - n.gpus) for n in nodes])
        self.cpus = np.array([n.cpus for n in nodes])
        self.memory = np.array([n.memory_gib for n in nodes])
        self.models = np.array([n.model for n in nodes])

    def feasible(self, pod: TracePod) -> Array:
        """Which nodes can take it."""
        able = (self.cpus + EPS >= pod.cpus) & (self.memory + EPS >= pod.memory_gib)
        if pod.gpus:
            able &= (self.gpus >= pod.gpu_share - EPS).sum(axis=1) >= pod.gpus
        if pod.models:
            able &= np.isin(self.models, pod.models)
        return able

    def take(self, node: int, devices: Sequence[int], pod: TracePod) -> None:
        self.cpus[node] -= pod.cpus
        self.memory[node] -= pod.memory_gib
        for device in devices:
            self.gpus[node, device] = max(0.0, self.gpus[node, device] - pod.gpu_share)

    @property
    def free_gpus(self) -> float:
        return float(np.clip(self.gpus, 0.0, None).sum())

    def tightest(self, node: int, pod: TracePod) -> list[int]:
        """The devices with least room that will do."""
        here = self.gpus[node]
        fitting = [d for d in range(len(here)) if here[d] >= pod.gpu_share - EPS]
        return sorted(fitting, key=lambda d: (here[d], d))[: pod.gpus]


class BestFit:
    """The node on which least is left of GPUs, then of CPUs and memory (each as a share of the largest node)."""

    def __init__(self, nodes: Sequence[TraceNode]):
        self.cluster = PeerCluster(nodes)
        self._largest = (
            max(n.gpus for n in nodes), max(n.cpus for n in nodes), max(n.memory_gib for n in nodes)
        )  # fmt: skip

    def place(self, pod: TracePod) -> bool:
        c = self.cluster
        able = np.flatnonzero(c.feasible(pod))
        if not len(able):
            return False
        gpus, cpus, memory = self._largest
        left = np.clip(c.gpus[able], 0, None).sum(axis=1) / gpus + c.cpus[able] / cpus + c.memory[able] / memory
        node = int(able[np.argmin(left)])
        c.take(node, c.tightest(node, pod), pod)
        return True


class FragmentationDescent:
    """See the module. `pods` are those whose types count, each as often as it is there."""

    def __init__(self, nodes: Sequence[TraceNode], pods: Sequence[TracePod]):
        self.cluster = PeerCluster(nodes)
        counts: dict[tuple[float, int, float, tuple[str, ...]], int] = {}
        for pod in pods:
            kind = (pod.cpus, pod.gpus, pod.gpu_share, pod.models)
            counts[kind] = counts.get(kind, 0) + 1
        kinds = list(counts)
        self._weight = np.array([counts[k] for k in kinds]) / len(pods)
        self._cpus = np.array([k[0] for k in kinds])
        self._count = np.array([k[1] for k in kinds])
        self._share = np.array([k[2] for k in kinds])
        models = self.cluster.models
        self._allowed = np.array([[not k[3] or m in k[3] for k in kinds] for m in models])
        self._scores: dict[TracePod, Array] = {}
        self._devices: dict[TracePod, Array] = {}
        self._seen: dict[TracePod, int] = {}
        self._changes: list[int] = []

    def place(self, pod: TracePod) -> bool:
        kind = TracePod("", pod.cpus, pod.memory_gib, pod.gpus, pod.gpu_share, pod.models)
        if kind not in self._scores:
            n = len(self.cluster.cpus)
            self._scores[kind], self._devices[kind] = np.full(n, np.inf), np.zeros(n, dtype=int)
            stale = np.arange(n)
        else:
            stale = np.array(sorted(set(self._changes[self._seen[kind] :])), dtype=int)
        if len(stale):
            self._score(kind, stale)
        self._seen[kind] = len(self._changes)
        node = int(np.argmin(self._scores[kind]))
        if self._scores[kind][node] == np.inf:
            return False
        devices = [int(self._devices[kind][node])] if pod.gpus == 1 else self.cluster.tightest(node, pod)
        self.cluster.take(node, devices, pod)
        self._changes.append(node)
        return True

    def _score(self, pod: TracePod, nodes: Array) -> None:
        """Growth of fragmentation on these nodes, inf where it does not fit, and the best device for one of one GPU."""
        c = self.cluster
        scores, devices = self._scores[pod], self._devices[pod]
        scores[nodes] = np.inf
        nodes = nodes[c.feasible(pod)[nodes]]
        if not len(nodes):
            return
        before = self._fragments(nodes, c.gpus[nodes], c.cpus[nodes])
        cpus = c.cpus[nodes] - pod.cpus
        if pod.gpus == 1:
            for device in range(c.gpus.shape[1]):
                after = c.gpus[nodes].copy()
                able = after[:, device] >= pod.gpu_share - EPS
                after[:, device] = np.maximum(after[:, device] - pod.gpu_share, 0.0)
                growth = np.where(able, self._fragments(nodes, after, cpus) - before, np.inf)
                better = growth < scores[nodes] - 1e-12
                devices[nodes[better]] = device
                scores[nodes] = np.where(better, growth, scores[nodes])
            return
        after = c.gpus[nodes].copy()
        for row, node in enumerate(nodes):
            for device in c.tightest(int(node), pod):
                after[row, device] -= pod.gpu_share
        scores[nodes] = self._fragments(nodes, after, cpus) - before

    def _fragments(self, nodes: Array, gpus: Array, cpus: Array) -> Array:
        """Fragmentation of each node, were this free there."""
        room = np.clip(gpus, 0.0, None)
        total = room.sum(axis=1)
        usable = gpus[:, None, :] >= self._share[None, :, None] - EPS  # nodes x types x devices
        fits = (usable.sum(axis=2) >= self._count) & (cpus[:, None] + EPS >= self._cpus) & self._allowed[nodes]
        useless = (room[:, None, :] * ~usable).sum(axis=2)
        fragments = np.where(fits & (self._count > 0), useless, total[:, None])
        return fragments @ self._weight
