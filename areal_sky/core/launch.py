"""plan(spec, offers) -> LaunchPlan: what will be launched, where and at what price. Pure.

Every group of a cluster is put in one region, since nodes join the head on its private address: the region where
the whole cluster costs least at its largest. `infra: local` has no region; its nodes are priced as if on a cloud.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from areal_sky.core import advice, memory_check
from areal_sky.core.architecture import Architecture
from areal_sky.core.market import NO_SPOT_CLOUDS
from areal_sky.core.model import HEAD_GROUP, GroupPlan, LaunchPlan, NodeShape, Offer, SpotPatience, replica_name
from areal_sky.core.nodeenv import (
    DEFAULT_GATEWAY_PORT,
    DEFAULT_LEASE_S,
    DEFAULT_RAY_PORT,
    GroupShape,
    HeadEnv,
    NodeEnv,
    PoolShare,
)
from areal_sky.core.offers import (
    NO_PRICE,
    UNPRICED_CLOUDS,
    Choice,
    Known,
    MachineType,
    Notes,
    best_first,
    choices,
    cost,
    machines,
)
from areal_sky.core.prices import within_budget
from areal_sky.core.unlisted import guessed, pretend, scaled
from areal_sky.errors import InvalidInput, Refused
from areal_sky.spec.cluster import ClusterSpec, NodeGroupSpec

Region = tuple[str, str | None]  # cloud, region
Files = Mapping[str, Architecture]  # of models whose `config` is a file, by the model's name
# The head runs Ray's GCS, the gateway and the scheduler, and no tasks of size: measured below 1 GiB at rest.
HEAD_CPUS = 4.0
HEAD_MEMORY_GIB = 16.0
MAX_ALTERNATIVES, MAX_PLACES = 5, 3
UNBOUNDED = 1e6  # vCPUs or GiB: more than any machine has, and a number that JSON can carry


def plan(spec: ClusterSpec, offers: Sequence[Offer] | Known, files: Files | None = None) -> LaunchPlan:
    """Choose an offer for the head and for every group, and say what is guessed and what is not known.

    Raises Refused with every reason why it must not be launched so: over `budget.max_hourly_usd` even at the least
    that would run, groups that share no region, infra that cannot do what is asked.
    """
    planned = draft(spec, offers, files)
    refuse(planned)
    return planned


def refuse(planned: LaunchPlan) -> None:
    """Raises Refused with everything that speaks against a plan, if anything does."""
    if planned.refusals:
        raise Refused("\n".join(planned.refusals))


def draft(spec: ClusterSpec, offers: Sequence[Offer] | Known, files: Files | None = None) -> LaunchPlan:
    """The plan, its `refusals` (and those apart in `memory`) named instead of raised: for showing it."""
    known = offers if isinstance(offers, Known) else Known(tuple(offers))
    notes = Notes(list(spec.guesses), list(known.unknowns))
    refusals = list(known.refusals)
    head = _head_group(spec)
    wanted = [head, *spec.groups]
    dear: dict[MachineType, float] = {}
    found = {g.name: _machines(g, spec, known.offers, refusals, dear) for g in wanted}
    place, next_places = (None, ()) if spec.is_local else _common_place(wanted, found, notes)
    plans = [_group_plan(g, spec, found[g.name], place, known.offers, notes, dear) for g in wanted]
    result = LaunchPlan(
        cluster=spec.name, infra=spec.infra, head=plans[0], groups=tuple(plans[1:]),
        guesses=tuple(dict.fromkeys(notes.guesses)),
        next_places=next_places,
        spot=SpotPatience(spec.spot.patience_s, spec.spot.hold_s),
        max_hourly_usd=spec.budget.max_hourly_usd,
        memory=memory_check.check(spec, plans[1:], files or {}),
    )  # fmt: skip
    refused, far = advice.apart(result, found)
    refusals += [*refused, *advice.impossible(spec, plans)]
    unknowns = dict.fromkeys([*notes.unknowns, *far, *_place_unknowns(plans, spec, bool(refused or far))])
    result = replace(result, unknowns=tuple(unknowns), refusals=tuple(refusals))
    return within_budget(advice.with_fallback(result, spec.budget), spec.budget)


# ---------------------------------------------------------------- where


def _head_group(spec: ClusterSpec) -> NodeGroupSpec:
    r = spec.head
    if not (r.accelerators or r.instance_type or r.cpus or r.memory_gib):
        r = r.model_copy(update={"cpus": HEAD_CPUS, "memory_gib": HEAD_MEMORY_GIB})
    one = {"min_replicas": 1, "max_replicas": 1, "nodes_per_replica": 1}
    # Never on spot unless the head's own resources say so: with it the whole cluster goes.
    market = "spot" if r.use_spot else "on_demand"
    return NodeGroupSpec(name=HEAD_GROUP, resources=r, elastic=False, market=market, **one)


def _machines(
    group: NodeGroupSpec,
    spec: ClusterSpec,
    offers: Sequence[Offer],
    refusals: list[str],
    dear: dict[MachineType, float],
) -> tuple[MachineType, ...]:
    """The machines that would do. Spot above the wanted share of the on-demand price is dropped, its price noted."""
    wanted = _choices(group, spec)
    found = machines(group.resources, wanted, offers)
    if group.market == "on_demand":
        found = tuple(m for m in found if m.on_demand is not None)
    if not found and spec.is_local:  # a pretend machine may have any shape: price the nearest real one
        found = machines(group.resources, wanted, offers, minima=False, capped=False)
    elif not found:
        uncapped = machines(group.resources, wanted, offers, capped=False)
        refusals += filter(None, [advice.over_hourly_cap(group, uncapped)])
    kept = [m.without_dear_spot(spec.spot.max_spot_price_frac) for m in found]
    dear |= {k: m.spot.price_usd_per_hour or 0.0 for m, k in zip(found, kept, strict=True) if m.spot and not k.spot}
    return tuple(m.with_spot_partition(spec.spot.slurm_partition) for m in kept)


def _choices(group: NodeGroupSpec, spec: ClusterSpec) -> tuple[Choice, ...]:
    return choices(group.resources, None) if spec.is_local else choices(group.resources, spec.infra)


def _common_place(
    wanted: Sequence[NodeGroupSpec], found: dict[str, tuple[MachineType, ...]], notes: Notes
) -> tuple[Region | None, tuple[tuple[str, float], ...]]:
    """The (cloud, region) that serves most groups, then follows their order best, then costs least; and the next best.

    The next best are those that have every machine, with what the cluster costs there at its largest.
    """
    places = sorted({_where(m) for ms in found.values() for m in ms}, key=str)
    if not places:
        return None, ()

    def key(place: Region) -> tuple[int, int, float]:
        best = [next(iter(best_first((m for m in found[g.name] if _where(m) == place), g)), None) for g in wanted]
        total = sum(cost(m, g) for m, g in zip(best, wanted, strict=True) if m is not None)
        return sum(m is None for m in best), sum(m.rank for m in best if m is not None), total

    scores = {p: key(p) for p in places}
    full = sorted((p for p in places if scores[p][0] == 0), key=lambda p: scores[p])
    chosen = full[0] if full else min(places, key=lambda p: scores[p])
    priced = [p for p in full if math.isfinite(scores[p][2])]
    if len(priced) > 1 and chosen in priced:
        dearest = max(scores[p][2] for p in priced)
        notes.guesses.append(
            f"region: {_place_text(chosen)} costs least of the {len(priced)} known that have every machine "
            f"asked for (${scores[chosen][2]:,.2f}/h at the largest, ${dearest:,.2f}/h in the dearest); "
            "`infra:` pins one"
        )
    others = [(_place_text(p), scores[p][2]) for p in priced if p != chosen]
    return chosen, tuple(others[:MAX_PLACES])


def _where(m: MachineType) -> Region:
    return m.any_offer.cloud, m.any_offer.region


def _place_text(place: Region) -> str:
    return "/".join(x for x in place if x)


def _place_unknowns(plans: Sequence[GroupPlan], spec: ClusterSpec, told: bool) -> list[str]:
    if spec.is_local:
        return []
    head = plans[0].offer
    lines: list[str] = []
    ported = [g.name for g in spec.groups if g.resources.raw.get("ports")]
    if ported and head.cloud in ("aws", "any"):
        lines.append(
            f"{', '.join(ported)}: on AWS, `ports` gives machines a security group of their own, which keeps them "
            "from the head; leave `ports` out (the gateway needs none)"
        )
    if not (lines or told) and head.cloud not in ("aws", "gcp", *UNPRICED_CLOUDS):
        lines.append(
            f"do machines of two SkyPilot clusters reach each other's private address on {head.cloud}? "
            "(on aws and gcp they do; ours must)"
        )
    return lines


# ---------------------------------------------------------------- one group


def _group_plan(
    group: NodeGroupSpec,
    spec: ClusterSpec,
    found: Sequence[MachineType],
    place: Region | None,
    offers: Sequence[Offer],
    notes: Notes,
    dear: Mapping[MachineType, float],
) -> GroupPlan:
    here = [m for m in found if place is None or _where(m) == place] or list(found)
    ranked = best_first(here, group)
    best = ranked[0] if ranked else _unlisted(group, spec, place, offers, notes)
    if ranked and cost(best, group) == math.inf:
        what = best.any_offer.instance_type
        notes.unknowns.append(f"{group.name}: {NO_PRICE} for {what} on {advice.place_text(best)}")
    best = best.with_spot_partition(spec.spot.slurm_partition)
    no_spot = advice.why_no_spot(best, spec, dear.get(best))
    market = _market(group, best, no_spot, notes)
    spot_first = market == "spot" or (market == "mixed" and group.on_demand_base == 0)
    options = advice.priced_choices(group, _choices(group, spec), here, found)
    if spec.is_local:
        best = pretend(best, group, notes)
        ranked = [best]
    offer = (best.spot if spot_first else best.on_demand) or best.any_offer
    names = list(dict.fromkeys(m.any_offer.shape.accelerator or "CPU" for m in ranked))
    if len(names) > 1 and group.resources.accelerators:
        rule = "first in order" if group.resources.ordered else "cheapest at the group's largest"
        others = " or ".join(names[1:])
        notes.guesses.append(f"{group.name}: {names[0]}, the {rule}; SkyPilot may find {others} better at launch")
    twins = [(m.spot if spot_first else m.on_demand) for m in ranked[1:]]
    return GroupPlan(
        name=group.name,
        elastic=group.elastic,
        min_replicas=group.min_replicas,
        max_replicas=group.max_replicas,
        nodes_per_replica=group.nodes_per_replica,
        market=market,
        on_demand_base=group.on_demand_base,
        shape=offer.shape,
        offer=offer,
        on_demand_offer=best.on_demand,
        spot_offer=best.spot,
        alternatives=tuple(o for o in twins if o is not None)[:MAX_ALTERNATIVES],
        choices=options,
        no_spot=no_spot,
    )


def _market(
    group: NodeGroupSpec, best: MachineType, no_spot: str, notes: Notes
) -> Literal["on_demand", "spot", "mixed"]:
    if group.market == "on_demand" or best.spot is not None:
        if group.name == HEAD_GROUP and group.market == "spot":
            notes.guesses.append("head: on spot as the spec says; when the cloud takes it back, running work is lost")
        return group.market
    if best.any_offer.cloud in NO_SPOT_CLOUDS:
        notes.guesses.append(f"{group.name}: market {group.market} is ignored, {no_spot}")
    else:
        notes.guesses.append(f"{group.name}: planned on demand, {no_spot}")
    return "on_demand"


def _unlisted(
    group: NodeGroupSpec, spec: ClusterSpec, place: Region | None, offers: Sequence[Offer], notes: Notes
) -> MachineType:
    choice = _choices(group, spec)[0]
    if spec.is_local:
        real = scaled(group, choice, offers, notes)
        return real or guessed(group, choice, offers, notes, local=True)
    if place is not None and choice.place.cloud is not None and choice.place.allows(*place):
        choice = replace(choice, place=replace(choice.place, cloud=place[0], region=place[1]))
    return guessed(group, choice, offers, notes, local=False)


# ---------------------------------------------------------------- what each machine is told


def head_env(
    spec: ClusterSpec,
    launch: LaunchPlan,
    *,
    state_dir: str,
    ray_port: int = DEFAULT_RAY_PORT,
    gateway_port: int = DEFAULT_GATEWAY_PORT,
    lease_s: float = DEFAULT_LEASE_S,
) -> HeadEnv:
    """What the head is started with. On `local` it gets the planned shape, elsewhere Ray finds the machine's own."""
    return HeadEnv(
        cluster=spec.name,
        replica=replica_name(spec.name, HEAD_GROUP, 0),
        state_dir=state_dir,
        ray_port=ray_port,
        gateway_port=gateway_port,
        groups=tuple(
            GroupShape(g.name, _at_most(g, spec), g.nodes_per_replica, g.min_replicas, g.max_replicas)
            for g in launch.groups
        ),
        weights=tuple((p.model_type, p.weight) for p in spec.scheduling.priority),
        models=tuple((m.name, m.model_type) for m in spec.models),
        needs=launch.memory.needs,
        ageing_per_hour=spec.scheduling.ageing_per_hour,
        strategy=spec.scheduling.strategy,
        pools=tuple(
            PoolShare(p.name, p.model_type, p.guaranteed_gpus, p.max_gpus, p.borrow) for p in spec.scheduling.pools
        ),
        lease_s=lease_s,
        idle_shutdown_s=spec.idle_shutdown_s,
        shape=launch.head.shape if spec.is_local else None,
        alerts=spec.alerts,
        webhook=spec.notify.webhook,
        alert_command=spec.notify.command,
    )


def _at_most(group: GroupPlan, spec: ClusterSpec) -> NodeShape:
    """What a node of the group has at most: a guess must not make the scheduler refuse what may well fit."""
    if spec.is_local or group.offer.price_usd_per_hour is not None:
        return group.shape
    return replace(group.shape, cpus=UNBOUNDED, memory_gib=UNBOUNDED)


def node_env(
    spec: ClusterSpec,
    launch: LaunchPlan,
    group: str,
    replica: str,
    index: int,
    *,
    head_ip: str,
    ray_port: int = DEFAULT_RAY_PORT,
    gateway_port: int = DEFAULT_GATEWAY_PORT,
    state_dir: str,
    lease_s: float = DEFAULT_LEASE_S,
) -> NodeEnv:
    """What node `index` (from 0) of a replica is started with. Raises InvalidInput for a group not in the plan."""
    planned = launch.group(group)
    if planned is None:
        known = ", ".join(g.name for g in launch.groups)
        raise InvalidInput(f"no group {group!r} in cluster {spec.name}; it has {known}")
    return NodeEnv(
        cluster=spec.name,
        group=group,
        replica=replica,
        index=index,
        head_ip=head_ip,
        ray_port=ray_port,
        gateway_port=gateway_port,
        state_dir=state_dir,
        lease_s=lease_s,
        critical_interval_s=spec.telemetry.critical_interval_s,
        normal_interval_s=spec.telemetry.normal_interval_s,
        shape=planned.shape if spec.is_local else None,
        simulated_gpus=spec.is_local,
    )
