"""Orders to compare with, run by the same engine in the same world as ours. Each names its paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from areal_sky.core.order_policies import gpus_of
from areal_sky.core.queueing import Entry
from areal_sky.core.runtimegrid import EDGES_S, N_BUCKETS, bucket_of, gittins_index
from areal_sky.run.simulation.simtask import Clairvoyance

STEP, LEAST_STEP_S = 0.25, 60.0


class Srtf:
    """Shortest remaining time first, clairvoyant and preemptive: Schrage and Miller, Operations Research 1966."""

    def __init__(self, known: Clairvoyance):
        self._needs_s = known.needs_s

    def key(self, entry: Entry, served_s: float, now_s: float) -> tuple[float, float]:
        return self._needs_s[entry.task_id] - served_s, math.inf

    def standing(self, entry: Entry, key: float) -> float:
        return key

    def may_preempt(self, waiting: Entry, waiting_key: float, victim: Entry, victim_key: float, now_s: float) -> bool:
        return waiting_key < victim_key

    def next_step_s(self, entry: Entry, served_s: float) -> float:
        """A running task's key changes all the time: steps of a quarter of what is left are near enough."""
        left_s = self._needs_s[entry.task_id] - served_s
        return served_s + max(STEP * left_s, LEAST_STEP_S)


@dataclass(frozen=True, slots=True)
class Gittins:
    """The Gittins index that knows the distribution of running times of each GPU count beforehand, x GPUs.

    The two-dimensional Gittins index of Tiresias (Gu et al., NSDI'19), on the same octaves as ours and with the same
    hysteresis.
    """

    tables: dict[float, list[float]]
    hysteresis: float = 2.0

    @classmethod
    def knowing(cls, durations_s: Sequence[tuple[int, float]]) -> Gittins:
        """From (GPUs, running time) of all tasks that will ever come."""
        masses: dict[float, list[float]] = {}
        for gpus, duration_s in durations_s:
            masses.setdefault(gpus, [0.0] * N_BUCKETS)[bucket_of(duration_s)] += 1.0
        return cls({g: gittins_index(mass) for g, mass in masses.items()})

    def key(self, entry: Entry, served_s: float, now_s: float) -> tuple[float, float]:
        gpus = gpus_of(entry)
        return math.log2(self.tables[gpus][bucket_of(served_s)] * gpus), math.inf

    def standing(self, entry: Entry, key: float) -> float:
        return key

    def may_preempt(self, waiting: Entry, waiting_key: float, victim: Entry, victim_key: float, now_s: float) -> bool:
        return waiting_key + math.log2(self.hysteresis) < victim_key

    def next_step_s(self, entry: Entry, served_s: float) -> float:
        after = bucket_of(served_s) + 1
        return EDGES_S[after] if after < N_BUCKETS else math.inf
