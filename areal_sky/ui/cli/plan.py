"""`areal-sky plan` and `areal-sky render`: what would be launched, at what price, and the files that launch it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_sky.adapters.catalog import shipped_offers
from areal_sky.core import launch, prices, taskyaml
from areal_sky.core.model import HEAD_GROUP, GroupPlan, LaunchPlan, Offer
from areal_sky.errors import InvalidInput, Refused, StateError
from areal_sky.specfile import read_spec

if TYPE_CHECKING:
    from rich.console import RenderableType

HOURS_PER_MONTH = 730.0  # 365 days of 24 hours over 12 months
CATALOG = "SkyPilot catalog "
PRICES_ARE = "list prices at that commit, not today's"


@click.command()
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
def plan(file: str, as_json: bool) -> None:
    """Show what FILE would launch, where and at what price.

    No cloud is asked and nothing is launched. Prices come from a small table shipped with areal_sky; what it does not
    know is said. Ends with 3 if the least that would run costs more than `budget.max_hourly_usd`.
    """
    planned = launch.plan(read_spec(file, time.time()), shipped_offers())
    if as_json:
        click.echo(json.dumps(plan_dict(planned), indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for part in _story(planned):
        console.print(part)


@click.command()
@click.argument("file")
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder to write to.")
@click.option("--force", is_flag=True, help="Overwrite files that were changed or come from another spec.")
def render(file: str, out: Path, force: bool) -> None:
    """Write one SkyPilot task YAML per group of FILE into a folder, and say how to launch them by hand.

    The same spec gives the same bytes. A file in the folder that differs is left alone (exit code 3) unless --force.
    """
    spec = read_spec(file, time.time())
    if spec.is_local:
        click.echo("infra: local needs no SkyPilot; these files are for whatever cloud SkyPilot finds enabled\n")
        spec = spec.model_copy(update={"infra": None})
    planned = launch.plan(spec, shipped_offers())
    files = taskyaml.render_files(spec, planned, _package())
    written = _write(out, files, force)
    for name in files:
        click.echo(f"{'wrote    ' if name in written else 'unchanged'} {out / name}")
    click.echo(f"\nHow to launch them: the first lines of {out / 'head.yaml'} and of each other file say it.")


def plan_dict(planned: LaunchPlan) -> dict[str, Any]:
    """The plan as JSON values, its prices added up. Dollars per hour; null where no price is known."""
    groups = (planned.head, *planned.groups)
    least, unpriced = prices.plan_usd_per_hour(planned)
    most, _ = prices.plan_usd_per_hour(planned, largest=True)
    saving, _ = spot_saving(planned)
    return {
        "cluster": planned.cluster,
        "infra": planned.infra,
        "head": _group_dict(planned.head),
        "groups": [_group_dict(g) for g in planned.groups],
        "usd_per_hour": {"min": _cents(least), "max": _cents(most), "without_price": list(unpriced)},
        "usd_per_month": {"min": _cents(least * HOURS_PER_MONTH), "max": _cents(most * HOURS_PER_MONTH)},
        "spot_saves_usd_per_hour_at_max": _cents(saving),
        "price_sources": _sources(groups),
        "guesses": list(planned.guesses),
        "unknowns": list(planned.unknowns),
    }


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


def _group_dict(g: GroupPlan) -> dict[str, Any]:
    node = {m: None if o is None else o.price_usd_per_hour for m, o in _by_market(g).items()}
    return {
        **asdict(g),
        "usd_per_hour": {
            "node": node,
            "min": _cents(prices.group_usd_per_hour(g, g.min_replicas)),
            "max": _cents(prices.group_usd_per_hour(g, g.max_replicas)),
        },
    }


def _by_market(g: GroupPlan) -> dict[str, Offer | None]:
    """The offers that the group's market will use, in the order in which it uses them."""
    both = {"on_demand": g.on_demand_offer or g.offer, "spot": g.spot_offer}
    used = {prices.market_of(g, n) for n in {0, g.on_demand_base, max(0, g.max_replicas - 1)}}
    return {m: o for m, o in both.items() if m in used}


def _cents(usd: float | None) -> float | None:
    return None if usd is None else round(usd, 4)


def _sources(groups: Iterable[GroupPlan]) -> list[str]:
    """Where the prices come from, without the places that pretend machines are priced as if in."""
    return sorted({g.offer.source.split(": ")[-1] for g in groups if g.offer.price_usd_per_hour is not None})


# ---------------------------------------------------------------- the plan, to be read


def _story(planned: LaunchPlan) -> Iterable[RenderableType]:
    from rich.text import Text

    groups = (planned.head, *planned.groups)
    yield Text.assemble((planned.cluster, "bold"), "  ", (_places(planned), "dim"))
    yield _table(planned)
    yield from _totals(planned)
    known = [_machine(g) for g in groups if g.offer.price_usd_per_hour is not None]
    if known:
        commits = ", ".join(s.removeprefix(CATALOG) for s in _sources(groups))
        known.append(f"prices: {CATALOG}{commits}; {PRICES_ARE}")
    for title, style, lines in (
        ("Known", "green", known),
        ("Guessed", "yellow", planned.guesses),
        ("Not known", "red", planned.unknowns),
        ("Next best", "cyan", [_next_best(g) for g in planned.groups if g.alternatives]),
    ):
        if lines:
            yield _section(title, style, lines)


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
        markets = _by_market(g)
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


# ---------------------------------------------------------------- files


def _package() -> str:
    """What the machines install: this very version, so that head and nodes speak alike."""
    try:
        return f"{taskyaml.DEFAULT_PACKAGE}=={version('areal-sky')}"
    except PackageNotFoundError:
        return taskyaml.DEFAULT_PACKAGE


def _write(out: Path, files: dict[str, str], force: bool) -> set[str]:
    """Writes what differs; returns the names written. Refused, with nothing written, if that would lose text."""
    for name in files:
        if Path(name).name != name:
            raise InvalidInput(f"group name {name.removesuffix('.yaml')!r} cannot be a file name")
    try:
        there = {n: (out / n).read_text(encoding="utf-8", errors="replace") for n in files if (out / n).exists()}
        lost = [n for n, text in there.items() if text != files[n]]
        if lost and not force:
            raise Refused(
                f"{out} has {', '.join(lost)} with other contents: use --force to overwrite, or another --out"
            )
        out.mkdir(parents=True, exist_ok=True)
        written = {n for n in files if there.get(n) != files[n]}
        for name in written:
            (out / name).write_text(files[name], encoding="utf-8")
    except OSError as e:
        raise StateError(f"cannot write to {out}: {e.strerror or e}") from None
    return written
