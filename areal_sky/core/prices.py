"""What a plan costs, and the guard that refuses one above `budget.max_hourly_usd`. Dollars per hour, pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from areal_sky.core.model import GroupPlan, LaunchPlan, Offer
from areal_sky.core.offers import NO_PRICE
from areal_sky.spec.cluster import BudgetSpec

HOURS_PER_MONTH = 730.0  # 365 days of 24 hours over 12 months


def offer_in(group: GroupPlan, market: str) -> Offer:
    """The group's offer in a market; its first offer where the machine cannot be had in that one."""
    offer = group.spot_offer if market == "spot" else group.on_demand_offer
    return offer or group.offer


def market_of(group: GroupPlan, nth: int) -> Literal["on_demand", "spot"]:
    """The market of the nth replica (from 0): a mixed group fills its on-demand base first, then goes to spot."""
    if group.spot_offer is None or group.market == "on_demand":
        return "on_demand"
    return "on_demand" if group.market == "mixed" and nth < group.on_demand_base else "spot"


def replica_usd_per_hour(group: GroupPlan, market: str) -> float | None:
    """All nodes of one replica, dollars per hour; None without a price."""
    price = offer_in(group, market).price_usd_per_hour
    return None if price is None else price * group.nodes_per_replica


def group_usd_per_hour(group: GroupPlan, replicas: int) -> float | None:
    """That many replicas, dollars per hour; None without a price."""
    prices = [replica_usd_per_hour(group, market_of(group, n)) for n in range(replicas)]
    known = [p for p in prices if p is not None]
    return sum(known) if len(known) == len(prices) else None


def plan_usd_per_hour(launch: LaunchPlan, *, largest: bool = False) -> tuple[float, tuple[str, ...]]:
    """The head and all groups at their smallest (or largest): dollars per hour, and the groups without a price."""
    total, unpriced = 0.0, list[str]()
    for g in (launch.head, *launch.groups):
        usd = group_usd_per_hour(g, g.max_replicas if largest else g.min_replicas)
        total += usd or 0.0
        if usd is None or g.offer.price_usd_per_hour is None:
            unpriced.append(g.name)
    return total, tuple(unpriced)


def within_budget(launch: LaunchPlan, budget: BudgetSpec) -> LaunchPlan:
    """The plan, with what the budget means for it in its guesses, unknowns and refusals."""
    least, unpriced = plan_usd_per_hour(launch)
    most, _ = plan_usd_per_hour(launch, largest=True)
    cap, total = budget.max_hourly_usd, budget.max_total_usd
    unknowns, guesses, refusals = launch.unknowns, launch.guesses, launch.refusals
    if cap is not None and least > cap:
        refusals += (_over_budget(launch, least, cap),)
    elif cap is not None and most > cap:
        guesses += (f"budget: ${most:,.2f}/h at the largest is more than max_hourly_usd {cap:,.2f}",)
    if total is not None and least > 0:
        hours = f"{total / least:,.0f} h at the smallest, {total / most:,.0f} h at the largest"
        guesses += (f"budget: max_total_usd {total:,.2f} lasts {hours}",)
    if unpriced and not (cap is None and total is None):
        unknowns += (f"budget: it cannot be held against {', '.join(unpriced)}, {NO_PRICE}",)
    return replace(launch, unknowns=unknowns, guesses=guesses, refusals=refusals)


def _over_budget(launch: LaunchPlan, least: float, cap: float) -> str:
    lines = [f"the least that would run costs ${least:,.2f}/h, more than budget.max_hourly_usd {cap:,.2f}:"]
    for g in (launch.head, *launch.groups):
        usd = group_usd_per_hour(g, g.min_replicas)
        nodes = g.min_replicas * g.nodes_per_replica
        text = NO_PRICE if usd is None else f"${usd:,.2f}/h"
        lines.append(f"  {g.name:<16} {nodes:>3} x {g.offer.instance_type:<24} {text:>14}")
        each = g.offer.price_usd_per_hour
        if nodes and each is not None and each > cap:
            lines.append(f"  {'':<16} one node of it alone costs ${each:,.2f}/h")
    lines.append("raise the budget, ask for fewer or cheaper machines, or use `market: spot`")
    return "\n".join(lines)
