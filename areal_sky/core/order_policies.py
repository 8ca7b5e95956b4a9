"""Orders besides the default one (core/queueing.py), by name. Each is a factory: numbers (of a preset) -> an order.

- `weighted`: the default: priority x weight x kind + ageing + urgency of deadlines.
- `fifo`: by submit, nothing else; nobody is preempted.
- `shortest`: least expected service first, weighted, learnt from tasks that have ended (core/prediction.py).
- `attained`: least attained service first, in a few levels, for those who want no prediction at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from areal_sky.core.prediction import RunningTimes
from areal_sky.core.queueing import DEFAULT_PRIORITY, Entry, WeightedOrder

HALVING_S = 60 * 86400.0
HYSTERESIS = 2.0
LOWEST_RANK = 0.01  # priority 0 still has a place in the order


class ShortestOrder:
    """key = log2(expected service x GPUs / rank) - urgency + submit time / halving time; lower goes first.

    Expected service is the Gittins index of the running time still to come: with equal ranks this is the order that
    minimises the mean completion time where lengths are known as distributions only; with ranks (priority x weight x
    kind / default priority) it is the c-mu rule. Waiting halves a task's key every `halving_s` (of expected service),
    whatever it is, so the order of waiting tasks stays static and nobody starves. `hysteresis`: a running task is
    ended only for one that needs less than 1/hysteresis of its expected service.

    It learns by `submitted`, `ended` and from the service it is asked about; `moved` names tasks to be asked again.
    """

    def __init__(
        self,
        ageing_halving_s: float = HALVING_S,
        hysteresis: float = HYSTERESIS,
        weighted: WeightedOrder | None = None,
        times: RunningTimes | None = None,
    ):
        """`ageing_halving_s` > 0 (inf: no ageing), `hysteresis` >= 1. `weighted` gives kinds and deadlines a value.

        Raises ValueError.
        """
        if not ageing_halving_s > 0:
            raise ValueError(f"ageing_halving_s is {ageing_halving_s:g}, expected a time above 0")
        if not (hysteresis >= 1 and math.isfinite(hysteresis)):
            raise ValueError(f"hysteresis is {hysteresis:g}, expected a number of at least 1")
        self.times = times or RunningTimes()
        self._weighted = weighted or WeightedOrder()
        self._halving_s = ageing_halving_s
        self._margin = math.log2(hysteresis)

    # ---------------------------------------------------------------- OrderPolicy

    def key(self, entry: Entry, served_s: float, now_s: float) -> tuple[float, float]:
        """See OrderPolicy."""
        self.submitted(entry)
        effort = self.times.index_s(entry.task_id, served_s) * max(gpus_of(entry), 1.0) / 3600.0
        urgency, until_s = self._weighted.urgency(entry, served_s, now_s)
        rank = max(self._weighted.rank(entry), LOWEST_RANK) / DEFAULT_PRIORITY
        return math.log2(effort / rank) - urgency + entry.submitted_s / self._halving_s, until_s

    def standing(self, entry: Entry, key: float) -> float:
        """By its key: what has waited long may end others, else ageing would help nobody on a full cluster."""
        return key

    def may_preempt(self, waiting: Entry, waiting_key: float, victim: Entry, victim_key: float, now_s: float) -> bool:
        """By a margin, so that equals never push each other out in turn."""
        return waiting_key + self._margin < victim_key

    # ---------------------------------------------------------------- what it learns

    def submitted(self, entry: Entry) -> None:
        """A task that it will be asked about."""
        like = (entry.kind, entry.pool, gpus_of(entry), entry.like)
        self.times.submitted(entry.task_id, like, entry.submitted_s, entry.estimate_s)

    def ended(self, entry: Entry, served_s: float, finished: bool) -> None:
        """`finished`: by itself, after `served_s` of service in all."""
        self.times.ended(entry.task_id, served_s, finished=finished)

    def moved(self) -> list[str]:
        """Tasks whose key has changed though neither time nor their own service did it."""
        return self.times.moved()

    def next_step_s(self, entry: Entry, served_s: float) -> float:
        """Service after which a running task's key changes next."""
        return self.times.next_step_s(served_s)


@dataclass(frozen=True, slots=True)
class FifoOrder:
    """First come, first served. Nobody is preempted."""

    def key(self, entry: Entry, served_s: float, now_s: float) -> tuple[float, float]:
        """See OrderPolicy."""
        return entry.submitted_s, math.inf

    def standing(self, entry: Entry, key: float) -> float:
        """See OrderPolicy."""
        return key

    def may_preempt(self, waiting: Entry, waiting_key: float, victim: Entry, victim_key: float, now_s: float) -> bool:
        """Never."""
        return False


@dataclass(frozen=True, slots=True)
class AttainedOrder:
    """Least attained service (GPU-seconds) first, in levels; by submit within one.

    Discretised two-dimensional LAS as in Tiresias (Gu et al., NSDI'19). `levels_gpu_s`: ascending limits; a task that
    has had more than all of them is on the last level.
    """

    levels_gpu_s: tuple[float, ...] = tuple(3600.0 * 4.0**i for i in range(7))

    def key(self, entry: Entry, served_s: float, now_s: float) -> tuple[float, float]:
        """See OrderPolicy. A level weighs more than any difference between submit times."""
        return self._level(entry, served_s) * 1e10 + entry.submitted_s, math.inf

    def standing(self, entry: Entry, key: float) -> float:
        """See OrderPolicy."""
        return key

    def may_preempt(self, waiting: Entry, waiting_key: float, victim: Entry, victim_key: float, now_s: float) -> bool:
        """Within a level as between levels: an earlier task goes first."""
        return waiting_key < victim_key

    def next_step_s(self, entry: Entry, served_s: float) -> float:
        """Service at which a running task falls to the next level."""
        level = self._level(entry, served_s)
        return self.levels_gpu_s[level] / max(gpus_of(entry), 1.0) if level < len(self.levels_gpu_s) else math.inf

    def _level(self, entry: Entry, served_s: float) -> int:
        attained = served_s * max(gpus_of(entry), 1.0) + 1e-3
        return sum(attained >= limit for limit in self.levels_gpu_s)


def gpus_of(entry: Entry) -> float:
    """GPUs of the whole gang."""
    return entry.ask.count * entry.ask.bundle.gpus


def _weighted(numbers: Mapping[str, float], ageing_per_hour: float) -> OrderPolicy:
    n = _known(numbers, {"margin": 1.0})
    if not n["margin"] > 0:
        raise ValueError(f"margin is {n['margin']:g}, expected a score above 0: equals would preempt each other")
    return WeightedOrder(ageing_per_hour, margin=n["margin"])


def _shortest(numbers: Mapping[str, float], ageing_per_hour: float) -> OrderPolicy:
    n = _known(numbers, {"ageing_halving": HALVING_S, "hysteresis": HYSTERESIS})
    return ShortestOrder(n["ageing_halving"], n["hysteresis"], WeightedOrder(ageing_per_hour))


def _attained(numbers: Mapping[str, float], ageing_per_hour: float) -> OrderPolicy:
    n = _known(numbers, {"first_level": 3600.0, "factor": 4.0, "levels": 7.0})
    if not (n["first_level"] > 0 and n["factor"] > 1 and 1 <= n["levels"] <= 64):
        raise ValueError("expected first_level above 0, factor above 1 and 1 to 64 levels")
    return AttainedOrder(tuple(n["first_level"] * n["factor"] ** i for i in range(int(n["levels"]))))


def _fifo(numbers: Mapping[str, float], ageing_per_hour: float) -> OrderPolicy:
    _known(numbers, {})
    return FifoOrder()


# kind -> (its numbers, ageing_per_hour of the spec) -> order. Raises ValueError for numbers it does not know or take.
BUILT_IN: Mapping[str, Callable[[Mapping[str, float], float], OrderPolicy]] = {
    "weighted": _weighted, "shortest": _shortest, "attained": _attained, "fifo": _fifo,
}  # fmt: skip


def _known(numbers: Mapping[str, Any], defaults: Mapping[str, float]) -> dict[str, float]:
    for name, value in numbers.items():
        if name not in defaults:
            raise ValueError(f"no number {name!r} is known, expected {', '.join(defaults) or 'none'}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
            raise ValueError(f"{name} is {value!r}, expected a number")
    return {**defaults, **{name: float(value) for name, value in numbers.items()}}
