"""Which market the nodes of one piece of work come from, tick by tick: our policy and those of the literature. Pure.

The work needs `work_s` seconds on each of `nodes` nodes (or as many node-seconds on fewer) before `deadline_s`. Each
tick a policy sees how many spot nodes could be had and says how many of each market shall run until the next. A node
that is new loses its first `restart_s`. Times are seconds since the work could begin, money is dollars per node-hour.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal_sky.core import market
from areal_sky.core.model import GroupPlan, GroupState, NodeShape, Offer, Replica, ReplicaState, SpotPatience

SLICES = 4  # of time_sliced
STATIC_SHARE = 0.5  # of static_split: the nodes that are on demand
EXTRA = 0.25  # of skyserve: spot nodes beyond those wanted, as a share (the paper runs 2 beyond 4 to 8)


@dataclass(frozen=True, slots=True)
class SpotContext:
    """What a policy may look at. `spot`, `on_demand`: nodes that it holds, of which `settled` have started up.

    `spot_available`: what could be had now, held ones included. `done_s`: work done, per node of `nodes`. `memory`:
    what the policy returned with its last decision, None at first.
    """

    now_s: float
    gap_s: float
    nodes: int
    spot_available: int
    spot: int
    on_demand: int
    settled: int
    done_s: float
    work_s: float
    deadline_s: float
    restart_s: float
    spot_usd: float
    on_demand_usd: float
    memory: Any = None


@dataclass(frozen=True, slots=True)
class MarketDecision:
    """Nodes of each market until the next look; more spot than can be had is as much as can be had."""

    spot: int
    on_demand: int
    reason: str
    memory: Any = None


SpotPolicy = Callable[[SpotContext], MarketDecision]


def on_demand(ctx: SpotContext) -> MarketDecision:
    """Everything on demand, from the start."""
    return MarketDecision(0, ctx.nodes, "all on demand")


def all_spot(ctx: SpotContext) -> MarketDecision:
    """Spot whenever there is some, else nothing: the cheapest per node-hour, with no thought of the deadline."""
    return MarketDecision(ctx.nodes, 0, "all spot")


def static_split(ctx: SpotContext) -> MarketDecision:
    """A fixed share on demand, the rest spot when there is some: instance fleets with a base capacity (AWS EC2 Fleet,
    `OnDemandBaseCapacity`)."""
    base = math.ceil(ctx.nodes * STATIC_SHARE)
    return MarketDecision(ctx.nodes - base, base, f"{base} on demand for good")


def greedy(ctx: SpotContext) -> MarketDecision:
    """Spot whenever there is some, on demand from the moment on when nothing else meets the deadline: the greedy
    policy of "Can't Be Late", NSDI'24, section 4.1, with its safety net."""
    return _safe(ctx) or MarketDecision(ctx.nodes, 0, "spot, or wait for it: there is time")


def time_sliced(ctx: SpotContext) -> MarketDecision:
    """Greedy within each of `SLICES` equal parts of the time, each with its equal part of the work: "Can't Be Late",
    NSDI'24, section 4.2."""
    if math.isinf(ctx.deadline_s) or not ctx.work_s:
        return greedy(ctx)
    last = min(SLICES, math.floor(ctx.now_s / ctx.deadline_s * SLICES) + 1)
    part = replace(ctx, work_s=ctx.work_s * last / SLICES, deadline_s=ctx.deadline_s * last / SLICES)
    if last < SLICES and part.done_s >= part.work_s:
        return _safe(ctx) or MarketDecision(ctx.nodes, 0, f"part {last} is done: spot, or wait for it")
    return _safe(ctx) or greedy(part)


def uniform_progress(ctx: SpotContext) -> MarketDecision:
    """As far along as time is: on demand when behind and there is no spot, until it is ahead by two restarts; spot
    whenever there is some: "Can't Be Late", NSDI'24, section 4.3."""
    if (must := _safe(ctx)) is not None:
        return must
    spot = min(ctx.spot_available, ctx.nodes)
    short = ctx.nodes - spot
    if not short:
        return MarketDecision(spot, 0, "spot can be had")
    pace = ctx.work_s / ctx.deadline_s
    if ctx.done_s < ctx.now_s * pace:
        return MarketDecision(spot, short, "behind the uniform pace, and no spot")
    if ctx.on_demand and ctx.done_s < (ctx.now_s + 2 * ctx.restart_s) * pace:
        return MarketDecision(spot, min(short, ctx.on_demand), "on demand until ahead by two restarts")
    return MarketDecision(spot, 0, "ahead of the uniform pace: wait for spot")


def skyserve(ctx: SpotContext) -> MarketDecision:
    """More spot than is needed, and on demand what has not started of it: SpotHedge of SkyServe, EuroSys'25, 3.2.
    It serves for ever and knows no deadline."""
    wanted = ctx.nodes + math.ceil(EXTRA * ctx.nodes) if ctx.nodes > 1 else 1
    ready = min(ctx.spot, ctx.settled, ctx.spot_available)
    return MarketDecision(wanted, max(0, min(ctx.nodes, wanted - ready)), f"{ready} of {wanted} spot nodes are ready")


def ours(patience: SpotPatience | None = None) -> SpotPolicy:
    """What the controller does for a spot group: core/market.py itself, asked node by node."""
    limits = patience or SpotPatience()

    def policy(ctx: SpotContext) -> MarketDecision:
        seen = ctx.memory or _Seen(GroupState("g", ctx.nodes, 0.0, "", ""), ())
        group, wanted = _group(ctx), seen.group
        lost = ctx.spot_available < ctx.nodes
        if lost:  # somebody has asked for it, and in vain
            since_s = ctx.now_s if wanted.spot_refused_since_s is None else wanted.spot_refused_since_s
            asks = wanted.spot_refused_s is None or ctx.now_s - wanted.spot_refused_s >= limits.hold_s
            in_row = ctx.now_s - since_s < limits.give_up_s
            last_s = ctx.now_s if asks or in_row else wanted.spot_refused_s
            wanted = replace(wanted, spot_refused_since_s=since_s, spot_refused_s=last_s)
        spot = min(ctx.spot, ctx.spot_available)
        stand_ins = list(seen.stand_ins[: ctx.on_demand])
        why = "spot"
        for _ in range(ctx.nodes - spot - len(stand_ins)):
            choice = market.market_for(group, wanted, len(stand_ins), 0, ctx.now_s, limits)
            why = choice.reason or why
            if choice.fallback:
                stand_ins.append(ctx.now_s)
            elif spot < ctx.spot_available:
                spot += 1
                wanted = replace(wanted, spot_refused_since_s=None, spot_refused_s=None)
        if stand_ins and spot < ctx.spot_available:
            serving = [_replica(i, ready_s) for i, ready_s in enumerate(stand_ins)]
            back = market.back_to_spot(group, wanted, serving, ctx.now_s, limits)
            if back:
                why, spot = back, spot + 1
                wanted = replace(wanted, spot_refused_since_s=None, spot_refused_s=None)
                stand_ins.remove(min(stand_ins))
        return MarketDecision(spot, len(stand_ins), why, _Seen(wanted, tuple(stand_ins)))

    return policy


def optimum(spot: Sequence[int], ctx: SpotContext) -> SpotPolicy:
    """The cheapest schedule for whoever knows how much spot there will be (`spot`, per tick), of one node exactly to a
    rounding of restarts up to a part of the tick: dynamic programming over (tick, work left, market held). Of several
    nodes: all spot there will be, and from the start on demand what that leaves over, which is near it.

    Raises ValueError where even on demand cannot meet the deadline."""
    if ctx.nodes > 1:
        return _fleet_optimum(spot, ctx)
    plan = _cheapest(spot, ctx)

    def policy(now: SpotContext) -> MarketDecision:
        held = plan[min(round(now.now_s / now.gap_s), len(plan) - 1)]
        return MarketDecision(int(held == _SPOT), int(held == _REGULAR), "known beforehand")

    return policy


POLICIES: Mapping[str, SpotPolicy] = {
    "on_demand": on_demand, "all_spot": all_spot, "static_split": static_split, "greedy": greedy,
    "time_sliced": time_sliced, "uniform_progress": uniform_progress, "skyserve": skyserve, "ours": ours(),
}  # fmt: skip


# ---------------------------------------------------------------- how


def _safe(ctx: SpotContext) -> MarketDecision | None:
    """The safety net: on demand when it is the last moment for it, counted in whole ticks. Spot that has started
    is kept while it lasts: it works as fast, and the time that a restart takes is still there."""
    if math.isinf(ctx.deadline_s):
        return None
    left_s = max(0.0, ctx.work_s - ctx.done_s)
    until = math.floor((ctx.deadline_s - ctx.now_s) / ctx.gap_s + 1e-9)
    spot = min(ctx.spot, ctx.spot_available, ctx.settled)

    def ticks(restarts: int) -> int:
        return math.ceil((left_s + restarts * ctx.restart_s) / ctx.gap_s - 1e-9)

    held = ctx.spot + ctx.on_demand
    if held and spot >= ctx.nodes and ticks(1) >= until:
        return MarketDecision(ctx.nodes, 0, "the last moment: spot is kept as long as it lasts")
    if ticks(1) >= until or (ctx.spot < ctx.nodes and ticks(2) >= until):
        return MarketDecision(spot, ctx.nodes - spot, "the last moment to meet the deadline on demand")
    return None


@dataclass(frozen=True, slots=True)
class _Seen:
    group: GroupState
    stand_ins: tuple[float, ...]  # since when each node on demand has stood in for spot


def _group(ctx: SpotContext) -> GroupPlan:
    regular = Offer("", None, None, "", NodeShape(), "on_demand", ctx.on_demand_usd, "")
    spot = replace(regular, market="spot", price_usd_per_hour=ctx.spot_usd)
    return GroupPlan("g", True, 0, ctx.nodes, 1, "spot", 0, NodeShape(), spot, regular, spot)


def _replica(slot: int, ready_s: float) -> Replica:
    return Replica(f"g-{slot}", "g", slot, ReplicaState.READY, ready_s, 1, "on_demand", None, ready_s=ready_s,
                   fallback=True)  # fmt: skip


_NONE, _SPOT, _REGULAR = 0, 1, 2
_PARTS = 10  # of a tick at most, in which work and restarts are counted


def _cheapest(spot: Sequence[int], ctx: SpotContext) -> list[int]:
    """The market to hold in each tick."""
    ticks = min(math.floor(ctx.deadline_s / ctx.gap_s + 1e-9), len(spot))
    ratio = ctx.restart_s / ctx.gap_s
    part = min(range(1, _PARTS + 1), key=lambda p: (round(math.ceil(ratio * p - 1e-9) / p - ratio, 9), p))
    lost = math.ceil(ratio * part - 1e-9)
    need = math.ceil(ctx.work_s / ctx.gap_s * part - 1e-9)
    usd = (0.0, ctx.spot_usd, ctx.on_demand_usd)
    size = need + lost + 1

    def before(row: Sequence[float], work: int, price: float) -> list[float]:
        """What it costs in all by the work left, when a tick does `work` parts of it and `row` is the rest."""
        if work >= 0:
            found = [row[0] + price] * min(work, size) + [x + price for x in row[: size - work]]
        else:
            found = [x + price for x in row[-work:]] + [math.inf] * -work
        found[0] = 0.0
        return found

    # rest[t][market][work left]: the least that is still to pay from tick t on, held that market before
    end = array("d", [0.0] + [math.inf] * (size - 1))
    rest: list[tuple[array[float], ...]] = [(end, end, end)]
    for t in range(ticks - 1, -1, -1):
        later = rest[-1]
        markets = (_SPOT, _REGULAR) if spot[t] else (_REGULAR,)
        stay = {m: before(later[m], part, usd[m]) for m in markets}
        start = {m: before(later[m], part - lost, usd[m]) for m in markets}
        rest.append(tuple(
            array("d", map(min, later[_NONE], *(stay[m] if m == held else start[m] for m in markets)))
            for held in (_NONE, _SPOT, _REGULAR)
        ))  # fmt: skip
    rest.reverse()
    if math.isinf(rest[0][_NONE][need]):
        raise ValueError("no schedule meets the deadline, not even on demand from the start")
    plan: list[int] = []
    left, held = need, _NONE
    for t in range(ticks):
        if not left:
            break
        options: list[tuple[float, bool, int, int]] = [(rest[t + 1][_NONE][left], held != _NONE, _NONE, left)]
        for m in (_SPOT, _REGULAR) if spot[t] else (_REGULAR,):
            then = max(0, left - (part if m == held else part - lost))
            if then < size:
                options.append((rest[t + 1][m][then] + usd[m], m != held, m, then))
        _, _, held, left = min(options)
        plan.append(held)
    return [*plan, _NONE]


def _fleet_optimum(spot: Sequence[int], ctx: SpotContext) -> SpotPolicy:
    """The fewest node-ticks on demand beside all spot: one node less than are needed all the time until a tick that
    leaves just enough."""
    ticks = math.floor(min(len(spot), ctx.deadline_s / ctx.gap_s + 1e-9))

    def enough(most: int, since: int) -> bool:
        done = held = 0.0
        for t in range(ticks):
            regular = most if t >= since else most - 1
            n = regular + min(spot[t], ctx.nodes - regular)
            done += n * ctx.gap_s - max(0.0, n - held) * ctx.restart_s
            held = n
        return done - 2 * ctx.restart_s >= ctx.work_s * ctx.nodes  # one more goes on demand amid the work

    if math.isinf(ctx.work_s):
        return lambda now: MarketDecision(now.nodes, max(0, now.nodes - now.spot_available), "fills up what spot lacks")
    most = next((m for m in range(1, ctx.nodes + 1) if enough(m, 0)), None)
    if most is None:
        raise ValueError("no schedule meets the deadline, not even on demand from the start")
    since = bisect_right(range(ticks), False, key=lambda t: not enough(most, t)) - 1

    def policy(now: SpotContext) -> MarketDecision:
        regular = most if round(now.now_s / now.gap_s) >= since else most - 1
        return MarketDecision(now.nodes - regular, regular, "known beforehand")

    return policy
