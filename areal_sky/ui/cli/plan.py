"""`areal-sky plan` and `areal-sky render`: what would be launched, at what price, and the files that launch it."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from areal_sky.core import launch, memory_check, prices, taskyaml
from areal_sky.core.model import GroupPlan, LaunchPlan
from areal_sky.core.prices import HOURS_PER_MONTH
from areal_sky.errors import InvalidInput, Refused, StateError
from areal_sky.run import modelfiles, shipping
from areal_sky.run.offers import known_for
from areal_sky.specfile import read_spec
from areal_sky.ui.cli import planview

_OFFLINE = click.option("--offline", is_flag=True, help="Use no network: only the catalogs on this machine.")
_NO_SKY = click.option("--no-sky", is_flag=True, help="Do not ask SkyPilot: only the shipped price table, at once.")


@click.command()
@click.argument("file")
@_OFFLINE
@_NO_SKY
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
def plan(file: str, offline: bool, no_sky: bool, as_json: bool) -> None:
    """Show what FILE would launch, where and at what price.

    Nothing is launched. Offers come from SkyPilot's catalogs, for the clouds that `sky check` found; without SkyPilot
    or an enabled cloud they come from a small table shipped with areal_sky, and what that leaves open is said. Ends
    with 3 if `up` would refuse: over `budget.max_hourly_usd`, no such machine, groups that share no region, a model
    that cannot fit its GPUs.
    """
    spec = read_spec(file, time.time())
    files = modelfiles.architectures(spec, Path(file).absolute().parent)
    planned = launch.draft(spec, known_for(spec, offline=offline, sky=not no_sky), files)
    if as_json:
        click.echo(json.dumps(plan_dict(planned), indent=2))
    else:
        from rich.console import Console

        console = Console(highlight=False)
        for part in planview.story(planned):
            console.print(part)
    launch.refuse(planned)
    memory_check.refuse(planned.memory)


@click.command()
@click.argument("file")
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder to write to.")
@click.option("--force", is_flag=True, help="Overwrite files that were changed or come from another spec.")
@_OFFLINE
@_NO_SKY
def render(file: str, out: Path, force: bool, offline: bool, no_sky: bool) -> None:
    """Write one SkyPilot task YAML per group of FILE into a folder, and say how to launch them by hand.

    The same spec and prices give the same bytes. A file in the folder that differs is left alone (exit code 3) unless
    --force is given.
    """
    spec = read_spec(file, time.time())
    if spec.is_local:
        click.echo("infra: local needs no SkyPilot; these files are for whatever cloud SkyPilot finds enabled\n")
        spec = spec.model_copy(update={"infra": None})
    planned = launch.plan(spec, known_for(spec, offline=offline, sky=not no_sky))
    wheel = shipping.wheel()
    files = taskyaml.render_files(spec, planned, f"./{wheel.name}")
    written = _write(out, files, force)
    if _copied(wheel, out):
        written.add(wheel.name)
    for name in (*files, wheel.name):
        click.echo(f"{'wrote    ' if name in written else 'unchanged'} {out / name}")
    click.echo(f"\nHow to launch them: the first lines of {out / 'head.yaml'} and of each other file say it.")


def plan_dict(planned: LaunchPlan) -> dict[str, Any]:
    """The plan as JSON values, its prices added up. Dollars per hour; null where no price is known."""
    groups = (planned.head, *planned.groups)
    least, unpriced = prices.plan_usd_per_hour(planned)
    most, _ = prices.plan_usd_per_hour(planned, largest=True)
    saving, _ = planview.spot_saving(planned)
    return {
        "cluster": planned.cluster,
        "infra": planned.infra,
        "head": _group_dict(planned.head),
        "groups": [_group_dict(g) for g in planned.groups],
        "usd_per_hour": {"min": _cents(least), "max": _cents(most), "without_price": list(unpriced)},
        "usd_per_month": {"min": _cents(least * HOURS_PER_MONTH), "max": _cents(most * HOURS_PER_MONTH)},
        "spot_saves_usd_per_hour_at_max": _cents(saving),
        "price_sources": planview.sources(groups),
        "guesses": list(planned.guesses),
        "unknowns": list(planned.unknowns),
        "refusals": [*planned.refusals, *planned.memory.refusals],
        "memory": {"needs": [asdict(n) for n in planned.memory.needs], "warnings": list(planned.memory.warnings)},
        "next_places": [{"place": place, "usd_per_hour_at_max": _cents(usd)} for place, usd in planned.next_places],
        "spot": asdict(planned.spot),
    }


def _group_dict(g: GroupPlan) -> dict[str, Any]:
    node = {m: None if o is None else o.price_usd_per_hour for m, o in planview.by_market(g).items()}
    return {
        **asdict(g),
        "usd_per_hour": {
            "node": node,
            "min": _cents(prices.group_usd_per_hour(g, g.min_replicas)),
            "max": _cents(prices.group_usd_per_hour(g, g.max_replicas)),
        },
    }


def _cents(usd: float | None) -> float | None:
    return None if usd is None else round(usd, 4)


# ---------------------------------------------------------------- files


def _copied(wheel: Path, out: Path) -> bool:
    """Puts the wheel that the files mount beside them; False when it is there already."""
    target = out / wheel.name
    try:
        if target.exists() and target.read_bytes() == wheel.read_bytes():
            return False
        shutil.copyfile(wheel, target)
    except OSError as e:
        raise StateError(f"cannot write to {out}: {e.strerror or e}") from None
    return True


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
