"""When time alone may change what the next tick of a controller does: the ticks between can be left out.

A tick is a function of the events so far, of what the cloud and the head say, and of the time. Where nothing of the
first three has changed, only the limits below can make it act. tests/run/simulation holds the list to be complete: a
simulation that ticks every second records the same events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from areal_sky.core.model import ClusterState, LaunchPlan, ReplicaState
from areal_sky.core.reconcile import SLOW_JOIN_S, Patience
from areal_sky.run.controller import SILENT_S
from areal_sky.spec.cluster import ScalingSpec

S = ReplicaState
LONGEST_S = 300.0  # a user's own policy may look at the clock, too


def next_wake_s(
    state: ClusterState,
    plan: LaunchPlan,
    scaling: ScalingSpec,
    patience: Patience,
    idle_since_s: Iterable[float],
    quiet_since_s: float | None,
    now_s: float,
) -> float:
    """The first such time from now on, at most `LONGEST_S` away. `quiet_since_s`: something does not answer since."""
    due = _due_s(state, plan, scaling, patience, quiet_since_s)
    idle = (t + scaling.idle_s for t in idle_since_s)
    return min(t for t in chain(due, idle, (now_s + LONGEST_S,)) if t >= now_s)


def _due_s(
    state: ClusterState, plan: LaunchPlan, scaling: ScalingSpec, patience: Patience, quiet_since_s: float | None
) -> Iterator[float]:
    for r in state.replicas.values():
        if r.state is S.READY:
            if r.fallback and r.ready_s is not None:
                yield r.ready_s + plan.spot.hold_s
        elif r.state is S.REQUESTED:
            yield r.since_s + patience.vanish_s
        elif r.state is S.PROVISIONED:
            yield r.since_s + SLOW_JOIN_S
            yield r.since_s + patience.join_s
        elif r.state is S.DRAINING and r.drain_deadline_s is not None:
            yield r.drain_deadline_s
    for g in state.groups.values():
        for t in (g.last_grow_s, g.last_shrink_s):
            if t is not None:
                yield t + scaling.cooldown_s
        if g.retry_at_s is not None:
            yield g.retry_at_s
        if g.spot_refused_since_s is not None:
            yield g.spot_refused_since_s + plan.spot.give_up_s
        if g.spot_refused_s is not None:
            yield g.spot_refused_s + plan.spot.hold_s
    if quiet_since_s is not None:
        yield quiet_since_s + SILENT_S
        yield quiet_since_s + patience.lost_s
