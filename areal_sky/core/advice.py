"""What a plan says besides its choice: the price of each accelerator that would do, why there is no spot, and every
reason not to launch it. Pure; used by `launch.draft`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from areal_sky.core.market import NO_SPOT_CLOUDS
from areal_sky.core.model import GroupPlan, LaunchPlan, PricedChoice
from areal_sky.core.offers import NO_PRICE, Choice, MachineType, best_first, cost, hourly_cap, matches, text_of
from areal_sky.core.prices import replica_usd_per_hour
from areal_sky.spec.cluster import BudgetSpec, ClusterSpec, NodeGroupSpec
from areal_sky.units import format_duration

# Clouds whose machines reach each other's private address across regions (one VPC spans them, SkyPilot's default).
ONE_NETWORK = frozenset({"gcp"})
MAX_CHOICES = 6


def priced_choices(
    group: NodeGroupSpec, wanted: Sequence[Choice], here: Sequence[MachineType], found: Sequence[MachineType]
) -> tuple[PricedChoice, ...]:
    """Each accelerator that the group may have, with its best machine here, else anywhere; empty where there is one.

    In the spec's order; of an ask by memory those that exist, the cheapest first.
    """
    lines: dict[str, PricedChoice] = {}
    for ask in dict.fromkeys(c.ask for c in wanted if c.ask is not None):
        names = [text_of(ask)] if ask.name is not None else []
        able = [m for m in found if matches(ask, m.any_offer.shape) and m.any_offer.shape.gpus == ask.count]
        for m in best_first(able, group) if ask.name is None else ():
            names.append(f"{m.any_offer.shape.accelerator}:{ask.count:g}")
        for name in dict.fromkeys(names):
            alike = [m for m in able if f"{m.any_offer.shape.accelerator}:{ask.count:g}" == name]
            near = best_first([m for m in alike if m in here], group)
            best = (near or best_first(alike, group) or [None])[0]
            lines.setdefault(name, _priced(name, best, group, elsewhere=not near))
    return tuple(lines.values())[:MAX_CHOICES] if len(lines) > 1 else ()


def _priced(name: str, best: MachineType | None, group: NodeGroupSpec, elsewhere: bool) -> PricedChoice:
    if best is None:
        return PricedChoice(name, None, None, why=NO_PRICE)
    usd = cost(best, group)
    return PricedChoice(name, best.any_offer, None if usd == float("inf") else usd, elsewhere)


def why_no_spot(best: MachineType, spec: ClusterSpec, dear: float | None) -> str:
    """Why the machine cannot be had on spot; empty when it can. `dear` is a spot price that was ruled out."""
    if best.spot is not None:
        return ""
    cloud = best.any_offer.cloud
    if cloud == "slurm":
        return "slurm has no spot machines; `spot: {slurm_partition: NAME}` names a partition that gives way"
    if cloud in NO_SPOT_CLOUDS:
        return f"{cloud} has no spot machines"
    if dear is not None:
        return (
            f"no spot price at or below {spec.spot.max_spot_price_frac:g} of the on-demand price "
            f"(spot.max_spot_price_frac), the lowest is ${dear:,.2f}/h"
        )
    return f"no spot price is known for {best.any_offer.instance_type} on {place_text(best)}"


def with_fallback(launch: LaunchPlan, budget: BudgetSpec) -> LaunchPlan:
    """The plan, saying what it costs when spot is not to be had and everything comes on demand."""
    groups = (launch.head, *launch.groups)
    using = [g.name for g in groups if g.market != "on_demand" and g.spot_offer and g.spot_offer.cloud != "slurm"]
    usd = [replica_usd_per_hour(g, "on_demand") for g in groups]
    if not using or any(each is None for each in usd):
        return launch
    most = sum((each or 0.0) * g.max_replicas for each, g in zip(usd, groups, strict=True))
    cap = budget.max_hourly_usd
    over = f", more than max_hourly_usd {cap:,.2f}" if cap is not None and most > cap else ""
    patience = format_duration(launch.spot.give_up_s)
    line = (
        f"spot: refused for {patience}, replicas come on demand instead (spot.patience): ${most:,.2f}/h at the largest"
    )
    return replace(launch, guesses=(*launch.guesses, line + over))


def place_text(m: MachineType) -> str:
    return "/".join(x for x in (m.any_offer.cloud, m.any_offer.region) if x)


def over_hourly_cap(group: NodeGroupSpec, uncapped: Sequence[MachineType]) -> str:
    """A group whose every machine costs more per node than its `max_hourly_cost` (`uncapped`: all that would do)."""
    cap = hourly_cap(group.resources)
    if cap is None or not uncapped:
        return ""
    best = min(uncapped, key=lambda m: m.any_offer.price_usd_per_hour or 0.0).any_offer
    return (
        f"{group.name}: max_hourly_cost is {cap:,.2f} and the cheapest machine that would do, {best.instance_type} on "
        f"{best.cloud}/{best.region}, costs ${best.price_usd_per_hour or 0:,.2f}/h"
    )


def apart(launch: LaunchPlan, found: dict[str, tuple[MachineType, ...]]) -> tuple[list[str], list[str]]:
    """(refusals, unknowns) about groups that are not in the head's region: nodes join it on its private address."""
    refused: list[str] = []
    open_: list[str] = []
    head = (launch.head.offer.cloud, launch.head.offer.region)
    if head[0] in ("any", "local"):
        return refused, open_
    for g in launch.groups:
        there = (g.offer.cloud, g.offer.region)
        if there == head or g.offer.cloud == "any" or (g.offer.cloud == head[0] and None in (head[1], there[1])):
            continue
        line = f"{g.name} is in {_text(there)} but the head in {_text(head)}"
        if g.offer.cloud == head[0] and head[0] in ONE_NETWORK:
            open_.append(f"{line}: can they reach the head's private address? (in SkyPilot's default VPC they do)")
            continue
        regions = sorted({place_text(m) for m in found.get(g.name, ())})
        had = f"; {g.name} can be had in {_some(regions)}" if len(regions) > 1 else ""
        refused.append(f"mixed regions: {line}, and nodes join it on its private address{had}")
    return refused, open_


def impossible(spec: ClusterSpec, groups: Sequence[GroupPlan]) -> list[str]:
    """What the infra of a group cannot do, whatever the price."""
    lines: list[str] = []
    for g in groups:
        wanted = spec.group(g.name)
        resources = wanted.resources if wanted is not None else spec.head
        if g.offer.cloud == "slurm" and resources.raw.get("ports"):
            lines.append(f"{g.name}: SkyPilot opens no ports on Slurm: leave `ports` out (the gateway needs none)")
    return lines


def _text(place: tuple[str, str | None]) -> str:
    return "/".join(x for x in place if x)


def _some(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
