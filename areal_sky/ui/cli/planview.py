"""A launch plan as text for a terminal of 80 columns: what, where, at what price, and what is open."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from areal_sky.core import prices
from areal_sky.core.model import HEAD_GROUP, GroupPlan, LaunchPlan, Offer
from areal_sky.core.prices import HOURS_PER_MONTH

if TYPE_CHECKING:
    from rich.console import RenderableType

CATALOG = "SkyPilot catalog "
PRICES_ARE = "list prices at that commit, not today's"


def spot_saving(planned: LaunchPlan) -> tuple[float, float]:
    """Dollars per hour that spot saves at the largest, and the part of the on-demand bill that this is."""
    saved = regular = 0.0
    for g in (planned.head, *planned.groups):
        usd = prices.group_usd_per_hour(g, g.max_replicas)
        each = prices.replica_usd_per_hour(g, "on_demand")
        if usd is not None and each is not None and g.on_demand_offer is not None:
            regular += each * g.max_replicas
            saved += each * g.max_replicas - usd
    return saved, saved / regular if regular else 0.0


def by_market(g: GroupPlan) -> dict[str, Offer | None]:
    """The offers that the group's market will use, in the order in which it uses them."""
    both = {"on_demand": g.on_demand_offer or g.offer, "spot": g.spot_offer}
    used = {prices.market_of(g, n) for n in {0, g.on_demand_base, max(0, g.max_replicas - 1)}}
    return {m: o for m, o in both.items() if m in used}


def sources(groups: Iterable[GroupPlan]) -> list[str]:
    """Where the prices come from, without the places that pretend machines are priced as if in."""
    return sorted({g.offer.source.split(": ")[-1] for g in groups if g.offer.price_usd_per_hour is not None})




# ---------------------------------------------------------------- the plan, to be read


def story(planned: LaunchPlan) -> Iterable[RenderableType]:
    from rich.text import Text

    groups = (planned.head, *planned.groups)
    yield Text.assemble((planned.cluster, "bold"), "  ", (_places(planned), "dim"))
    yield _table(planned)
    yield from _totals(planned)
    known = [_machine(g) for g in groups if g.offer.price_usd_per_hour is not None]
    known += [f"prices: {_dated(s)}" for s in sources(groups)]
    for title, style, lines in (
        ("Known", "green", known),
        ("Spot", "green", [_spot(g) for g in planned.groups]),
        ("Choices", "cyan", [line for g in planned.groups for line in _choices(g)]),
        ("Next best", "cyan", [*(_next_best(g) for g in planned.groups if g.alternatives), *_next_places(planned)]),
        ("Memory", "green", planned.memory.lines),
        ("Warned", "yellow", planned.memory.warnings),
        ("Guessed", "yellow", planned.guesses),
        ("Not known", "red", planned.unknowns),
        ("Refused", "bold red", (*planned.refusals, *planned.memory.refusals)),
    ):
        if lines:
            yield _section(title, style, lines)


def _dated(source: str) -> str:
    return f"{source}; {PRICES_ARE}" if "@" in source else source


def _spot(g: GroupPlan) -> str:
    """What spot would save on a node, or why there is none."""
    spot, regular = g.spot_offer, g.on_demand_offer
    if spot is None:
        return f"{g.name}: {g.no_spot or 'none'}"
    asked = "" if g.market != "on_demand" else "; not asked for"
    if spot.cloud == "slurm":
        return f"{g.name}: partition {spot.zone}{asked}"
    if spot.price_usd_per_hour is None:
        return f"{g.name}: no price known{asked}"
    text = f"{g.name}: ${_usd(spot.price_usd_per_hour)} a node and hour"
    if regular is not None and regular.price_usd_per_hour:
        part = 1 - spot.price_usd_per_hour / regular.price_usd_per_hour
        text += f", {abs(part):.0%} {'less' if part >= 0 else 'more'} than on demand"
    return text + (f", in {spot.zone}" if spot.zone else "") + asked


def _choices(g: GroupPlan) -> Iterable[str]:
    """One line for each accelerator that would do: what the whole group costs with it."""
    for c in g.choices:
        usd = c.why or "no price known" if c.usd_per_hour is None else f"${_usd(c.usd_per_hour)}/h at the largest"
        where = f" in {c.offer.cloud}/{c.offer.region}" if c.offer is not None and c.elsewhere else ""
        machine = f" ({c.offer.instance_type}{where})" if c.offer is not None else ""
        chosen = c.offer is not None and not c.elsewhere and c.offer.instance_type == g.offer.instance_type
        yield f"{g.name} with {c.accelerator}{machine}: {usd}{', chosen' if chosen else ''}"


def _next_places(planned: LaunchPlan) -> list[str]:
    texts = [f"{place} ${_usd(usd)}/h" for place, usd in planned.next_places]
    return [f"elsewhere, all of it at its largest: {', '.join(texts)}"] if texts else []


def _places(planned: LaunchPlan) -> str:
    if planned.infra == "local":
        return "on this machine, priced as if on a cloud"
    places = {"/".join(x for x in (g.offer.cloud, g.offer.region) if x) for g in (planned.head, *planned.groups)}
    return "on " + ", ".join(sorted(places)).replace("any", "any cloud")


def _table(planned: LaunchPlan) -> RenderableType:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    table.add_column("Group", overflow="fold")
    table.add_column("Replicas", justify="right", no_wrap=True)
    table.add_column("Nodes", justify="right", no_wrap=True)
    table.add_column("Each node", overflow="fold")
    table.add_column("Market", no_wrap=True)
    table.add_column("$/h node", justify="right", no_wrap=True)
    table.add_column("$/h group", justify="right", no_wrap=True)
    for g in (planned.head, *planned.groups):
        markets = by_market(g)
        table.add_row(
            g.name,
            _range(str(g.min_replicas), str(g.max_replicas)),
            _range(str(g.min_replicas * g.nodes_per_replica), str(g.max_replicas * g.nodes_per_replica)),
            _node_text(g),
            "\n".join(_market_text(g, m) for m in markets),
            "\n".join(_usd(o.price_usd_per_hour if o else None) for o in markets.values()),
            _range(*(_usd(prices.group_usd_per_hour(g, n)) for n in (g.min_replicas, g.max_replicas))),
            style="dim" if g.name == HEAD_GROUP else None,
        )
    return table


def _node_text(g: GroupPlan) -> str:
    s = g.shape
    name = s.accelerator or (f"{s.gpu_memory_gib or 0:g}GB GPU" if s.gpus else None)
    if name is None:
        return f"{s.cpus:g} vCPUs"
    return f"{s.gpus:g} x {name}" if s.gpus else name


def _market_text(g: GroupPlan, market: str) -> str:
    word = market.replace("_", " ")
    if g.market != "mixed" or not g.on_demand_base:
        return word
    return f"{g.on_demand_base} {word}" if market == "on_demand" else f"then {word}"


def _machine(g: GroupPlan) -> str:
    o, s = g.offer, g.shape
    place = o.source.split(": ")[0] if o.cloud == "local" else f"on {o.cloud} {o.region}"
    return f"{g.name}: {o.instance_type} {place}, {s.cpus:g} vCPUs, {s.memory_gib:g} GiB"


def _totals(planned: LaunchPlan) -> Iterable[RenderableType]:
    from rich.text import Text

    least, unpriced = prices.plan_usd_per_hour(planned)
    most, _ = prices.plan_usd_per_hour(planned, largest=True)
    prefix = "at least " if unpriced else ""
    if unpriced and most == 0.0:
        yield Text("Total   no price known\n", "bold")
        return
    line = Text.assemble("Total   ", (f"{prefix}{_span(least, most)} per hour", "bold"))
    month = (
        f"{prefix}{_span(least * HOURS_PER_MONTH, most * HOURS_PER_MONTH, digits=0)} per month of {HOURS_PER_MONTH:g} h"
    )
    yield Text.assemble(line, "\n        ", month)
    saved, part = spot_saving(planned)
    if saved > 0:
        yield Text.assemble("        ", (f"spot saves ${saved:,.2f} per hour at the largest ({part:.0%})", "green"))
    yield Text("")


def _section(title: str, style: str, lines: Iterable[str]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=9, style=style)
    grid.add_column(overflow="fold")
    for n, line in enumerate(lines):
        grid.add_row(title if n == 0 else "", Text(line))
    return grid


def _next_best(g: GroupPlan) -> str:
    texts = [f"{o.instance_type} ({o.shape.gpus:g} x {o.shape.accelerator}) ${_usd(o.price_usd_per_hour)}" for o in
             g.alternatives]  # fmt: skip
    return f"{g.name}: {', '.join(texts)}"


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least}..{most}"


def _span(least: float, most: float, digits: int = 2) -> str:
    return f"${_range(f'{least:,.{digits}f}', f'{most:,.{digits}f}')}"


def _usd(usd: float | None) -> str:
    return "?" if usd is None else f"{usd:,.2f}"


