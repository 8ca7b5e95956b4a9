"""Desired vs requested vs observed -> what to record and what to do. No I/O, no clock: `now_s` is an argument.

One tick of the controller is `observe` (mirror the world), `decide` (intents) and `todo` (calls to make). Intents
become events before any call is made, and calls are derived from the state alone: after a crash at any point the
same calls come out again, and each of them is harmless when repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from areal_sky.core.events import (
    ClusterDown,
    DrainStarted,
    Event,
    LaunchAccepted,
    LaunchFailed,
    LaunchIntended,
    ReplicaGone,
    ReplicaLost,
    ReplicaProvisioned,
    ReplicaReady,
    TerminateIntended,
)  # fmt: skip
from areal_sky.core.lifecycle import SERVING
from areal_sky.core.model import (
    HEAD_GROUP,
    ClusterState,
    GroupPlan,
    GroupState,
    LaunchPlan,
    Machine,
    MachineState,
    Offer,
    Replica,
    ReplicaState,
    replica_name,
)  # fmt: skip
from areal_sky.core.view import HeadView

S = ReplicaState


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait before concluding something, in seconds. Defaults suit clouds; local ones are shorter.

    `vanish_s`: a machine not listed this long after its launch has failed (clouds list new ones late).
    `join_s`: a machine that is up must have joined Ray by then. `lost_s`: a READY replica may miss Ray nodes this long.
    `drain_s`: what running work gets to finish. `backoff_s` doubles with each failed launch, up to `backoff_max_s`.
    """

    vanish_s: float = 60.0
    join_s: float = 900.0
    lost_s: float = 15.0
    drain_s: float = 600.0
    backoff_s: float = 15.0
    backoff_max_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Observation:
    """The world at one moment. `view` is None while the head does not answer.

    `missing_since_s` tells since when a replica has had fewer live Ray nodes than it should.
    """

    machines: Mapping[str, Machine]
    view: HeadView | None
    missing_since_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Action:
    """A call to make for one replica."""

    replica: str


@dataclass(frozen=True, slots=True)
class Launch(Action):
    pass


@dataclass(frozen=True, slots=True)
class Drain(Action):
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Terminate(Action):
    pass


def todo(state: ClusterState) -> tuple[Action, ...]:
    """Every call that the state asks for, head first, then in name order. Repeating any is harmless."""
    actions: list[Action] = []
    for r in sorted(state.replicas.values(), key=lambda r: (r.group != HEAD_GROUP, r.name)):
        if r.state is S.QUEUED:
            actions.append(Launch(r.name))
        elif r.state is S.DRAINING and r.drain_deadline_s is not None:
            actions.append(Drain(r.name, r.drain_deadline_s))
        elif r.state is S.TERMINATING:
            actions.append(Terminate(r.name))
    return tuple(actions)


def track_missing(
    before: Mapping[str, float], state: ClusterState, view: HeadView | None, now_s: float
) -> dict[str, float]:
    """Since when each READY replica lacks live Ray nodes. A head that does not answer proves nothing."""
    if view is None:
        return {}
    missing = {
        r.name
        for r in state.replicas.values()
        if r.group != HEAD_GROUP and r.state in (S.READY, S.DRAINING) and _nodes_alive(view, r) < r.nodes
    }
    return {name: before.get(name, now_s) for name in missing}


def observe(state: ClusterState, seen: Observation, now_s: float, patience: Patience) -> list[Event]:
    """What has happened since the last look, as events; at most one per replica."""
    events: list[Event] = []
    for r in state.replicas.values():
        event = _observed(r, state, seen, now_s, patience)
        if event is not None:
            events.append(event)
    return events


def decide(
    state: ClusterState, plan: LaunchPlan, seen: Observation, now_s: float, patience: Patience
) -> list[Event]:
    """What shall happen next: launches, drains and terminations, as intents. At most one per replica."""
    events: list[Event] = []
    for r in state.replicas.values():
        if r.state in (S.LOST, S.LAUNCH_FAILED):
            events.append(TerminateIntended(r.name, f"clean up: {r.reason}"))
        elif r.state is S.DRAINING and (why := _drained(r, seen.view, now_s)):
            events.append(TerminateIntended(r.name, why))
    for group in (plan.head, *plan.groups):
        events += _resize(state, plan, group, seen, now_s, patience)
    if state.down_requested_s is not None and state.down_s is None and not state.replicas:
        events.append(ClusterDown())
    return events


def backoff_s(failures: int, patience: Patience) -> float:
    """Wait before the next launch of a group after `failures` failed ones in a row."""
    return min(patience.backoff_max_s, patience.backoff_s * 2.0 ** min(failures, 16))


# ---------------------------------------------------------------- one replica


def _observed(
    r: Replica, state: ClusterState, seen: Observation, now_s: float, patience: Patience
) -> Event | None:
    machine = seen.machines.get(r.name)
    gone = machine is None
    failed = machine is not None and machine.state is MachineState.FAILED
    what = machine.error if machine is not None and machine.error else "its machines are gone"
    match r.state:
        case S.QUEUED if machine is not None:
            return LaunchAccepted(r.name, request_id="", adopted=True)
        case S.REQUESTED:
            if failed or (gone and now_s - r.since_s > patience.vanish_s):
                return _failed(r, state, what, now_s, patience)
            if machine is not None and machine.state is MachineState.UP and machine.nodes_up >= r.nodes:
                return ReplicaProvisioned(r.name)
        case S.PROVISIONED:
            if failed or gone:
                return _failed(r, state, what, now_s, patience)
            if _joined(r, seen.view):
                return ReplicaReady(r.name)
            if now_s - r.since_s > patience.join_s:
                return _failed(r, state, f"did not join Ray within {patience.join_s:.0f} s", now_s, patience)
        case S.READY | S.DRAINING:
            if failed or gone:
                return ReplicaLost(r.name, what)
            since_s = seen.missing_since_s.get(r.name)
            if since_s is not None and now_s - since_s > patience.lost_s:
                return ReplicaLost(r.name, f"Ray has missed nodes of it for {now_s - since_s:.0f} s")
        case S.TERMINATING if gone:
            return ReplicaGone(r.name)
        case _:
            pass
    return None


def _failed(r: Replica, state: ClusterState, reason: str, now_s: float, patience: Patience) -> LaunchFailed:
    group = state.groups.get(r.group)
    return LaunchFailed(r.name, reason, now_s + backoff_s(group.failures if group else 0, patience))


def _joined(r: Replica, view: HeadView | None) -> bool:
    if view is None:
        return False
    return r.group == HEAD_GROUP or _nodes_alive(view, r) >= r.nodes


def _nodes_alive(view: HeadView, r: Replica) -> int:
    return sum(1 for n in view.nodes if n.replica == r.name)


def _drained(r: Replica, view: HeadView | None, now_s: float) -> str:
    if r.drain_deadline_s is not None and now_s >= r.drain_deadline_s:
        return "drain deadline passed"
    load = view.load(r.name) if view is not None else None
    # Only once the head has confirmed the drain can no new task slip in behind our back.
    if load is not None and load.draining and load.running_tasks == 0:
        return "drained: nothing runs there any more"
    return ""


# ---------------------------------------------------------------- one group


def _resize(
    state: ClusterState, plan: LaunchPlan, group: GroupPlan, seen: Observation, now_s: float, patience: Patience
) -> list[Event]:
    wanted = state.groups.get(group.name)
    if wanted is None:
        return []
    mine = [r for r in state.replicas.values() if r.group == group.name]
    serving = sorted((r for r in mine if r.state in SERVING), key=lambda r: r.slot)
    desired = wanted.desired
    if state.down_requested_s is not None:
        # The head goes last: it is the one who knows what still runs.
        others = any(r.group != HEAD_GROUP for r in state.replicas.values())
        desired = 1 if group.name == HEAD_GROUP and others else 0
    if len(serving) < desired and state.down_requested_s is None:
        if wanted.retry_at_s is not None and now_s < wanted.retry_at_s:
            return []
        return _launches(plan.cluster, group, wanted, mine, serving, desired)
    excess = len(serving) - desired
    if excess <= 0:
        return []
    goes_down = state.down_requested_s is not None
    reason = "the cluster goes down" if goes_down else wanted.reason
    drain_s = state.down_drain_s if goes_down else patience.drain_s
    return [_end(r, reason, now_s + drain_s) for r in _victims(serving, wanted, seen)[:excess]]


def _launches(
    cluster: str, group: GroupPlan, wanted: GroupState, mine: list[Replica], serving: list[Replica], desired: int
) -> list[Event]:
    taken = {r.slot for r in mine}
    if group.name == HEAD_GROUP and taken:
        return []  # one address, one store: the old head must be gone before a new one starts
    free = (slot for slot in range(len(taken) + desired) if slot not in taken)
    on_demand = sum(1 for r in serving if r.market == "on_demand")
    events: list[Event] = []
    for _ in range(desired - len(serving)):
        slot = next(free)
        offer = offer_for(group, on_demand, wanted.market)
        on_demand += offer.market == "on_demand"
        events.append(
            LaunchIntended(
                replica=replica_name(cluster, group.name, slot), group=group.name, slot=slot,
                nodes=group.nodes_per_replica, market=offer.market,
                price_usd_per_hour=offer.price_usd_per_hour, reason=wanted.reason,
            )
        )  # fmt: skip
    return events


def offer_for(group: GroupPlan, on_demand_now: int, market: str | None = None) -> Offer:
    """The offer of the group's next replica: a mixed group fills its on-demand base first, then takes spot.

    `market` overrides that where such an offer exists.
    """
    if market is not None:
        asked = group.spot_offer if market == "spot" else group.on_demand_offer
        return asked or group.offer
    if group.market == "mixed":
        preferred = group.on_demand_offer if on_demand_now < group.on_demand_base else group.spot_offer
        return preferred or group.offer
    if group.market == "spot":
        return group.spot_offer or group.offer
    return group.on_demand_offer or group.offer


def _victims(serving: list[Replica], wanted: GroupState, seen: Observation) -> list[Replica]:
    """Who goes first: not ready yet, then whom the policy named, then longest idle, then the highest slot."""

    def rank(r: Replica) -> tuple[bool, int, float, int]:
        named = wanted.victims.index(r.name) if r.name in wanted.victims else len(wanted.victims)
        load = seen.view.load(r.name) if seen.view is not None else None
        idle_since_s = load.idle_since_s if load is not None else None
        return r.state is S.READY, named, idle_since_s if idle_since_s is not None else float("inf"), -r.slot

    return sorted(serving, key=rank)


def _end(r: Replica, reason: str, deadline_s: float) -> Event:
    if r.state is S.READY and r.group != HEAD_GROUP:
        return DrainStarted(r.name, reason, deadline_s)
    return TerminateIntended(r.name, reason)
