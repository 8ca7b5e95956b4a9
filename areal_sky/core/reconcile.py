"""Desired vs requested vs observed -> what to record and what to do. No I/O, no clock: `now_s` is an argument.

One tick of the controller is `observe` (mirror the world), `decide` (intents) and `todo` (calls to make). Intents
become events before any call is made, and calls are derived from the state alone: after a crash at any point the
same calls come out again, and each of them is harmless when repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from areal_sky.core import market
from areal_sky.core.events import (
    ClusterDown,
    DrainStarted,
    Event,
    LaunchAccepted,
    LaunchFailed,
    ReplicaGone,
    ReplicaLost,
    ReplicaNoted,
    ReplicaProvisioned,
    ReplicaReady,
    TerminateIntended,
)  # fmt: skip
from areal_sky.core.lifecycle import SERVING
from areal_sky.core.model import (
    HEAD_GROUP,
    ClusterState,
    GroupPlan,
    LaunchPlan,
    Machine,
    MachineState,
    Replica,
    ReplicaState,
)  # fmt: skip
from areal_sky.core.view import HeadView

S = ReplicaState
SLOW_JOIN_S = 45.0  # a machine's set-up takes 10 s to minutes; asking its cloud meanwhile only slows it down


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
    acting = (r for r in state.replicas.values() if r.state in (S.QUEUED, S.DRAINING, S.TERMINATING))
    for r in sorted(acting, key=lambda r: (r.group != HEAD_GROUP, r.name)):
        if r.state is S.QUEUED:
            actions.append(Launch(r.name))
        elif r.state is S.DRAINING and r.drain_deadline_s is not None:
            actions.append(Drain(r.name, r.drain_deadline_s))
        elif r.state is S.TERMINATING:
            actions.append(Terminate(r.name))
    return tuple(actions)


def doubtful(state: ClusterState, missing_since_s: Mapping[str, float], now_s: float) -> tuple[str, ...]:
    """Replicas about which the cloud itself should be asked: they miss Ray nodes, or take long to join."""
    slow = (r.name for r in state.replicas.values() if r.state is S.PROVISIONED and now_s - r.since_s > SLOW_JOIN_S)
    return tuple(sorted({*missing_since_s, *slow}))


def track_missing(
    before: Mapping[str, float], state: ClusterState, view: HeadView | None, now_s: float
) -> dict[str, float]:
    """Since when each READY replica lacks live Ray nodes. A head that does not answer proves nothing."""
    if view is None:
        return {}
    alive = view.nodes_alive()
    return {
        r.name: before.get(r.name, now_s)
        for r in state.replicas.values()
        if r.group != HEAD_GROUP and r.state in (S.READY, S.DRAINING) and alive.get(r.name, 0) < r.nodes
    }


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
            return LaunchAccepted(r.name, machine.request_id, adopted=True)
        case S.REQUESTED:
            if failed or (gone and now_s - r.since_s > patience.vanish_s):
                none = machine is not None and machine.no_capacity
                return launch_failed(r, state, what, now_s, patience, none, fault=failed and not none)
            if machine is not None and machine.state is MachineState.UP and machine.nodes_up >= r.nodes:
                return ReplicaProvisioned(r.name)
            return _noted(r, machine.note if machine is not None else "")
        case S.PROVISIONED:
            if failed or gone:
                return launch_failed(r, state, what, now_s, patience, fault=failed)
            if _joined(r, seen.view):
                return ReplicaReady(r.name)
            if now_s - r.since_s > patience.join_s:
                late = f"did not join Ray within {patience.join_s:.0f} s"
                return launch_failed(r, state, late, now_s, patience, fault=True)
        case S.READY | S.DRAINING:
            # A cloud's word that a node is sick is no reason to end what works.
            if gone or (failed and not _joined(r, seen.view)):
                return ReplicaLost(r.name, what)
            since_s = seen.missing_since_s.get(r.name)
            if since_s is not None and now_s - since_s > patience.lost_s:
                return ReplicaLost(r.name, f"Ray has missed nodes of it for {now_s - since_s:.0f} s")
            if r.state is S.READY and _evicted(r, seen.view):
                return DrainStarted(r.name, "evicted: the head gives it no new work", now_s + patience.drain_s)
        case S.TERMINATING if machine is None:
            return ReplicaGone(r.name)
        case S.TERMINATING if machine is not None and machine.state is MachineState.STOPPING:
            return _noted(r, machine.error)
        case _:
            pass
    return None


def _noted(r: Replica, note: str) -> Event | None:
    return ReplicaNoted(r.name, note) if note and note != r.note else None


def launch_failed(
    r: Replica, state: ClusterState, reason: str, now_s: float, patience: Patience, no_capacity: bool = False,
    *, fault: bool = False,
) -> LaunchFailed:
    """The fact that a launch failed, with the time of the group's next try."""  # fmt: skip
    group = state.groups.get(r.group)
    retry_at_s = now_s + backoff_s(group.failures if group else 0, patience)
    return LaunchFailed(r.name, reason, retry_at_s, no_capacity, fault)


def _joined(r: Replica, view: HeadView | None) -> bool:
    if view is None:
        return False
    return r.group == HEAD_GROUP or view.nodes_alive().get(r.name, 0) >= r.nodes


def _evicted(r: Replica, view: HeadView | None) -> bool:
    """Whether somebody else than us has told the head to empty it: nothing else would ever end it."""
    load = view.load(r.name) if view is not None else None
    return r.group != HEAD_GROUP and load is not None and load.draining


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
        # The head goes when nothing works any more: it is the one who knows what still runs.
        others = any(r.group != HEAD_GROUP and r.state is not S.TERMINATING for r in state.replicas.values())
        desired = 1 if group.name == HEAD_GROUP and others else 0
    if state.down_requested_s is None:
        short = desired - len(serving)
        why = "" if short else market.back_to_spot(group, wanted, serving, now_s, plan.spot)
        if short > 0 or why:
            count = max(short, 1)
            left_usd = market.headroom_usd(state.replicas.values(), plan.max_hourly_usd)
            spot = plan.spot
            return [*market.launches(plan.cluster, group, wanted, mine, serving, count, now_s, spot, why, left_usd)]
    excess = len(serving) - desired
    if state.down_requested_s is None:
        excess -= market.replacing(serving)
    if excess <= 0:
        return []
    goes_down = state.down_requested_s is not None
    reason = "the cluster goes down" if goes_down else wanted.reason
    drain_s = state.down_drain_s if goes_down else patience.drain_s
    going = market.victims(group, serving, wanted, seen.view)[:excess]
    return [_end(r, market.replaced(r, serving, wanted) or reason, now_s + drain_s) for r in going]


def _end(r: Replica, reason: str, deadline_s: float) -> Event:
    if r.state is S.READY and r.group != HEAD_GROUP:
        return DrainStarted(r.name, reason, deadline_s)
    return TerminateIntended(r.name, reason)
