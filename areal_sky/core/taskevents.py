"""What happens to tasks, as facts: rows of the task journal, lines of a task's story."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from areal_sky.core.model import Bundle
from areal_sky.core.placement import DeviceShare, describe_bundle
from areal_sky.core.taskmodel import TaskSpec, TaskState
from areal_sky.core.taskspec import task_spec_from_row, task_spec_to_json
from areal_sky.errors import StateError

# `timeout`: one run took too long. `expired`: the task as a whole did. `preempt`: others go first. `regrow`: it has
# fewer ranks than it asked for, and there is room for all of them again.
StopKind = Literal["cancel", "evict", "lost", "failed", "timeout", "expired", "preempt", "regrow"]
OutOfMemory = Literal["", "gpu", "host"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank runs. `node_gpus`, `node_cpus`: what the whole node has (for the bill), 0 where nobody knows.

    `lent`: ids (as in CUDA_VISIBLE_DEVICES) of devices that the gang `lender` has lent; Ray counts them as that one's.
    """

    node_id: str
    replica: str
    index: int
    devices: tuple[DeviceShare, ...] = ()
    node_gpus: float = 0.0
    node_cpus: float = 0.0
    lent: tuple[str, ...] = ()
    lender: str = ""

    def __str__(self) -> str:
        return f"{self.replica}/{self.index}"


@dataclass(frozen=True, slots=True)
class Submitted:
    number: int
    spec: TaskSpec


@dataclass(frozen=True, slots=True)
class Warned:
    """Something that its owner should know, said when it was submitted."""

    text: str


@dataclass(frozen=True, slots=True)
class Placed:
    """Recorded before Ray is asked for the placement group. `claim`: what is kept for a driver's own groups, one GPU
    each.
    """

    attempt: int
    places: tuple[Place, ...]
    claim: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True)
class Starting:
    """Recorded before the runners are started."""


@dataclass(frozen=True, slots=True)
class Started:
    """Every rank's runner has said that its process runs."""


@dataclass(frozen=True, slots=True)
class RankExited:
    """`code` None: the rank was lost with its node or runner (`lost` says how). `tail`: last words on stderr.

    `oom`: the memory of which there is evidence that it ran out, empty without evidence.
    """

    rank: int
    code: int | None
    lost: str = ""
    tail: str = ""
    oom: OutOfMemory = ""


@dataclass(frozen=True, slots=True)
class Stopping:
    """The gang is told to end, for this reason. A cancel overrides every other kind."""

    kind: StopKind
    reason: str


@dataclass(frozen=True, slots=True)
class Shrinking:
    """These ranks of the elastic gang are told to end; the others run on."""

    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Shrunk:
    """These ranks are gone, and what they held is free."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Requeued:
    """Waits again at its old place. `counted`: this uses up one of `max_retries`.

    It is not placed before `not_before_s`. `bundle` and `accelerators` are what it asks for from now on, where memory
    ran out with what it asked before; None and empty: no change.
    """

    reason: str
    counted: bool
    not_before_s: float = 0.0
    bundle: Bundle | None = None
    accelerators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """Its work up to now is safe: a run that is ended loses only what comes after."""


@dataclass(frozen=True, slots=True)
class PhaseChanged:
    """The running task is in this phase now. `low`: it leaves its GPUs idle meanwhile, and others may have them."""

    name: str
    low: bool


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


@dataclass(frozen=True, slots=True)
class NodeAvoided:
    """No task is placed on the node until `until_s` (past: it takes work again). `task_id` of the event is empty."""

    node_id: str
    node: str
    until_s: float
    reason: str


TaskFact = (
    Submitted | Warned | Placed | Starting | Started | RankExited | Stopping | Shrinking | Shrunk | Requeued
    | Checkpointed | PhaseChanged | Ended
)
NodeFact = Draining | NodeAvoided
Fact = TaskFact | NodeFact
_KINDS: dict[str, type[Fact]] = {
    c.__name__: c
    for c in (
        Submitted, Warned, Placed, Starting, Started, RankExited, Stopping, Shrinking, Shrunk, Requeued, Checkpointed,
        PhaseChanged, Ended, Draining, NodeAvoided,
    )
}  # fmt: skip


_NAMES = {kind: tuple(f.name for f in fields(cls)) for kind, cls in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class TaskEvent:
    t_s: float
    task_id: str
    fact: Fact

    def to_row(self) -> tuple[float, str, str, str]:
        """time, task, kind, body as JSON."""
        if isinstance(self.fact, Submitted):
            body = {"number": self.fact.number, "spec": task_spec_to_json(self.fact.spec)}
        else:
            body = asdict(self.fact)
        return self.t_s, self.task_id, type(self.fact).__name__, json.dumps(body, separators=(",", ":"))

    @staticmethod
    def from_row(t_s: float, task_id: str, kind: str, body: str) -> TaskEvent:
        """Raises StateError for a row that this version cannot read."""
        try:
            cls = _KINDS[kind]
            raw: dict[str, Any] = json.loads(body)
            if cls is Submitted:
                raw["spec"] = task_spec_from_row(raw["spec"])
            elif cls is Placed:
                raw["places"], raw["claim"] = _places(raw["places"]), _places(raw.get("claim", ()))
            elif cls in (Shrinking, Shrunk):
                raw["ranks"] = tuple(raw["ranks"])
            elif cls is Requeued:
                bundle = raw.get("bundle")
                raw["bundle"] = None if bundle is None else Bundle(**bundle)
                raw["accelerators"] = tuple(raw.get("accelerators", ()))
            elif cls is Draining:
                raw["node_ids"] = tuple(raw["node_ids"])
            elif cls is Ended:
                raw["state"] = TaskState(raw["state"])
            return TaskEvent(t_s, task_id, cls(**{name: raw[name] for name in _NAMES[kind] if name in raw}))
        except Exception as e:
            raise StateError(f"the task journal holds a {kind!r} row of {task_id!r} that cannot be read: {e}") from None


def _places(raw: Iterable[dict[str, Any]]) -> tuple[Place, ...]:
    return tuple(
        Place(
            p["node_id"], p["replica"], p["index"], tuple((int(i), float(x)) for i, x in p["devices"]),
            float(p.get("node_gpus", 0.0)), float(p.get("node_cpus", 0.0)), tuple(p.get("lent", ())),
            str(p.get("lender", "")),
        )
        for p in raw
    )  # fmt: skip


def tell(event: TaskEvent) -> str:
    """One line of `areal-sky why TASK`."""
    match event.fact:
        case Submitted(number=number, spec=spec):
            return f"submitted as number {number}, priority {spec.priority:g}" + (
                f", model {spec.model}" if spec.model else ""
            )
        case Placed(attempt=attempt, places=places, claim=claim) if claim:
            kept = f"{len(claim)} GPU{'s' if len(claim) > 1 else ''} for what it makes itself"
            return f"attempt {attempt}: placed on {where(places)}, with {kept}: {where(claim)}"
        case Placed(attempt=attempt, places=places):
            return f"attempt {attempt}: placed on {where(places)}"
        case Starting():
            return "resources reserved by Ray; starting its ranks"
        case Started():
            return "running"
        case RankExited(rank=rank, code=code, lost=lost):
            return f"rank {rank} " + (f"lost: {lost}" if code is None else f"ended with exit code {code}")
        case Stopping(kind=kind, reason=reason):
            return f"{_STOPPED[kind]}: {reason}"
        case Requeued(reason=reason, not_before_s=not_before_s, bundle=bundle, accelerators=accelerators):
            wait_s = not_before_s - event.t_s
            later = f"; not before {wait_s:.0f} s from now" if wait_s > 0 else ""
            if bundle is not None:
                later += f"; asks for {describe_bundle(bundle)} per rank from now on"
            if accelerators:
                later += f"; only on {' or '.join(accelerators)} from now on"
            return f"waits again at its old place: {reason}{later}"
        case Shrinking(ranks=ranks, reason=reason):
            return f"gives up {_ranks(ranks)}: {reason}"
        case Shrunk(ranks=ranks):
            return f"runs on without {_ranks(ranks)}"
        case Checkpointed():
            return "saved a checkpoint"
        case PhaseChanged(name=name, low=low):
            return f"phase {name}" + (": leaves its GPUs idle" if low else "")
        case Warned(text=text):
            return f"warning: {text}"
        case Ended(state=state, reason=reason):
            return state.value.lower() + (f": {reason}" if reason else "")
        case Draining(replica=replica, reason=reason):
            return f"replica {replica} takes no new work: {reason}"
        case NodeAvoided(node=node, until_s=until_s, reason=reason) if until_s <= event.t_s:
            return f"node {node} takes work again: {reason}"
        case NodeAvoided(node=node, reason=reason):
            return f"node {node} is avoided: {reason}"


_STOPPED: dict[StopKind, str] = {
    "cancel": "cancelled", "evict": "told to leave", "lost": "lost", "failed": "failed", "timeout": "timed out",
    "expired": "out of time", "preempt": "preempted", "regrow": "told to start anew",
}  # fmt: skip


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def where(places: Collection[Place]) -> str:
    """`grpo-rollout-0/0 x2, grpo-rollout-1/0`."""
    counts: dict[str, int] = {}
    for p in places:
        counts[str(p)] = counts.get(str(p), 0) + 1
    return ", ".join(name + (f" x{n}" if n > 1 else "") for name, n in counts.items())
