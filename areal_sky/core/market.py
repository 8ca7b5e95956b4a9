"""On demand or spot: which market the next replica of a group comes from, when that changes, and who makes room. Pure.

A group that wants spot keeps asking for it until it has been refused for `SpotPatience.give_up_s` in a row; then its
replicas come on demand. One spot replica is tried again `hold_s` after the last refusal, and once spot is to be had
the replicas that stood in for it are replaced, one at a time, each not before it has served for `hold_s`. So spot
that stays away is asked for once in any `hold_s`, and spot that comes and goes turns a group around at most once in
`give_up_s`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, cast

from areal_sky.core.events import LaunchIntended
from areal_sky.core.lifecycle import STARTING
from areal_sky.core.model import (
    HEAD_GROUP,
    GroupPlan,
    GroupState,
    Offer,
    Replica,
    ReplicaState,
    SpotPatience,
    replica_name,
)
from areal_sky.core.view import HeadView
from areal_sky.units import format_duration

Market = Literal["on_demand", "spot"]
# SkyPilot refuses `use_spot` there (sky/clouds, 0.14); its optimizer leaves such clouds out.
NO_SPOT_CLOUDS = frozenset({
    "kubernetes", "slurm", "ssh", "lambda", "cudo", "do", "fluidstack", "hyperbolic", "paperspace", "scp", "seeweb",
    "shadeform", "vsphere", "yotta",
})  # fmt: skip
_SHORT_NAMES = {"k8s": "kubernetes", "lambda cloud": "lambda"}


@dataclass(frozen=True, slots=True)
class MarketChoice:
    """Where the next replica comes from. `reason` is empty where the group's mix says it all.

    `fallback`: on demand only because spot could not be had.
    """

    market: Market
    reason: str = ""
    fallback: bool = False


def market_for(
    group: GroupPlan, wanted: GroupState, on_demand: int, spot_starting: int, now_s: float, patience: SpotPatience
) -> MarketChoice:
    """The market of the group's next replica.

    `on_demand` counts its replicas that are on demand now, `spot_starting` its spot replicas that are not ready yet.
    """
    if wanted.market is not None:
        return MarketChoice(_existing(group, "spot" if wanted.market == "spot" else "on_demand"))
    if group.market == "on_demand" or group.spot_offer is None:
        return MarketChoice(_existing(group, "on_demand"))
    if group.on_demand_offer is None:
        return MarketChoice("spot")
    if group.market == "mixed" and on_demand < group.on_demand_base:
        return MarketChoice("on_demand")
    since_s, last_s = wanted.spot_refused_since_s, wanted.spot_refused_s
    if since_s is None or last_s is None:
        return MarketChoice("spot")
    if now_s - since_s < patience.give_up_s:
        limit = format_duration(patience.give_up_s)
        return MarketChoice("spot", f"spot refused for {_span(now_s - since_s)}, given up after {limit}")
    ago = _span(now_s - last_s)
    if now_s - last_s >= patience.hold_s and not spot_starting:
        return MarketChoice("spot", f"spot tried again, last refused {ago} ago")
    hold = format_duration(patience.hold_s)
    why = f"on demand, spot was refused for {_span(last_s - since_s)}, last {ago} ago; tried again every {hold}"
    return MarketChoice("on_demand", why, fallback=True)


def offer_for(group: GroupPlan, on_demand_now: int, market: str | None = None) -> Offer:
    """The offer of the group's next replica if spot can be had; `market` overrides the mix where it has an offer."""
    nothing_yet = GroupState(group.name, 0, 0.0, "", "", market=market)
    return _offer(group, market_for(group, nothing_yet, on_demand_now, 0, 0.0, SpotPatience()).market)


def launches(
    cluster: str,
    group: GroupPlan,
    wanted: GroupState,
    mine: Sequence[Replica],
    serving: Sequence[Replica],
    count: int,
    now_s: float,
    patience: SpotPatience,
    why: str = "",
    left_usd: float = inf,
) -> list[LaunchIntended]:
    """`count` more replicas of the group, each in a free slot and in its market.

    None for a group that was given up. While the group waits after a failed launch there are none, but those on demand
    whose failure was on spot. One stands in for spot only where it costs at most `left_usd` an hour, else spot is asked
    for again.
    """
    taken = {r.slot for r in mine}
    if group.name == HEAD_GROUP and taken:
        return []  # one address, one store: the old head must be gone before a new one starts
    if wanted.given_up:
        return []
    waits = wanted.retry_at_s is not None and now_s < wanted.retry_at_s
    free = (slot for slot in range(len(taken) + count) if slot not in taken)
    on_demand = sum(1 for r in serving if r.market == "on_demand")
    starting = _spot_starting(serving)
    events: list[LaunchIntended] = []
    for _ in range(count):
        choice = market_for(group, wanted, on_demand, starting, now_s, patience)
        if choice.fallback and (usd := _usd(group, choice.market)) > left_usd:
            over = f"on demand would cost ${usd:,.2f}/h more, above budget.max_hourly_usd"
            choice = MarketChoice("spot", f"spot asked for again, since {over}")
        offer = _offer(group, choice.market)
        left_usd -= _usd(group, choice.market)
        if waits and not (offer.market == "on_demand" and wanted.failed_market == "spot"):
            break
        slot = next(free)
        on_demand += offer.market == "on_demand"
        starting += offer.market == "spot"
        regular = group.on_demand_offer
        events.append(
            LaunchIntended(
                replica=replica_name(cluster, group.name, slot), group=group.name, slot=slot,
                nodes=group.nodes_per_replica, market=offer.market, price_usd_per_hour=offer.price_usd_per_hour,
                reason="; ".join(x for x in (why or wanted.reason, choice.reason) if x),
                on_demand_usd_per_hour=regular.price_usd_per_hour if regular else None,
                fallback=choice.fallback and offer.market == "on_demand",
            )
        )  # fmt: skip
    return events


def headroom_usd(replicas: Iterable[Replica], max_hourly_usd: float | None) -> float:
    """Dollars per hour that the budget leaves beside what runs and starts; infinite without a budget."""
    if max_hourly_usd is None:
        return inf
    return max_hourly_usd - sum((r.price_usd_per_hour or 0.0) * r.nodes for r in replicas)


def back_to_spot(
    group: GroupPlan, wanted: GroupState, serving: Sequence[Replica], now_s: float, patience: SpotPatience
) -> str:
    """Why one spot replica is to be launched beside the wanted ones, to replace one that stands in for it; else "".

    A fixed group is left alone: its one replica is a gang at work.
    """
    if not group.elastic or wanted.market is not None or any(r.state in STARTING for r in serving):
        return ""
    old = [r for r in serving if r.fallback and r.ready_s is not None and now_s - r.ready_s >= patience.hold_s]
    left = sum(1 for r in serving if r.market == "on_demand") - 1
    if not old or market_for(group, wanted, left, 0, now_s, patience).market != "spot":
        return ""
    return f"back to spot, to replace {min(old, key=lambda r: r.slot).name}"


def replacing(serving: Sequence[Replica]) -> int:
    """How many replicas beyond the wanted ones to put up with: one while a spot replica comes up to replace another."""
    stand_in = any(r.fallback and r.state is ReplicaState.READY for r in serving)
    return int(stand_in and _spot_starting(serving) > 0)


def replaced(r: Replica, serving: Sequence[Replica], wanted: GroupState) -> str:
    """Why a replica goes whose place on spot has been taken since the group got its size; else ""."""
    new = [x for x in serving if x.market == "spot" and x.ready_s is not None and x.ready_s > wanted.since_s]
    return f"spot can be had again: {new[-1].name} takes its place" if r.fallback and new else ""


def victims(group: GroupPlan, serving: Sequence[Replica], wanted: GroupState, view: HeadView | None) -> list[Replica]:
    """Who goes first: outside the on-demand base, not ready yet, whom the policy named, who stands in for spot, then
    the longest idle, then the highest slot."""
    named = {name: n for n, name in enumerate(wanted.victims)}
    regular = [r for r in serving if r.market == "on_demand"]
    regular.sort(key=lambda r: (r.fallback, r.name in named, r.state is not ReplicaState.READY, r.slot))
    base = {r.name for r in regular[: group.on_demand_base]} if group.market == "mixed" else set[str]()

    def rank(r: Replica) -> tuple[bool, bool, int, bool, float, int]:
        load = view.load(r.name) if view is not None else None
        idle_since_s = load.idle_since_s if load is not None else None
        idle = idle_since_s if idle_since_s is not None else float("inf")
        ready = r.state is ReplicaState.READY
        return r.name in base, ready, named.get(r.name, len(named)), not r.fallback, idle, -r.slot

    return sorted(serving, key=rank)


def with_market(resources: Mapping[str, Any], market: str, spot_partition: str | None = None) -> dict[str, Any]:
    """SkyPilot `resources` of a replica in that market: `use_spot` where it is spot and the cloud has such machines.

    On Slurm, which has none, spot is the partition of that name, where one is given. Entries of `any_of` and
    `ordered` are treated each by its own place. The rest is as it was.
    """
    told = {k: v for k, v in resources.items() if k != "use_spot"}
    for key in ("any_of", "ordered"):
        entries = cast("Sequence[Mapping[str, Any]] | None", told.get(key))
        if entries:
            outer = {k: told[k] for k in ("infra", "cloud") if k in told}
            told[key] = [_without(with_market({**outer, **e}, market, spot_partition), outer, e) for e in entries]
            return told
    if market != "spot":
        return told
    place = str(told.get("infra") or told.get("cloud") or "").lower()
    cloud, *rest = place.split("/")
    if cloud == "slurm" and spot_partition and rest:
        return told | {"infra": f"slurm/{str(told['infra']).split('/')[1]}/{spot_partition}"}
    if _SHORT_NAMES.get(cloud, cloud) in NO_SPOT_CLOUDS:
        return told
    return told | {"use_spot": True}


def _without(entry: dict[str, Any], outer: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """An entry without what it only borrowed from the mapping around it."""
    return {k: v for k, v in entry.items() if k in own or k not in outer or v != outer[k]}


def _existing(group: GroupPlan, market: Market) -> Market:
    offer = group.spot_offer if market == "spot" else group.on_demand_offer
    return (offer or group.offer).market


def _offer(group: GroupPlan, market: Market) -> Offer:
    return (group.spot_offer if market == "spot" else group.on_demand_offer) or group.offer


def _usd(group: GroupPlan, market: Market) -> float:
    return (_offer(group, market).price_usd_per_hour or 0.0) * group.nodes_per_replica


def _spot_starting(serving: Sequence[Replica]) -> int:
    return sum(1 for r in serving if r.market == "spot" and r.state in STARTING)


def _span(seconds: float) -> str:
    return format_duration(max(0.0, round(seconds)), parts=2)
