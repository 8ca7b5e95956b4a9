"""What happens to tasks, as facts: rows of the task journal, lines of a task's story."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from areal_sky.core.placement import DeviceShare
from areal_sky.core.taskmodel import TaskSpec, TaskState
from areal_sky.core.taskspec import task_spec_from_json, task_spec_to_json
from areal_sky.errors import StateError

StopKind = Literal["cancel", "evict", "lost", "failed"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank runs. `node_gpus`, `node_cpus`: what the whole node has (for the bill), 0 where nobody knows."""

    node_id: str
    replica: str
    index: int
    devices: tuple[DeviceShare, ...] = ()
    node_gpus: float = 0.0
    node_cpus: float = 0.0

    def __str__(self) -> str:
        return f"{self.replica}/{self.index}"


@dataclass(frozen=True, slots=True)
class Submitted:
    number: int
    spec: TaskSpec


@dataclass(frozen=True, slots=True)
class Placed:
    """Recorded before Ray is asked for the placement group."""

    attempt: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Starting:
    """Recorded before the runners are started."""


@dataclass(frozen=True, slots=True)
class Started:
    """The runners exist."""


@dataclass(frozen=True, slots=True)
class RankExited:
    """`code` None: the rank was lost with its node or runner (`lost` says how). `tail`: last words on stderr."""

    rank: int
    code: int | None
    lost: str = ""
    tail: str = ""


@dataclass(frozen=True, slots=True)
class Stopping:
    """The gang is told to end, for this reason. A cancel overrides every other kind."""

    kind: StopKind
    reason: str


@dataclass(frozen=True, slots=True)
class Requeued:
    """Waits again at its old place. `counted`: this uses up one of `max_retries`."""

    reason: str
    counted: bool


@dataclass(frozen=True, slots=True)
class Ended:
    state: TaskState
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Draining:
    """Nodes that take no new work; what still runs on them at `deadline_s` is evicted. `task_id` is empty."""

    replica: str
    node_ids: tuple[str, ...]
    deadline_s: float
    reason: str


Fact = Submitted | Placed | Starting | Started | RankExited | Stopping | Requeued | Ended | Draining
_KINDS: dict[str, type[Fact]] = {
    c.__name__: c for c in (Submitted, Placed, Starting, Started, RankExited, Stopping, Requeued, Ended, Draining)
}


@dataclass(frozen=True, slots=True)
class TaskEvent:
    t_s: float
    task_id: str
    fact: Fact

    def to_row(self) -> tuple[float, str, str, str]:
        """time, task, kind, body as JSON."""
        body = asdict(self.fact)
        if isinstance(self.fact, Submitted):
            body["spec"] = task_spec_to_json(self.fact.spec)
        return self.t_s, self.task_id, type(self.fact).__name__, json.dumps(body, separators=(",", ":"))

    @staticmethod
    def from_row(t_s: float, task_id: str, kind: str, body: str) -> TaskEvent:
        """Raises StateError for a row that this version cannot read."""
        try:
            cls = _KINDS[kind]
            raw: dict[str, Any] = json.loads(body)
            if cls is Submitted:
                raw["spec"] = task_spec_from_json(raw["spec"])
            elif cls is Placed:
                raw["places"] = tuple(
                    Place(
                        p["node_id"],
                        p["replica"],
                        p["index"],
                        tuple((int(i), float(x)) for i, x in p["devices"]),
                        float(p.get("node_gpus", 0.0)),
                        float(p.get("node_cpus", 0.0)),
                    )
                    for p in raw["places"]
                )
            elif cls is Draining:
                raw["node_ids"] = tuple(raw["node_ids"])
            elif cls is Ended:
                raw["state"] = TaskState(raw["state"])
            return TaskEvent(t_s, task_id, cls(**{f.name: raw[f.name] for f in fields(cls) if f.name in raw}))
        except Exception as e:
            raise StateError(f"the task journal holds a {kind!r} row of {task_id!r} that cannot be read: {e}") from None


def tell(event: TaskEvent) -> str:
    """One line of `areal-sky why TASK`."""
    match event.fact:
        case Submitted(number=number, spec=spec):
            return f"submitted as number {number}, priority {spec.priority:g}" + (
                f", model {spec.model}" if spec.model else ""
            )
        case Placed(attempt=attempt, places=places):
            return f"attempt {attempt}: placed on {where(places)}"
        case Starting():
            return "resources reserved by Ray; starting its ranks"
        case Started():
            return "running"
        case RankExited(rank=rank, code=code, lost=lost):
            return f"rank {rank} " + (f"lost: {lost}" if code is None else f"ended with exit code {code}")
        case Stopping(kind=kind, reason=reason):
            word = {"cancel": "cancelled", "evict": "told to leave", "lost": "lost", "failed": "failed"}[kind]
            return f"{word}: {reason}"
        case Requeued(reason=reason):
            return f"waits again at its old place: {reason}"
        case Ended(state=state, reason=reason):
            return state.value.lower() + (f": {reason}" if reason else "")
        case Draining(replica=replica, reason=reason):
            return f"replica {replica} takes no new work: {reason}"


def where(places: Collection[Place]) -> str:
    """`grpo-rollout-0/0 x2, grpo-rollout-1/0`."""
    counts: dict[str, int] = {}
    for p in places:
        counts[str(p)] = counts.get(str(p), 0) + 1
    return ", ".join(name + (f" x{n}" if n > 1 else "") for name, n in counts.items())
