"""The bill: what the ledger's lines add up to, against the same hours at on-demand prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from areal_sky.core.model import HEAD_GROUP, ClusterState, GroupPlan, LaunchPlan

HOURS_PER_MONTH = 730.0  # 365 days / 12, as clouds print it


@dataclass(frozen=True, slots=True)
class BillLine:
    """One group in one market. `usd` is None when a price is unknown; `on_demand_usd` is the same hours on demand."""

    group: str
    market: str
    replicas: int
    node_hours: float
    usd: float | None
    on_demand_usd: float | None


@dataclass(frozen=True, slots=True)
class Bill:
    """Sums over the lines; `usd` counts known prices only and `complete` says whether that is all of them.

    `usd_per_hour_now` is what the replicas that are paid for now cost together.
    """

    lines: tuple[BillLine, ...]
    usd: float
    on_demand_usd: float
    complete: bool
    usd_per_hour_now: float


def bill(state: ClusterState, plan: LaunchPlan, now_s: float) -> Bill:
    """The bill of everything launched so far, the head included."""
    keys = dict.fromkeys((x.group, x.market) for x in state.ledger)
    lines: list[BillLine] = []
    for group, market in sorted(keys, key=lambda k: (k[0] != HEAD_GROUP, k)):
        mine = [x for x in state.ledger if (x.group, x.market) == (group, market)]
        amounts = [x.usd(now_s) for x in mine]
        hours = sum(x.hours(now_s) for x in mine)
        lines.append(
            BillLine(
                group=group,
                market=market,
                replicas=len({x.replica for x in mine}),
                node_hours=hours,
                usd=None if any(a is None for a in amounts) else sum(a for a in amounts if a is not None),
                on_demand_usd=_on_demand_usd(plan.group(group), hours),
            )
        )
    running = [x for x in state.ledger if x.until_s is None]
    return Bill(
        lines=tuple(lines),
        usd=sum(x.usd or 0.0 for x in lines),
        on_demand_usd=sum(x.on_demand_usd or 0.0 for x in lines),
        complete=all(x.usd is not None for x in lines),
        usd_per_hour_now=sum((x.price_usd_per_hour or 0.0) * x.nodes for x in running),
    )


def hourly_usd(plan: LaunchPlan, desired: Mapping[str, int]) -> float:
    """Dollars per hour of that many replicas of each group (the head counts once), at the price of its first offer.

    Groups without a known price count as nothing.
    """
    head = plan.head.offer.price_usd_per_hour or 0.0
    return head + sum(
        desired.get(g.name, 0) * g.nodes_per_replica * (g.offer.price_usd_per_hour or 0.0) for g in plan.groups
    )


def _on_demand_usd(group: GroupPlan | None, node_hours: float) -> float | None:
    offer = None if group is None else group.on_demand_offer or group.offer
    price = None if offer is None else offer.price_usd_per_hour
    return None if price is None else node_hours * price
