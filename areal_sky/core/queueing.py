"""The order of tasks.

    score = priority x weight of its model type x factor of its kind
          + ageing_per_hour x hours since its submit
          + urgency of its deadline

Ageing is linear and the same for all, so two waiting tasks never swap places by it: the order is that of a key which
does not depend on the time, and the queue needs no re-sort as time goes by. Only a deadline moves a task: its urgency
is a step function of the slack (deadline - now - remaining running time), so each move comes at a time known in
advance (`valid_until_s`). Ties go to the earlier submit number. A requeued task keeps its first submit time and
number, hence its old place.

No task starves by order: urgency and priority are bounded and ageing is not, so after `overtaken_for_s` no newly
submitted task goes before it any more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from areal_sky.core.gangs import Ask
from areal_sky.errors import InvalidInput

DEFAULT_PRIORITY = 5.0
MAX_PRIORITY = 100.0
# What holds others up counts a little more, what can be done again any time a little less.
KIND_FACTORS: Mapping[str, float] = {"train": 1.2, "driver": 1.2, "rollout": 1.0, "reward": 1.0, "eval": 0.8}
# (slack in seconds, points): with at most that much slack a task gains so many points. Ends with the deadline itself.
URGENCY_STEPS: tuple[tuple[float, float], ...] = ((4 * 3600.0, 1.0), (3600.0, 2.0), (900.0, 4.0), (0.0, 8.0))
# Preemption needs that much more rank (score without ageing): equals never push each other out in turn.
PREEMPTION_MARGIN = 1.0


@dataclass(frozen=True, slots=True)
class Entry:
    """What the queue must know of a task.

    `number` counts submits from 1; `priority` is 0..100; `weight` > 0 is that of its model type. `pool`: whose quota it
    uses. `deadline_s` is a Unix time; `estimate_s` its running time as told or predicted, from its start to its end.
    `like` is the same for tasks that may be expected to run about as long (core/prediction.py).
    `min_bundles`: an elastic gang may start with, and shrink to, so many; 0: all of `ask.count`. A preemptible task may
    be ended for another one once it has run for `min_runtime_s` seconds.
    """

    task_id: str
    number: int
    ask: Ask
    submitted_s: float
    priority: float = DEFAULT_PRIORITY
    weight: float = 1.0
    kind: str = "train"
    pool: str | None = None
    deadline_s: float | None = None
    estimate_s: float | None = None
    preemptible: bool = False
    min_bundles: int = 0
    min_runtime_s: float = 0.0
    like: str = ""

    @property
    def least(self) -> int:
        """Bundles without which it cannot start."""
        return self.min_bundles or self.ask.count


class OrderPolicy(Protocol):
    """Who goes first, and who may push whom out. Pure."""

    def key(self, entry: Entry, served_s: float, now_s: float) -> tuple[float, float]:
        """(key, valid_until_s). Lower goes first; comparable between waiting and running tasks.

        `served_s`: seconds it has run so far. The key is asked for again at `valid_until_s` (inf: never); for a
        running task that must be the time when more service changes it.
        """
        ...

    def standing(self, entry: Entry, key: float) -> float:
        """How well a task with that key stands against preemption: lower is stronger."""
        ...

    def may_preempt(self, waiting: Entry, waiting_key: float, victim: Entry, victim_key: float, now_s: float) -> bool:
        """Whether the waiting task is worth ending the running one for.

        Must not hold both ways round, and what may end one task may end every task of a weaker `standing`.
        """
        ...


@runtime_checkable
class OrderByService(Protocol):
    """What an order has, too, whose keys change with the service a running task has had."""

    def next_step_s(self, entry: Entry, served_s: float) -> float:
        """Service in all at which the task's key changes next; inf: never."""
        ...


@runtime_checkable
class LearningOrder(Protocol):
    """What an order has, too, that learns from tasks that have ended."""

    def ended(self, entry: Entry, served_s: float, finished: bool) -> None:
        """The task is over. `finished`: by itself, after so many seconds of service in all."""
        ...

    def moved(self) -> list[str]:
        """Tasks whose key has changed since the last call, other than by time or by their own service."""
        ...


@dataclass(frozen=True, slots=True)
class WeightedOrder:
    """The default order, see the module. `ageing_per_hour` >= 0; with 0 low tasks may starve."""

    ageing_per_hour: float = 1.0
    kind_factors: Mapping[str, float] = field(default_factory=lambda: KIND_FACTORS)
    urgency_steps: tuple[tuple[float, float], ...] = URGENCY_STEPS
    margin: float = PREEMPTION_MARGIN

    def key(self, entry: Entry, served_s: float, now_s: float) -> tuple[float, float]:
        """See OrderPolicy. The key is minus the score at Unix time 0."""
        rank = entry.priority * entry.weight * self.kind_factors.get(entry.kind, 1.0)
        aged = self.ageing_per_hour * entry.submitted_s / 3600.0
        if entry.deadline_s is None:
            return aged - rank, math.inf
        urgency, until_s = self.urgency(entry, served_s, now_s)
        return aged - rank - urgency, until_s

    def standing(self, entry: Entry, key: float) -> float:
        """By rank and urgency alone: ageing gives a turn in the queue, no right to end others."""
        return key - self._aged(entry)

    def may_preempt(self, waiting: Entry, waiting_key: float, victim: Entry, victim_key: float, now_s: float) -> bool:
        """By a margin, so that equals never push each other out in turn."""
        return self.standing(waiting, waiting_key) + self.margin <= self.standing(victim, victim_key)

    def _aged(self, entry: Entry) -> float:
        return self.ageing_per_hour * entry.submitted_s / 3600.0

    def rank(self, entry: Entry) -> float:
        """Score without ageing and urgency."""
        return entry.priority * entry.weight * self.kind_factors.get(entry.kind, 1.0)

    def urgency(self, entry: Entry, served_s: float, now_s: float) -> tuple[float, float]:
        """(points for the deadline, when that changes). None before the first step, none once it has passed.

        A deadline that can no longer be met stays at the highest step until it has passed: estimates err.
        """
        if entry.deadline_s is None or now_s >= entry.deadline_s:
            return 0.0, math.inf
        latest_start_s = entry.deadline_s - remaining_s(entry, served_s)
        points, until_s = 0.0, entry.deadline_s
        for slack_s, gained in self.urgency_steps:
            if now_s < latest_start_s - slack_s:
                return points, min(until_s, latest_start_s - slack_s)
            points = gained
        return points, until_s

    def score(self, entry: Entry, served_s: float, now_s: float) -> float:
        """Higher goes first. A clock that went back does not make a task younger than new."""
        hours = max(0.0, now_s - entry.submitted_s) / 3600.0
        return self.rank(entry) + self.ageing_per_hour * hours + self.urgency(entry, served_s, now_s)[0]

    def overtaken_for_s(self, entry: Entry, highest_rank: float) -> float:
        """For how long after its submit newly submitted tasks of at most `highest_rank` may go before it.

        A task submitted d seconds later goes first only while its rank and urgency exceed this one's rank by
        ageing x d; inf without ageing.
        """
        most = highest_rank + max((points for _, points in self.urgency_steps), default=0.0)
        ahead = max(0.0, most - self.rank(entry))
        if ahead == 0.0:
            return 0.0
        return ahead / self.ageing_per_hour * 3600.0 if self.ageing_per_hour > 0 else math.inf

    def explain(self, entry: Entry, served_s: float, now_s: float) -> str:
        """The score's terms in words: `score 9.00 = priority 5 x weight 1.5 x rollout 1 + 1.50 for 1.5 h waited`."""
        hours = max(0.0, now_s - entry.submitted_s) / 3600.0
        factor = self.kind_factors.get(entry.kind, 1.0)
        text = (
            f"score {self.score(entry, served_s, now_s):.2f} = priority {entry.priority:g} x weight {entry.weight:g}"
            f" x {entry.kind} {factor:g} + {self.ageing_per_hour * hours:.2f} for {_hours(hours)} waited"
        )
        if entry.deadline_s is None:
            return text
        points, until_s = self.urgency(entry, served_s, now_s)
        if now_s >= entry.deadline_s:
            return f"{text} + 0 for its deadline, which has passed"
        slack_h = (entry.deadline_s - now_s - remaining_s(entry, served_s)) / 3600.0
        slack = f"{_hours(slack_h)} of slack" if slack_h >= 0 else f"{_hours(-slack_h)} too little time"
        changes = "" if until_s == entry.deadline_s else f", more in {_hours((until_s - now_s) / 3600.0)}"
        return f"{text} + {points:g} for its deadline ({slack}{changes})"


def remaining_s(entry: Entry, served_s: float) -> float:
    """Running time it still needs; 0 where nobody knows."""
    return 0.0 if entry.estimate_s is None else max(0.0, entry.estimate_s - served_s)


def deadline_warning(entry: Entry, now_s: float) -> str:
    """Why its deadline cannot be met; empty when it can, as far as is known. Such a task is accepted all the same."""
    if entry.deadline_s is None:
        return ""
    if entry.deadline_s <= now_s:
        return f"its deadline passed {_hours((now_s - entry.deadline_s) / 3600.0)} ago: it counts for nothing"
    needed_s = remaining_s(entry, 0.0)
    if now_s + needed_s > entry.deadline_s:
        left = _hours((entry.deadline_s - now_s) / 3600.0)
        return f"its deadline is in {left}, but it is expected to run for {_hours(needed_s / 3600.0)}"
    return ""


def check_entry(entry: Entry) -> None:
    """Raises InvalidInput that lists every mistake."""
    wrong: list[str] = []
    if not (math.isfinite(entry.priority) and 0 <= entry.priority <= MAX_PRIORITY):
        wrong.append(f"priority: {entry.priority:g} is not between 0 and {MAX_PRIORITY:g}")
    if not (math.isfinite(entry.weight) and entry.weight > 0):
        wrong.append(f"weight: {entry.weight:g} is not a number above 0")
    if not math.isfinite(entry.submitted_s):
        wrong.append("submitted_s: is no time")
    if entry.deadline_s is not None and not math.isfinite(entry.deadline_s):
        wrong.append("deadline_s: is no time")
    if entry.estimate_s is not None and not (math.isfinite(entry.estimate_s) and entry.estimate_s >= 0):
        wrong.append(f"estimate_s: {entry.estimate_s:g} is no running time")
    if not entry.min_runtime_s >= 0:
        wrong.append(f"min_runtime_s: {entry.min_runtime_s:g} is no time span")
    if entry.ask.count < 1:
        wrong.append(f"bundles: {entry.ask.count} is less than 1")
    elif not 0 <= entry.min_bundles <= entry.ask.count:
        wrong.append(f"min_bundles: {entry.min_bundles} is not between 1 and {entry.ask.count}")
    if wrong:
        raise InvalidInput("\n".join(wrong))


def _hours(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.0f} min"
