"""Scaling: frozen context -> decision with its reason, and the guards around any policy.

A policy is a pure function of one `ScalingContext`; `scaling_policies` has the built-in ones. It says what it wants;
`decide` puts the guards around it that hold for every policy: bounds, cooldown, and "unknown never scales in".
A reason, of a "hold" too, is true and holds no running number, so that the same situation gives the same words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal_sky.core.capacity import Packing, free_rooms, replicas_for
from areal_sky.core.model import GangDemand, GroupPlan, NodeView
from areal_sky.core.telemetry import Validity
from areal_sky.core.view import ReplicaLoad


@dataclass(frozen=True, slots=True)
class ScalingContext:
    """All that a scaling policy may know about one elastic group.

    `desired` is what is wanted now; `ready` and `starting` count replicas. `loads` covers the ready ones.
    `demand` holds the waiting gangs that this group could run and that no other group was asked to, best first.
    `nodes` are the live nodes with what is free on them (those of other groups or of replicas that are not ready are
    passed over); without them, a replica on which nothing of ours runs counts as empty and any other as full.
    """

    now_s: float
    group: GroupPlan
    desired: int
    ready: int
    starting: int
    loads: tuple[ReplicaLoad, ...]
    demand: tuple[GangDemand, ...]
    target_utilization: float
    cooldown_s: float
    idle_s: float
    last_grow_s: float | None
    last_shrink_s: float | None
    nodes: tuple[NodeView, ...] = ()

    @property
    def has_gpus(self) -> bool:
        return self.group.shape.gpus > 0

    @property
    def utilization_mean(self) -> float | None:
        """Mean GPU utilization (0..1) over the ready replicas; None unless it is known of every one."""
        known = [x.utilization_mean for x in self.loads if x.utilization_mean is not None]
        if not known or len(known) < len(self.loads):
            return None
        return math.fsum(known) / len(known)

    def trusts(self, load: ReplicaLoad) -> bool:
        """Whether that load may be acted on: its telemetry is known, or there is no GPU to tell of."""
        return not self.has_gpus or load.validity is Validity.KNOWN

    def idle(self) -> tuple[ReplicaLoad, ...]:
        """Ready replicas on which nothing of ours has run for `idle_s`, longest idle first."""
        idle = [
            x
            for x in self.loads
            if not x.draining and not x.running_tasks and x.idle_since_s is not None
            and self.now_s - x.idle_since_s >= self.idle_s
        ]  # fmt: skip
        return tuple(sorted(idle, key=lambda x: (x.idle_since_s or 0.0, x.replica)))


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """`desired` replicas and why. `victims` are the replicas to drain first when shrinking, in that order.

    `urgent`: work waits that neither free nor starting replicas can hold, so an earlier growth's cooldown is no
    reason to wait (what that growth brings is counted already).
    """

    group: str
    desired: int
    reason: str
    victims: tuple[str, ...] = ()
    urgent: bool = False


Policy = Callable[[ScalingContext], ScalingDecision]


def decide(policy: Policy, ctx: ScalingContext) -> ScalingDecision:
    """What `policy` wants, within every guard. Never raises: a policy that fails leaves the group as it is."""
    least, most = ctx.group.min_replicas, ctx.group.max_replicas
    if not ctx.group.elastic:
        return hold(ctx, "a fixed group does not scale")
    if not least <= ctx.desired <= most:  # the spec has changed: what it says goes before all else
        inside = min(max(ctx.desired, least), most)
        return ScalingDecision(ctx.group.name, inside, f"back within its bounds of {least} to {most} replicas")
    return with_cooldown(without_unknowns(bounded(_caught(policy))))(ctx)


def hold(ctx: ScalingContext, reason: str) -> ScalingDecision:
    """Leave the group as it is."""
    return ScalingDecision(ctx.group.name, ctx.desired, reason)


# ---------------------------------------------------------------- guards around any policy


def bounded(policy: Policy) -> Policy:
    """Keep `desired` within the group's min and max."""

    def guarded(ctx: ScalingContext) -> ScalingDecision:
        least, most = ctx.group.min_replicas, ctx.group.max_replicas
        wanted = policy(ctx)
        if least <= wanted.desired <= most:
            return wanted
        inside = min(max(wanted.desired, least), most)
        bound = f"max_replicas {most}" if wanted.desired > most else f"min_replicas {least}"
        victims = wanted.victims[: max(0, ctx.desired - inside)]
        return replace(wanted, desired=inside, victims=victims, reason=f"{wanted.reason}; held at {bound}")

    return guarded


def with_cooldown(policy: Policy) -> Policy:
    """No change for `cooldown_s` after the last one, so that a group does not flap.

    Growth for waiting gangs (`urgent`) waits only after a shrink: what an earlier growth brings is counted already.
    """

    def guarded(ctx: ScalingContext) -> ScalingDecision:
        wanted = policy(ctx)
        if wanted.desired == ctx.desired:
            return wanted
        urgent = wanted.urgent and wanted.desired > ctx.desired  # a policy of a user's may say so of anything
        changes = {"shrink": ctx.last_shrink_s, "growth": None if urgent else ctx.last_grow_s}
        for change, at_s in changes.items():
            if at_s is not None and ctx.now_s - at_s < ctx.cooldown_s:
                held = f"held by the cooldown of {seconds(ctx.cooldown_s)} after the last {change}"
                return hold(ctx, f"{wanted.reason}; {held}")
        return wanted

    return guarded


def without_unknowns(policy: Policy) -> Policy:
    """Let only replicas whose load is known be drained, and name the victims where the policy did not.

    Replicas that are not ready yet may always be given up: nothing runs on them.
    """

    def guarded(ctx: ScalingContext) -> ScalingDecision:
        wanted = policy(ctx)
        drop = ctx.desired - wanted.desired
        if drop <= 0:
            return replace(wanted, victims=())
        safe = {x.replica: x for x in ctx.loads if not x.draining and ctx.trusts(x)}
        victims = [v for v in dict.fromkeys(wanted.victims) if v in safe][:drop]
        unready = min(max(0, ctx.desired - ctx.ready), drop - len(victims))
        if not wanted.victims:
            victims = [x.replica for x in sorted(safe.values(), key=_least_missed)][: drop - unready]
        allowed = len(victims) + unready
        if allowed == drop:
            return replace(wanted, victims=tuple(victims))
        reason = f"{wanted.reason}; {replicas(drop - allowed)} kept, for unknown load never scales in"
        return replace(wanted, desired=ctx.desired - allowed, victims=tuple(victims), reason=reason)

    return guarded


def _caught(policy: Policy) -> Policy:
    def guarded(ctx: ScalingContext) -> ScalingDecision:
        try:
            wanted: Any = policy(ctx)
        except Exception as e:  # a user's policy must not stop the controller
            return hold(ctx, f"the policy failed: {type(e).__name__}: {e}")
        if not isinstance(wanted, ScalingDecision) or type(wanted.desired) is not int:
            return hold(ctx, f"the policy must return a ScalingDecision with a whole `desired`, not {wanted!r}")
        return replace(wanted, group=ctx.group.name)

    return guarded


def _least_missed(load: ReplicaLoad) -> tuple[int, float, float, str]:
    """Sort key: fewest tasks, longest idle, least used first."""
    idle_since_s = math.inf if load.idle_since_s is None else load.idle_since_s
    return load.running_tasks, idle_since_s, load.utilization_mean or 0.0, load.replica


# ---------------------------------------------------------------- whose demand is it


def assign_demand(
    demand: Sequence[GangDemand],
    groups: Sequence[GroupPlan],
    nodes: Sequence[NodeView] = (),
    ready: Mapping[str, int] | None = None,
) -> dict[str, tuple[GangDemand, ...]]:
    """Which elastic group shall grow for which waiting gang: `demand`, best first, split by group name.

    A gang goes to the group that it names, else to the one that holds it for the least money per hour (groups
    without a price last), among those that still have room for it up to their max; when none has, it waits for the
    cheapest. Room counts what is free on `nodes` (give the live nodes of ready replicas) and every replica up to the
    max that is not among the `ready` ones (how many, by group), so a gang stays with its group while that grows.
    Every elastic group has an entry.
    """
    elastic = [g for g in groups if g.elastic]
    rooms = {
        g.name: Packing(g, free_rooms(nodes, g.name), max(0, g.max_replicas - (ready or {}).get(g.name, 0)))
        for g in elastic
    }
    assigned: dict[str, list[GangDemand]] = {g.name: [] for g in elastic}
    by_shape: dict[object, list[GroupPlan]] = {}  # thousands of gangs, a few shapes
    for gang in demand:
        shape = gang.group, gang.bundles, gang.bundle, gang.accelerators
        able = by_shape.get(shape)
        if able is None:
            able = sorted((g for g in elastic if replicas_for(gang, g)), key=lambda g: _cost(gang, g))
            by_shape[shape] = able
        if able:
            home = next((g for g in able if rooms[g.name].add(gang)), able[0])
            assigned[home.name].append(gang)
    return {name: tuple(gangs) for name, gangs in assigned.items()}


def _cost(gang: GangDemand, group: GroupPlan) -> float:
    """Dollars per hour of the empty replicas that hold the gang; infinite without a price."""
    price = group.offer.price_usd_per_hour
    return math.inf if price is None else price * group.nodes_per_replica * (replicas_for(gang, group) or 0)


def replicas(count: int) -> str:
    """`1 replica`, `3 replicas`."""
    return f"{count} replica{'' if count == 1 else 's'}"


def seconds(value_s: float) -> str:
    """`90 s` or `5 min`."""
    return f"{value_s / 60:g} min" if value_s >= 120 else f"{value_s:g} s"
