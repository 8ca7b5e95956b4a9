"""Facts about a cluster. The list of them is the truth; the state is `fold(records)`.

An event is something that happened or was decided, never a wish. Its fields are JSON values, so that a store can
keep `(name, fields)` and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, cast

from areal_sky.core import lifecycle
from areal_sky.core.model import ClusterState, GroupState, LedgerLine, Replica, ReplicaState
from areal_sky.errors import StateError


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""

    def subjects(self) -> tuple[str, ...]:
        """The groups and replicas that this event is about, for `why`."""
        named = (getattr(self, "replica", None), getattr(self, "group", None))
        return tuple(str(x) for x in named if x)


@dataclass(frozen=True, slots=True)
class ClusterCreated(Event):
    cluster: str


@dataclass(frozen=True, slots=True)
class ControllerStarted(Event):
    pid: int


@dataclass(frozen=True, slots=True)
class GroupDesired(Event):
    """A group shall have `desired` replicas. `by` is spec, user or policy; `victims` go first when it shrinks.

    `market` is where new replicas of a mixed group shall come from; None leaves it to the group's mix.
    """

    group: str
    desired: int
    reason: str
    by: str
    victims: tuple[str, ...] = ()
    market: str | None = None


@dataclass(frozen=True, slots=True)
class ScalingHeld(Event):
    """The policy looked and left the group as it is. Recorded when the kind of answer changes, not at every look."""

    group: str
    reason: str


@dataclass(frozen=True, slots=True)
class LaunchIntended(Event):
    """Written before the cloud is asked: from here on the replica may exist. Prices per node and hour.

    `fallback`: on demand only because spot could not be had.
    """

    replica: str
    group: str
    slot: int
    nodes: int
    market: str
    price_usd_per_hour: float | None
    reason: str
    on_demand_usd_per_hour: float | None = None
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class LaunchAccepted(Event):
    """The cloud took the launch. `adopted`: we found it there after a restart instead of asking again."""

    replica: str
    request_id: str
    adopted: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaNoted(Event):
    """What its start waits for, or why an attempt to end it failed. Recorded when the words change."""

    replica: str
    note: str


@dataclass(frozen=True, slots=True)
class CloudSilent(Event):
    """Nothing is known of the machines, so nothing is done about them until the cloud answers again."""

    reason: str


@dataclass(frozen=True, slots=True)
class CloudAnswers(Event):
    """The cloud answers again after a silence."""


@dataclass(frozen=True, slots=True)
class ReplicaProvisioned(Event):
    replica: str


@dataclass(frozen=True, slots=True)
class ReplicaReady(Event):
    replica: str


@dataclass(frozen=True, slots=True)
class LaunchFailed(Event):
    """`retry_at_s`: the group launches nothing before that time.

    `no_capacity`: there was none to be had, or none within quota, in the replica's market. `fault`: nothing says that
    waiting helps (a set-up that fails); neither holds for a reclaim, or a cloud that cannot be reached.
    """

    replica: str
    reason: str
    retry_at_s: float
    no_capacity: bool = False
    fault: bool = False


@dataclass(frozen=True, slots=True)
class DrainStarted(Event):
    replica: str
    reason: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class ReplicaLost(Event):
    replica: str
    reason: str


@dataclass(frozen=True, slots=True)
class TerminateIntended(Event):
    replica: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReplicaGone(Event):
    """The cloud confirms that nothing is left of it."""

    replica: str


@dataclass(frozen=True, slots=True)
class DownRequested(Event):
    """End the cluster. Running work gets `drain_s` seconds to finish."""

    reason: str
    drain_s: float


@dataclass(frozen=True, slots=True)
class ClusterDown(Event):
    """Every replica and the head are confirmed gone."""


EVENTS: dict[str, type[Event]] = {
    c.__name__: c
    for c in (
        ClusterCreated, ControllerStarted, GroupDesired, ScalingHeld, LaunchIntended, LaunchAccepted,
        ReplicaProvisioned, ReplicaReady, LaunchFailed, DrainStarted, ReplicaLost, TerminateIntended,
        ReplicaGone, DownRequested, ClusterDown, ReplicaNoted, CloudSilent, CloudAnswers,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Record:
    """An event with its place in the list (`seq`, from 1, no gaps) and its time."""

    seq: int
    t_s: float
    event: Event


def encode(event: Event) -> tuple[str, dict[str, Any]]:
    """(name, JSON fields)."""
    return type(event).__name__, asdict(event)


def decode(name: str, data: Mapping[str, Any]) -> Event:
    """The inverse of encode. Raises StateError for an event that this version does not know."""
    kind = EVENTS.get(name)
    if kind is None:
        raise StateError(f"unknown event {name!r}: the state was written by a newer areal_sky")
    known = {f.name for f in fields(kind)}
    return kind(**{k: tuple(cast("list[Any]", v)) if isinstance(v, list) else v for k, v in data.items() if k in known})


def fold(records: Iterable[Record], state: ClusterState | None = None) -> ClusterState:
    """The state after these records, from `state` on (empty by default)."""
    state = state or ClusterState()
    for record in records:
        state = apply(state, record)
    return state


def apply(state: ClusterState, record: Record) -> ClusterState:
    """One step of the fold. Raises StateError when the event cannot have happened in this state."""
    t_s = record.t_s
    state = replace(state, version=record.seq)
    match record.event:
        case ClusterCreated(cluster=cluster):
            return replace(state, name=cluster, created_s=t_s, down_requested_s=None, down_s=None)
        case GroupDesired() as e:
            return _with_group(state, _desired(state.groups.get(e.group), e, t_s))
        case LaunchIntended() as e:
            if e.replica in state.replicas:
                raise StateError(f"replica {e.replica} launched while it exists")
            replica = Replica(
                name=e.replica, group=e.group, slot=e.slot, state=ReplicaState.QUEUED, since_s=t_s,
                nodes=e.nodes, market=e.market, price_usd_per_hour=e.price_usd_per_hour, reason=e.reason,
                on_demand_usd_per_hour=e.on_demand_usd_per_hour, fallback=e.fallback,
            )  # fmt: skip
            return _with_replica(state, replica)
        case LaunchAccepted() as e:
            replica = _moved(state, e.replica, ReplicaState.REQUESTED, t_s)
            state = _with_replica(state, replace(replica, request_id=e.request_id, launched_s=t_s))
            line = LedgerLine(
                replica=replica.name, group=replica.group, market=replica.market, nodes=replica.nodes,
                price_usd_per_hour=replica.price_usd_per_hour, from_s=t_s, until_s=None,
                on_demand_usd_per_hour=replica.on_demand_usd_per_hour,
            )  # fmt: skip
            return replace(state, ledger=(*state.ledger, line))
        case ReplicaProvisioned(replica=name):
            replica = _moved(state, name, ReplicaState.PROVISIONED, t_s)
            state = _with_replica(state, replica)
            group = state.groups.get(replica.group)
            if group is None or replica.market != "spot":
                return state
            return _with_group(state, replace(group, spot_refused_since_s=None, spot_refused_s=None))
        case ReplicaNoted(replica=name, note=note):
            replica = state.replicas.get(name)
            return state if replica is None else _with_replica(state, replace(replica, note=note))
        case CloudSilent(reason=reason):
            return replace(state, cloud_problem=reason)
        case CloudAnswers():
            return replace(state, cloud_problem="")
        case ReplicaReady(replica=name):
            replica = replace(_moved(state, name, ReplicaState.READY, t_s), ready_s=t_s)
            state = _with_replica(state, replica)
            group = state.groups.get(replica.group)
            return state if group is None else _with_group(state, _well_again(group))
        case LaunchFailed() as e:
            replica = _moved(state, e.replica, ReplicaState.LAUNCH_FAILED, t_s, e.reason)
            state = _with_replica(state, replica)
            group = state.groups.get(replica.group)
            if group is None:
                return state
            group = replace(
                group, failures=group.failures + 1, retry_at_s=e.retry_at_s, failed_market=replica.market
            )
            if e.fault:
                group = replace(group, faults=group.faults + 1, last_fault=e.reason)
            if e.no_capacity and replica.market == "spot":
                since_s = t_s if group.spot_refused_since_s is None else group.spot_refused_since_s
                group = replace(group, spot_refused_since_s=since_s, spot_refused_s=t_s)
            return _with_group(state, group)
        case DrainStarted() as e:
            replica = _moved(state, e.replica, ReplicaState.DRAINING, t_s, e.reason)
            return _with_replica(state, replace(replica, drain_deadline_s=e.deadline_s))
        case ReplicaLost() as e:
            return _with_replica(state, _moved(state, e.replica, ReplicaState.LOST, t_s, e.reason))
        case TerminateIntended() as e:
            return _with_replica(state, _moved(state, e.replica, ReplicaState.TERMINATING, t_s, e.reason))
        case ReplicaGone(replica=name):
            _moved(state, name, ReplicaState.TERMINATED, t_s)
            ledger = tuple(
                replace(x, until_s=t_s) if x.replica == name and x.until_s is None else x for x in state.ledger
            )
            replicas = {k: v for k, v in state.replicas.items() if k != name}
            return replace(state, replicas=replicas, ledger=ledger)
        case DownRequested(drain_s=drain_s):
            return replace(state, down_requested_s=t_s, down_drain_s=drain_s)
        case ClusterDown():
            return replace(state, down_s=t_s)
        case _:
            return state


def _desired(old: GroupState | None, e: GroupDesired, t_s: float) -> GroupState:
    group = old or GroupState(name=e.group, desired=0, since_s=t_s, reason="", by=e.by)
    if e.by != "policy":  # somebody has looked at it
        group = _well_again(group)
    grows, shrinks = e.desired > group.desired, e.desired < group.desired
    return replace(
        group,
        desired=e.desired,
        since_s=t_s,
        reason=e.reason,
        by=e.by,
        victims=e.victims,
        market=e.market,
        # The first size is no scaling: it starts no cooldown.
        last_grow_s=t_s if grows and old else group.last_grow_s,
        last_shrink_s=t_s if shrinks else group.last_shrink_s,
    )


def _well_again(group: GroupState) -> GroupState:
    return replace(group, failures=0, faults=0, last_fault="", retry_at_s=None)


def _moved(state: ClusterState, name: str, to: ReplicaState, t_s: float, reason: str = "") -> Replica:
    replica = state.replicas.get(name)
    if replica is None:
        raise StateError(f"replica {name} is not known, so it cannot become {to}")
    return lifecycle.move(replica, to, t_s, reason)


def _with_replica(state: ClusterState, replica: Replica) -> ClusterState:
    return replace(state, replicas={**state.replicas, replica.name: replica})


def _with_group(state: ClusterState, group: GroupState) -> ClusterState:
    return replace(state, groups={**state.groups, group.name: group})
