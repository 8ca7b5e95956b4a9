"""The life of a task: the record that is the fold of its events.

    QUEUED --Placed--> PLACED --Starting, Started--> RUNNING --Ended--> SUCCEEDED | FAILED | CANCELLED
       ^                  |                            |
       +----Requeued------+-----------Requeued---------+      (at the old place: number and submit time stay)

A task runs in attempts. An attempt's gang (`gang_id`) is placed once and started once: after a crash between
`Starting` and `Started` the gang is taken over if all of it runs, else the task goes on with a new attempt.
What follows from ended ranks is core/taskverdict.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from areal_sky.core.failures import POISON_RUNS, Failure, signature
from areal_sky.core.model import Bundle
from areal_sky.core.taskevents import (
    Checkpointed,
    Draining,
    Ended,
    Fact,
    NodeAvoided,
    NodeFact,
    OutOfMemory,
    PhaseChanged,
    Place,
    Placed,
    RankExited,
    Requeued,
    Shrinking,
    Shrunk,
    Started,
    Starting,
    StopKind,
    Stopping,
    Submitted,
    TaskEvent,
    Warned,
)
from areal_sky.core.taskmodel import TASK_ENDED, TaskSpec, TaskState
from areal_sky.errors import StateError


@dataclass(frozen=True, slots=True)
class RankEnd:
    rank: int
    code: int | None
    lost: str
    t_s: float
    tail: str = ""
    oom: OutOfMemory = ""


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """All that is known of one task. `retries` counts own failures; `attempt` counts placements from 1.

    `served_s` is how long its runs before this one were running, `lost_s` how much of that was done again or is to be
    (since the latest checkpoint of each), `preempted` how often others took its place. `failures` are its latest own.
    """

    task_id: str
    number: int
    spec: TaskSpec
    submitted_s: float
    state: TaskState = TaskState.QUEUED
    since_s: float = 0.0
    reason: str = ""
    attempt: int = 0
    retries: int = 0
    places: tuple[Place, ...] = ()
    claim: tuple[Place, ...] = ()  # kept for what a driver makes itself, one GPU each
    starting: bool = False
    first_started_s: float | None = None
    started_s: float | None = None
    ended_s: float | None = None
    exits: tuple[RankEnd, ...] = ()
    stop: StopKind | None = None
    stop_reason: str = ""
    stop_s: float | None = None
    placed_s: float | None = None  # when this attempt took its resources
    not_before_s: float = 0.0
    larger_bundle: Bundle | None = None  # what it asks for after memory ran out
    larger_accelerators: tuple[str, ...] = ()
    checkpoint_s: float | None = None
    leaving: tuple[int, ...] = ()  # ranks that are told to end while the others run on
    leaving_s: float | None = None
    gone: tuple[int, ...] = ()  # ranks that have done so
    phase: str = ""
    phase_low: bool = False
    served_s: float = 0.0
    lost_s: float = 0.0
    preempted: int = 0
    failures: tuple[Failure, ...] = ()

    @property
    def gang_id(self) -> str:
        """Ray's name for this attempt's placement group."""
        return f"{self.task_id}.{self.attempt}"

    @property
    def ended(self) -> bool:
        return self.state in TASK_ENDED

    @property
    def holds(self) -> bool:
        """Whether it holds resources."""
        return self.state is TaskState.PLACED or self.state is TaskState.RUNNING

    @property
    def world(self) -> tuple[int, ...]:
        """The ranks that are to run: all that were placed, less those that were given up."""
        return tuple(r for r in range(len(self.places)) if r not in self.leaving and r not in self.gone)

    @property
    def all_nodes(self) -> tuple[str, ...]:
        """The nodes of its places and of what is kept for it."""
        return tuple(dict.fromkeys(p.node_id for p in (*self.held, *self.claim)))

    @property
    def held(self) -> tuple[Place, ...]:
        """Where it holds resources."""
        return tuple(p for r, p in enumerate(self.places) if r not in self.gone) if self.gone else self.places

    @property
    def elastic(self) -> bool:
        """Whether it may run with fewer bundles than it asks for."""
        return self.spec.fewest_bundles < self.spec.bundles

    @property
    def bundle(self) -> Bundle:
        """What each of its ranks asks for now."""
        return self.larger_bundle or self.spec.bundle

    @property
    def accelerators(self) -> tuple[str, ...]:
        """The accelerators that it may run on now; empty: any."""
        return self.larger_accelerators or self.spec.accelerators

    def unsaved_s(self, now_s: float) -> float:
        """How much of its running time a stop at `now_s` would lose."""
        if self.started_s is None:
            return 0.0
        return max(0.0, now_s - max(self.started_s, self.checkpoint_s or 0.0))


def apply(record: TaskRecord | None, event: TaskEvent) -> TaskRecord:
    """The record after the event. Raises StateError for a move that the life above does not have."""
    fact, t_s = event.fact, event.t_s
    if isinstance(fact, Submitted):
        if record is not None:
            raise _illegal(record, fact)
        return TaskRecord(event.task_id, fact.number, fact.spec, submitted_s=t_s, since_s=t_s)
    if record is None or record.ended:
        raise _illegal(record, fact)
    match fact:
        case Warned():
            return record
        case Placed() if record.state is TaskState.QUEUED:
            return replace(
                record, state=TaskState.PLACED, since_s=t_s, reason="", attempt=fact.attempt, places=fact.places,
                claim=fact.claim, placed_s=t_s, **_CLEAN,
            )  # fmt: skip
        case Starting() if record.state is TaskState.PLACED:
            return replace(record, starting=True)
        case Started() if record.state is TaskState.PLACED:
            first = t_s if record.first_started_s is None else record.first_started_s
            return replace(
                record, state=TaskState.RUNNING, since_s=t_s, starting=False, started_s=t_s, first_started_s=first
            )
        case RankExited() if record.holds:
            end = RankEnd(fact.rank, fact.code, fact.lost, t_s, fact.tail, fact.oom)
            return replace(record, exits=(*(e for e in record.exits if e.rank != fact.rank), end))
        case Stopping() if record.holds:
            since_s = t_s if record.stop_s is None else record.stop_s
            return replace(record, stop=fact.kind, stop_reason=fact.reason, stop_s=since_s)
        case Shrinking() if record.holds:
            leaving = tuple(sorted({*record.leaving, *fact.ranks}))
            return replace(record, leaving=leaving, leaving_s=t_s)
        case Shrunk() if record.holds:
            left = tuple(r for r in record.leaving if r not in fact.ranks)
            gone = tuple(sorted({*record.gone, *fact.ranks}))
            # What the others hold is counted anew from here on.
            return replace(record, leaving=left, gone=gone, placed_s=t_s, leaving_s=record.leaving_s if left else None)
        case Checkpointed() if record.holds:
            return replace(record, checkpoint_s=t_s)
        case PhaseChanged() if record.holds:
            return replace(record, phase=fact.name, phase_low=fact.low)
        case Requeued() if record.holds:
            return replace(
                record, state=TaskState.QUEUED, since_s=t_s, reason=fact.reason, places=(), claim=(),
                retries=record.retries + fact.counted, not_before_s=fact.not_before_s,
                larger_bundle=fact.bundle or record.larger_bundle,
                larger_accelerators=fact.accelerators or record.larger_accelerators,
                served_s=record.served_s + _ran_s(record, t_s), lost_s=record.lost_s + record.unsaved_s(t_s),
                preempted=record.preempted + (record.stop == "preempt"),
                failures=_failures(record) if fact.counted else record.failures, **_CLEAN,
            )  # fmt: skip
        case Ended():
            return replace(
                record, state=fact.state, since_s=t_s, ended_s=t_s, reason=fact.reason, starting=False,
                served_s=record.served_s + _ran_s(record, t_s),
            )  # fmt: skip
        case _:
            raise _illegal(record, fact)


# What an attempt begins without.
_CLEAN = {
    "starting": False, "exits": (), "stop": None, "stop_reason": "", "stop_s": None, "started_s": None,
    "checkpoint_s": None, "phase": "", "phase_low": False, "leaving": (), "leaving_s": None, "gone": (),
}  # fmt: skip


def first_failure(record: TaskRecord) -> RankEnd | None:
    """The rank that failed first in this attempt; the others may only echo it."""
    world = set(record.world)
    failed = (e for e in record.exits if e.code != 0 and e.rank in world)
    return min(failed, key=lambda e: (e.t_s, e.rank), default=None)


def failed_on(record: TaskRecord) -> Failure | None:
    """This attempt's failure and where it came first; None while no rank has failed."""
    first = first_failure(record)
    if first is None or first.rank >= len(record.places):
        return None
    return Failure(record.places[first.rank].node_id, signature(first.code, first.tail, first.oom))


def _failures(record: TaskRecord) -> tuple[Failure, ...]:
    latest = failed_on(record)
    return record.failures if latest is None else (*record.failures, latest)[-POISON_RUNS:]


def _ran_s(record: TaskRecord, until_s: float) -> float:
    return 0.0 if record.started_s is None else max(0.0, until_s - record.started_s)


def _illegal(record: TaskRecord | None, fact: Fact) -> StateError:
    state = record.state if record else "unknown"
    name = record.task_id if record else "a task"
    return StateError(f"{name}: {type(fact).__name__} cannot happen to it in state {state}")


def fold(events: Iterable[TaskEvent]) -> tuple[dict[str, TaskRecord], tuple[NodeFact, ...]]:
    """Records by task id and all facts about nodes, from every event in order."""
    records: dict[str, TaskRecord] = {}
    nodes: list[NodeFact] = []
    for e in events:
        if isinstance(e.fact, Draining | NodeAvoided):
            nodes.append(e.fact)
        else:
            records[e.task_id] = apply(records.get(e.task_id), e)
    return records, tuple(nodes)
