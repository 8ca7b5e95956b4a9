"""What the admission engine decides. Whoever asked carries it out; the engine takes a Place as done."""

from __future__ import annotations

from dataclasses import dataclass

from areal_sky.core.gangs import Placement


@dataclass(slots=True, unsafe_hash=True)
class Place:
    """Start the task there. An elastic gang may get fewer bundles than it asked for. Never changed (as Placement)."""

    task_id: str
    placement: Placement


@dataclass(frozen=True, slots=True)
class Preempt:
    """End the victim, with a grace to checkpoint; tell `requeue` (or `ended`) when it is gone.

    What it frees is kept for `for_task`.
    """

    task_id: str
    for_task: str
    reason: str


@dataclass(frozen=True, slots=True)
class Shrink:
    """End these ranks of an elastic gang; tell `shrunk` when they are gone. What they free is kept for `for_task`."""

    task_id: str
    ranks: tuple[int, ...]
    for_task: str
    reason: str


@dataclass(frozen=True, slots=True)
class Restore:
    """Ranks that the task had lent are its own again, there."""

    task_id: str
    placement: Placement


@dataclass(frozen=True, slots=True)
class Regrow:
    """End the elastic gang, with a grace to checkpoint: it starts anew with all its bundles. Tell `requeue` then."""

    task_id: str
    reason: str


Decision = Place | Preempt | Shrink | Restore | Regrow
