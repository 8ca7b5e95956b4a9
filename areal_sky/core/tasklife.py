"""The life of a task: the record that is the fold of its events, and what to do when ranks end.

    QUEUED --Placed--> PLACED --Starting, Started--> RUNNING --Ended--> SUCCEEDED | FAILED | CANCELLED
       ^                  |                            |
       +----Requeued------+-----------Requeued---------+      (at the old place: number and submit time stay)

A task runs in attempts. An attempt's gang (`gang_id`) is placed once and started once: after a crash between
`Starting` and `Started` the gang is taken over if all of it runs, else the task goes on with a new attempt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from areal_sky.core.taskevents import (
    Draining,
    Ended,
    Fact,
    Place,
    Placed,
    RankExited,
    Requeued,
    Started,
    Starting,
    StopKind,
    Stopping,
    Submitted,
    TaskEvent,
    where,
)
from areal_sky.core.taskmodel import TASK_ENDED, TaskSpec, TaskState
from areal_sky.errors import StateError

# A node's death is noticed by Ray up to about 9 s after its processes vanish (a hung node, tuned health checks).
SETTLE_S = 10.0
# How long after SIGKILL a rank may stay silent before its runner is taken for gone.
SILENT_S = 30.0
_SIGTERM_OR_KILL = frozenset({-9, -15, 137, 143})


# ---------------------------------------------------------------- the record: fold of the events


@dataclass(frozen=True, slots=True)
class RankEnd:
    rank: int
    code: int | None
    lost: str
    t_s: float
    tail: str = ""


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """All that is known of one task. `retries` counts own failures; `attempt` counts placements from 1."""

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
    starting: bool = False
    first_started_s: float | None = None
    started_s: float | None = None
    ended_s: float | None = None
    exits: tuple[RankEnd, ...] = ()
    stop: StopKind | None = None
    stop_reason: str = ""
    stop_s: float | None = None
    placed_s: float | None = None  # when this attempt took its resources

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
        return self.state in (TaskState.PLACED, TaskState.RUNNING)


def apply(record: TaskRecord | None, event: TaskEvent) -> TaskRecord:
    """The record after the event. Raises StateError for a move that the life above does not have."""
    fact, t_s = event.fact, event.t_s
    if isinstance(fact, Submitted):
        if record is not None:
            raise _illegal(record, fact)
        return TaskRecord(event.task_id, fact.number, fact.spec, submitted_s=t_s, since_s=t_s)
    if record is None or record.ended or isinstance(fact, Draining):
        raise _illegal(record, fact)
    match fact:
        case Placed() if record.state is TaskState.QUEUED:
            return replace(
                record, state=TaskState.PLACED, since_s=t_s, reason="", attempt=fact.attempt, places=fact.places,
                starting=False, exits=(), stop=None, stop_reason="", stop_s=None, started_s=None, placed_s=t_s,
            )  # fmt: skip
        case Starting() if record.state is TaskState.PLACED:
            return replace(record, starting=True)
        case Started() if record.state is TaskState.PLACED:
            first = t_s if record.first_started_s is None else record.first_started_s
            return replace(
                record,
                state=TaskState.RUNNING,
                since_s=t_s,
                starting=False,
                started_s=t_s,
                first_started_s=first,
            )
        case RankExited() if record.holds:
            end = RankEnd(fact.rank, fact.code, fact.lost, t_s, fact.tail)
            return replace(record, exits=(*(e for e in record.exits if e.rank != fact.rank), end))
        case Stopping() if record.holds:
            since_s = t_s if record.stop_s is None else record.stop_s
            return replace(record, stop=fact.kind, stop_reason=fact.reason, stop_s=since_s)
        case Requeued() if record.holds:
            return replace(
                record, state=TaskState.QUEUED, since_s=t_s, reason=fact.reason, places=(), starting=False, exits=(),
                stop=None, stop_reason="", stop_s=None, retries=record.retries + fact.counted, started_s=None,
            )  # fmt: skip
        case Ended():
            return replace(record, state=fact.state, since_s=t_s, ended_s=t_s, reason=fact.reason, starting=False)
        case _:
            raise _illegal(record, fact)


def _illegal(record: TaskRecord | None, fact: Fact) -> StateError:
    state = record.state if record else "unknown"
    name = record.task_id if record else "a task"
    return StateError(f"{name}: {type(fact).__name__} cannot happen to it in state {state}")


# ---------------------------------------------------------------- what follows from ended ranks


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to decide yet."""


Verdict = Wait | Stopping | Requeued | Ended


def verdict(record: TaskRecord, dead_nodes: Collection[str], now_s: float, grace_s: float) -> Verdict:
    """What becomes of a running task whose ranks have ended or whose nodes have died.

    The loss of a node is nobody's failure: the task is requeued and no retry is counted. A failure that may be the
    echo of a dying node (a killed process, a vanished runner) is judged only after SETTLE_S.
    """
    ends = {e.rank: e for e in record.exits}
    dead = {r for r, p in enumerate(record.places) if p.node_id in dead_nodes}
    finished = {r for r, e in ends.items() if e.code == 0}
    world = range(len(record.places))
    lost = sorted(dead - finished)
    bad = sorted(r for r, e in ends.items() if e.code != 0)
    if record.stop is None:
        if len(finished) == len(world):
            return Ended(TaskState.SUCCEEDED)
        if lost:
            return Stopping("lost", f"node {record.places[lost[0]]} died under rank {lost[0]}")
        if bad:
            return Stopping("failed", _why_failed(ends[min(bad, key=lambda r: (ends[r].t_s, r))]))
        return Wait()

    silent = [r for r in world if r not in ends and r not in dead]
    given_up = record.stop_s is not None and now_s > record.stop_s + grace_s + SILENT_S
    if silent and not given_up:
        return Wait()
    if record.stop == "cancel":
        return Ended(TaskState.CANCELLED, record.stop_reason)
    if record.stop in ("evict", "lost"):
        return Requeued(record.stop_reason, counted=False)
    if lost:
        return Requeued(f"node {record.places[lost[0]]} died under rank {lost[0]}", counted=False)
    first_bad = min((ends[r] for r in bad), key=lambda e: e.t_s, default=None)
    echo = any(ends[r].code is None for r in bad) or (first_bad and first_bad.code in _SIGTERM_OR_KILL)
    if echo and first_bad and now_s < first_bad.t_s + SETTLE_S:
        return Wait()
    if record.retries < record.spec.max_retries:
        return Requeued(f"{record.stop_reason}; retry {record.retries + 1} of {record.spec.max_retries}", True)
    return Ended(TaskState.FAILED, record.stop_reason)


def _why_failed(e: RankEnd) -> str:
    if e.code is None:
        return f"rank {e.rank} was lost: {e.lost or 'its runner died'}"
    if e.code < 0:
        how = f"was killed by signal {-e.code}"
    elif e.code == 127:
        how = "ended with exit code 127 (command not found)"
    else:
        how = f"ended with exit code {e.code}"
    return f"rank {e.rank} {how}" + (f": {e.tail}" if e.tail else "")


def fold(events: Collection[TaskEvent]) -> tuple[dict[str, TaskRecord], tuple[Draining, ...]]:
    """Records by task id and all drains, from every event in order."""
    records: dict[str, TaskRecord] = {}
    drains: list[Draining] = []
    for e in events:
        if isinstance(e.fact, Draining):
            drains.append(e.fact)
        else:
            records[e.task_id] = apply(records.get(e.task_id), e)
    return records, tuple(drains)


def view(record: TaskRecord, *, weight: float, score: float | None, reason: str, metrics: Mapping[str, float],
         now_s: float) -> dict[str, Any]:  # fmt: skip
    """A task as JSON: what GET /v1/tasks answers. Times in Unix seconds, durations in seconds."""
    spec = record.spec
    until_s = record.ended_s if record.ended_s is not None else now_s
    waited_to_s = record.first_started_s if record.first_started_s is not None else until_s
    return {
        "task_id": record.task_id, "number": record.number, "name": spec.name, "kind": spec.kind,
        "model": spec.model, "model_type": spec.model_type, "state": record.state.value, "reason": reason,
        "priority": spec.priority, "weight": weight, "score": score, "group": spec.group,
        "accelerators": list(spec.accelerators), "bundles": spec.bundles, "bundle": asdict(spec.bundle),
        "command": spec.command or "(Python callable)", "deadline_s": spec.deadline_s,
        "attempt": record.attempt, "retries": record.retries, "max_retries": spec.max_retries,
        "submitted_s": record.submitted_s, "started_s": record.started_s, "ended_s": record.ended_s,
        "waiting_s": max(0.0, waited_to_s - record.submitted_s),
        "running_s": None if record.started_s is None else max(0.0, until_s - record.started_s),
        "places": [{"node_id": p.node_id, "replica": p.replica, "index": p.index} for p in record.places],
        "where": where(record.places),
        "exit_codes": {str(e.rank): e.code for e in sorted(record.exits, key=lambda e: e.rank)},
        "metrics": dict(metrics),
    }  # fmt: skip
