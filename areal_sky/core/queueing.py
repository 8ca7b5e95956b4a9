"""The order of waiting tasks.

    score = priority x weight of its model type + ageing_per_hour x hours waited

Ageing is linear and the same for all, so two waiting tasks never swap places: the order is that of a key which does
not depend on the time (`order_key`), and the queue needs no re-sort as time goes by. Ties go to the earlier submit
number. A requeued task keeps its first submit time and number, hence its old place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the order depends on. `number` counts submits from 1; `priority` is 0..100; `weight` > 0."""

    task_id: str
    number: int
    priority: float
    weight: float
    submitted_s: float


def score(w: Waiting, ageing_per_hour: float, now_s: float) -> float:
    """The task's score at `now_s`; higher goes first. A clock that went back does not make it younger than new."""
    return w.priority * w.weight + ageing_per_hour * max(0.0, now_s - w.submitted_s) / 3600.0


def order_key(w: Waiting, ageing_per_hour: float) -> tuple[float, int]:
    """Sorts ascending into queue order, whatever the time."""
    return (ageing_per_hour * w.submitted_s / 3600.0 - w.priority * w.weight, w.number)


def in_order(tasks: Iterable[Waiting], ageing_per_hour: float) -> list[Waiting]:
    """The queue, first to be placed first."""
    return sorted(tasks, key=lambda w: order_key(w, ageing_per_hour))


def explain(w: Waiting, ageing_per_hour: float, now_s: float) -> str:
    """The score's terms in words: `score 9.00 = priority 5 x weight 1.5 + 1.50 for 1.5 h waited`."""
    hours = max(0.0, now_s - w.submitted_s) / 3600.0
    waited = f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.0f} min"
    return (
        f"score {score(w, ageing_per_hour, now_s):.2f} = priority {w.priority:g} x weight {w.weight:g}"
        f" + {ageing_per_hour * hours:.2f} for {waited} waited"
    )
