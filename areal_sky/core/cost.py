"""The bill: hours x the price at which each replica was launched, split by group, role, replica or task.

A replica is paid for from the moment its launch was accepted until the cloud confirmed its end. Money is counted in
whole units of a hundredth of a cent: each replica's cost is rounded once, and its parts add up to it, so every
breakdown has the same total. Prices nobody knows are hours without a price, never zero dollars.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from areal_sky.core.model import HEAD_GROUP, ClusterState, LaunchPlan, LedgerLine, NodeShape
from areal_sky.core.usage import Hold, Usage

HOURS_PER_MONTH = 730.0  # 365 days / 12, as clouds print it
UNIT_USD = 1e-4
IDLE = "idle"  # what no task of the queue held
UNATTRIBUTED = "unattributed"  # nobody knows who held it
# How long after the head's last answer its news still counts.
SLACK_S = 30.0

Breakdown = Literal["group", "role", "replica", "task"]
BREAKDOWNS: tuple[Breakdown, ...] = ("group", "role", "replica", "task")


@dataclass(frozen=True, slots=True)
class BillLine:
    """One row of a breakdown in one market. Names that the breakdown does not tell apart are empty.

    `usd` is what its hours with a known price cost, None when none has one; `unpriced_node_hours` are the others.
    `on_demand_usd` is the same hours on demand, None when the price of any of them is unknown.
    """

    group: str
    role: str
    replica: str
    task: str
    task_name: str
    market: str
    replicas: int
    node_hours: float
    unpriced_node_hours: float
    usd: float | None
    on_demand_usd: float | None


@dataclass(frozen=True, slots=True)
class Bill:
    """Sums over the lines; `usd` counts known prices only and `complete` says whether that is all of them.

    `on_demand_usd` is all of it at on-demand prices, None when one is unknown. `usd_per_hour_now` is what the
    replicas that are paid for now cost together. `usage_until_s`: who held what is known until then, 0 if never.
    """

    by: Breakdown
    lines: tuple[BillLine, ...]
    usd: float
    on_demand_usd: float | None
    complete: bool
    unpriced_node_hours: float
    usd_per_hour_now: float
    usage_until_s: float


@dataclass(frozen=True, slots=True)
class Entry:
    """The part of one replica's life that one task held (or nobody): the atom of every breakdown, money in units."""

    group: str
    role: str
    replica: str
    task: str
    task_name: str
    market: str
    node_hours: float
    units: int | None
    on_demand_units: int | None


def bill(
    state: ClusterState, plan: LaunchPlan | None, now_s: float, usage: Usage | None = None, by: Breakdown = "group"
) -> Bill:
    """The bill of everything launched so far, the head included. Without a plan shapes come from `usage` alone."""
    entries = split(state, plan, now_s, usage or Usage())
    rows: dict[tuple[str, ...], list[Entry]] = {}
    for e in entries:
        rows.setdefault((*_row(e, by), e.market), []).append(e)
    lines = tuple(_line(key, rows[key]) for key in sorted(rows, key=lambda k: _order(k, rows[k])))
    running = [x for x in state.ledger if x.until_s is None]
    on_demand = [e.on_demand_units for e in entries]
    unpriced = sum(e.node_hours for e in entries if e.units is None)
    return Bill(
        by=by,
        lines=lines,
        usd=_usd(sum(e.units or 0 for e in entries)),
        on_demand_usd=None if None in on_demand else _usd(sum(u or 0 for u in on_demand)),
        complete=all(e.units is not None for e in entries),
        unpriced_node_hours=unpriced,
        usd_per_hour_now=sum((x.price_usd_per_hour or 0.0) * x.nodes for x in running),
        usage_until_s=usage.t_s if usage else 0.0,
    )


def split(state: ClusterState, plan: LaunchPlan | None, now_s: float, usage: Usage) -> list[Entry]:
    """Every replica's life, split among those who held it."""
    by_replica: dict[str, list[Hold]] = {}
    for h in usage.holds:
        by_replica.setdefault(h.replica, []).append(h)
    entries: list[Entry] = []
    for x in state.ledger:
        parts = _parts(x, _shape(x, plan), by_replica.get(x.replica, []), now_s, usage.t_s)
        hours = [p.hours for p in parts.values()]
        usd, on_demand = x.usd(now_s), _on_demand_usd(x, plan, now_s)
        units = _apportion(None if usd is None else round(usd / UNIT_USD), hours)
        on_demand_units = _apportion(None if on_demand is None else round(on_demand / UNIT_USD), hours)
        entries += [
            Entry(x.group, p.role, x.replica, task, p.name, x.market, p.hours, u, o)
            for (task, p), u, o in zip(parts.items(), units, on_demand_units, strict=True)
        ]
    return entries


def hourly_usd(plan: LaunchPlan, desired: Mapping[str, int]) -> float:
    """Dollars per hour of that many replicas of each group (the head counts once), at the price of its first offer.

    Groups without a known price count as nothing.
    """
    head = plan.head.offer.price_usd_per_hour or 0.0
    return head + sum(
        desired.get(g.name, 0) * g.nodes_per_replica * (g.offer.price_usd_per_hour or 0.0) for g in plan.groups
    )


# ---------------------------------------------------------------- one replica's life


@dataclass(slots=True)
class _Part:
    role: str
    name: str
    hours: float = 0.0


def _parts(
    x: LedgerLine, shape: NodeShape | None, held: Iterable[Hold], now_s: float, known_until_s: float
) -> dict[str, _Part]:
    """Node-hours of the replica by task; what no task held is under its role. The parts add up to the whole."""
    end_s = now_s if x.until_s is None else x.until_s
    end_s = max(x.from_s, end_s)
    known_s = min(end_s, max(x.from_s, known_until_s + SLACK_S)) if known_until_s else x.from_s
    rest = HEAD_GROUP if x.group == HEAD_GROUP else IDLE
    parts: dict[str, _Part] = {}
    # Per node: (time, share taken or given back, task)
    steps: list[list[tuple[float, float, str]]] = [[] for _ in range(x.nodes)]
    for h in held:
        from_s, until_s = max(h.from_s, x.from_s), min(known_s if h.until_s is None else h.until_s, known_s)
        if until_s < from_s or h.from_s > end_s:
            continue
        parts.setdefault(h.task_id, _Part(h.kind, h.name))
        share = _share(h, shape)
        if share > 0 and until_s > from_s:
            steps[min(max(h.index, 0), x.nodes - 1)] += [(from_s, share, h.task_id), (until_s, -share, h.task_id)]
    taken = 0.0
    for node in steps:
        taken += _sweep(sorted(node), parts)
    idle = max(0.0, (known_s - x.from_s) / 3600.0 * x.nodes - taken)
    unknown = (end_s - known_s) / 3600.0 * x.nodes
    if rest == HEAD_GROUP:
        idle, unknown = idle + unknown, 0.0
    if unknown > 0:
        parts[UNATTRIBUTED] = _Part(UNATTRIBUTED, "", unknown)
    if idle > 0 or not parts:
        parts[rest] = _Part(rest, "", idle)
    return parts


def _sweep(steps: list[tuple[float, float, str]], parts: dict[str, _Part]) -> float:
    """Gives each task its share x time of one node; returns the node-hours given.

    Shares that come to more than the whole (clocks differ, one task is placed as another is released) are cut in
    proportion: no hour is paid for twice.
    """
    active: dict[str, float] = {}
    given, last_s = 0.0, 0.0
    for t_s, share, task in steps:
        if active and t_s > last_s:
            hours = (t_s - last_s) / 3600.0 / max(1.0, sum(active.values()))
            for holder, part in active.items():
                parts[holder].hours += hours * part
                given += hours * part
        last_s = t_s
        active[task] = active.get(task, 0.0) + share
        if active[task] < 1e-9:
            del active[task]
    return given


def _share(h: Hold, shape: NodeShape | None) -> float:
    """The part of its node that a hold takes, 0 to 1: of its GPUs, on CPU nodes of its CPUs."""
    gpus, cpus = h.node_gpus, h.node_cpus
    if gpus <= 0 and cpus <= 0 and shape is not None:  # told by an earlier version
        gpus, cpus = shape.gpus, shape.cpus
    if gpus > 0:
        return min(1.0, h.gpus / gpus)
    return min(1.0, h.cpus / cpus) if cpus > 0 else 0.0


def _shape(x: LedgerLine, plan: LaunchPlan | None) -> NodeShape | None:
    group = plan.group(x.group) if plan else None
    return group.shape if group else None


def _on_demand_usd(x: LedgerLine, plan: LaunchPlan | None, now_s: float) -> float | None:
    """The same hours on demand: at the price recorded at launch, else (an older record) at the plan's."""
    price = x.price_usd_per_hour if x.market == "on_demand" else x.on_demand_usd_per_hour
    if price is None:
        group = plan.group(x.group) if plan else None
        offer = group.on_demand_offer if group else None
        price = offer.price_usd_per_hour if offer else None
    return None if price is None else x.hours(now_s) * price


def _apportion(total: int | None, weights: list[float]) -> list[int | None]:
    """Whole units in proportion to the weights, adding up to the total (largest remainders first)."""
    if total is None:
        return [None for _ in weights]
    whole = sum(weights)
    if whole <= 0:
        return [total if i == len(weights) - 1 else 0 for i in range(len(weights))]
    exact = [total * w / whole for w in weights]
    floors = [int(e) for e in exact]
    left = total - sum(floors)
    by_remainder = sorted(range(len(weights)), key=lambda i: (floors[i] - exact[i], i))
    for i in by_remainder[: max(0, left)]:
        floors[i] += 1
    return [*floors]


# ---------------------------------------------------------------- rows


def _row(e: Entry, by: Breakdown) -> tuple[str, str, str, str, str]:
    """(group, role, replica, task, task's name), as far as the breakdown tells them apart."""
    match by:
        case "group":
            return e.group, "", "", "", ""
        case "role":
            return "", e.role, "", "", ""
        case "replica":
            return e.group, "", e.replica, "", ""
        case "task":
            return "", e.role, "", e.task, e.task_name


def _order(key: tuple[str, ...], entries: list[Entry]) -> tuple[object, ...]:
    """The head first, what nobody held last, tasks by number."""
    group, role, replica, task, _, market = key
    head = HEAD_GROUP not in (group, role)
    nobody = (IDLE, UNATTRIBUTED).index(role) + 1 if role in (IDLE, UNATTRIBUTED) else 0
    return head, nobody, group, role if not task else "", replica, len(task), task, market, len(entries)


def _line(key: tuple[str, ...], entries: list[Entry]) -> BillLine:
    group, role, replica, task, name, market = key
    known = [e.units for e in entries if e.units is not None]
    on_demand = [e.on_demand_units for e in entries]
    return BillLine(
        group=group,
        role=role,
        replica=replica,
        task=task,
        task_name=name,
        market=market,
        replicas=len({e.replica for e in entries}),
        node_hours=sum(e.node_hours for e in entries),
        unpriced_node_hours=sum(e.node_hours for e in entries if e.units is None),
        usd=_usd(sum(known)) if known else None,
        on_demand_usd=None if None in on_demand else _usd(sum(u or 0 for u in on_demand)),
    )


def _usd(units: int) -> float:
    return units / 10_000
