"""The built-in scaling policies, by name. Each is a factory: numbers (of a preset) -> a pure policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_sky.core.capacity import Packing, empty_rooms, free_rooms, replicas_for
from areal_sky.core.model import GangDemand
from areal_sky.core.placement import NodeRoom
from areal_sky.core.scaling import Policy, ScalingContext, ScalingDecision, hold, replicas, seconds
from areal_sky.core.view import ReplicaLoad


def demand_and_utilization(options: Mapping[str, float]) -> Policy:
    """Grow for waiting gangs, and when GPUs are busy while work waits; shrink what has been idle for long.

    Options: `grow_at_most`, `shrink_at_most`: replicas per decision, 0 for no limit. `idle_utilization`: a replica
    whose GPUs work more than this (0..1) is not idle, whoever uses them. Raises ValueError on other options.
    """
    numbers = _numbers(options, grow_at_most=0, shrink_at_most=0, idle_utilization=0.05)

    def policy(ctx: ScalingContext) -> ScalingDecision:
        return _for_demand(ctx, numbers, by_utilization=True) or _without_demand(ctx, numbers)

    return policy


def demand_only(options: Mapping[str, float]) -> Policy:
    """As `demand_and_utilization`, but utilization makes nothing grow. The same options."""
    numbers = _numbers(options, grow_at_most=0, shrink_at_most=0, idle_utilization=0.05)

    def policy(ctx: ScalingContext) -> ScalingDecision:
        return _for_demand(ctx, numbers, by_utilization=False) or _without_demand(ctx, numbers)

    return policy


def fixed(options: Mapping[str, float]) -> Policy:
    """Never scale: a group stays at the size that the spec or a person gave it. No options."""
    _numbers(options)
    return lambda ctx: hold(ctx, "policy `fixed`: only a person scales this group")


BUILT_IN: Mapping[str, Callable[[Mapping[str, float]], Policy]] = {
    "balance": demand_and_utilization,
    "demand_and_utilization": demand_and_utilization,
    "demand_only": demand_only,
    "fixed": fixed,
}


def _for_demand(
    ctx: ScalingContext, numbers: Mapping[str, float], by_utilization: bool
) -> ScalingDecision | None:
    """The decision while work waits that this group could run; None when there is none."""
    waiting = [g for g in ctx.demand if replicas_for(g, ctx.group) is not None]
    if not waiting:
        return None
    name, most = ctx.group.name, ctx.group.max_replicas
    coming = max(0, ctx.desired - ctx.ready)
    packing = Packing(ctx.group, _free(ctx) + empty_rooms(ctx.group, coming), max(0, most - ctx.desired))
    extra_before = 0
    growing, too_large, served = list[GangDemand](), list[GangDemand](), list[GangDemand]()
    for gang in waiting:
        if not packing.add(gang):
            too_large.append(gang)
        elif packing.extra > extra_before:
            growing.append(gang)
            extra_before = packing.extra
        else:
            served.append(gang)
    if packing.extra:
        grow = min(packing.extra, int(numbers["grow_at_most"]) or packing.extra)
        reason = f"{_gangs(growing)} waiting: needs {replicas(packing.extra)} more"
        if grow < packing.extra:
            reason += f", {grow} at a time"
        if too_large:
            reason += f"; {_gangs(too_large)} would not fit below max_replicas {most}"
        return ScalingDecision(name, ctx.desired + grow, reason, urgent=True)
    if too_large and not served:
        return hold(ctx, f"{_gangs(too_large)} waiting, but no room is left below max_replicas {most}")
    if coming:
        return hold(ctx, f"{_gangs(served)} waiting: room for that is starting ({replicas(coming)})")
    busy = ctx.utilization_mean
    if by_utilization and busy is not None and busy >= ctx.target_utilization and ctx.desired < most:
        reason = f"{_gangs(served)} waiting and the GPUs are busier than {ctx.target_utilization:.0%}"
        return ScalingDecision(name, ctx.desired + 1, reason)
    return hold(ctx, f"{_gangs(served)} waiting, but the ready replicas have room for it: no more are needed")


def _without_demand(ctx: ScalingContext, numbers: Mapping[str, float]) -> ScalingDecision:
    """The decision while nothing waits that this group could run: shrink what is idle."""
    spare = ctx.desired - ctx.group.min_replicas
    idle = ctx.idle()
    if not idle:
        return hold(ctx, f"nothing waits, and no replica has been idle for {seconds(ctx.idle_s)}")
    if spare <= 0:
        return hold(ctx, f"nothing waits, but the group is at its min_replicas {ctx.group.min_replicas}")
    trusted = [x for x in idle if ctx.trusts(x)]
    if not trusted:
        words = f"{_names(idle)} {_has(idle)} no task, but the GPU load is {idle[0].validity}"
        return hold(ctx, f"{words}: unknown never scales in")
    used = [x for x in trusted if (x.utilization_mean or 0.0) > numbers["idle_utilization"]]
    victims = [x for x in trusted if x not in used]
    if not victims:
        return hold(ctx, f"{_names(used)} {_has(used)} no task of ours, but the GPUs are in use")
    victims = victims[: min(spare, int(numbers["shrink_at_most"]) or spare)]
    return ScalingDecision(
        ctx.group.name,
        ctx.desired - len(victims),
        f"nothing waits, and {_names(victims)} {_has(victims)} been idle for {seconds(ctx.idle_s)}",
        victims=tuple(x.replica for x in victims),
    )


def _free(ctx: ScalingContext) -> tuple[NodeRoom, ...]:
    if ctx.nodes:
        ready = {x.replica for x in ctx.loads}  # of a replica that still starts, some nodes may be live already
        return free_rooms((n for n in ctx.nodes if n.replica in ready), ctx.group.name)
    return empty_rooms(ctx.group, sum(1 for x in ctx.loads if not x.running_tasks and not x.draining))


def _numbers(options: Mapping[str, float], **defaults: float) -> dict[str, float]:
    unknown = sorted(set(options) - set(defaults))
    if unknown:
        known = ", ".join(f"`{d}`" for d in defaults) or "none"
        raise ValueError(f"unknown option `{unknown[0]}`; options: {known}")
    for name, value in options.items():
        given: Any = value  # comes from YAML
        if isinstance(given, bool) or not isinstance(given, int | float) or not given >= 0:
            raise ValueError(f"option `{name}` must be a number that is not negative, not {given!r}")
        if name.endswith("_at_most") and given != int(given):
            raise ValueError(f"option `{name}` counts replicas: a whole number, not {given!r}")
    return {**defaults, **options}


def _gangs(gangs: Sequence[GangDemand]) -> str:
    if len(gangs) == 1:
        return gangs[0].task_id
    others = len(gangs) - 1
    return f"{gangs[0].task_id} and {others} more task{'' if others == 1 else 's'}"


def _names(loads: Sequence[ReplicaLoad]) -> str:
    names = [x.replica for x in loads]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _has(loads: Sequence[ReplicaLoad]) -> str:
    return "has" if len(loads) == 1 else "have"
