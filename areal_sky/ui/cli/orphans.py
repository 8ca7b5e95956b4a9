"""`areal-sky status --orphans` and `areal-sky down --orphans`: what runs though no state knows it."""

from __future__ import annotations

import json
import sys
import time
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from areal_sky.ui.cli.lines import echo_line

if TYPE_CHECKING:
    from areal_sky.core.orphans import Orphan
    from areal_sky.run.orphans import Places, Swept

KINDS = {
    "skypilot": "SkyPilot cluster",
    "ec2": "EC2 instance",
    "process": "local node",
    "ray": "Ray node",
}


def show_orphans(as_json: bool) -> None:
    """Lists orphans. Ends nothing."""
    from areal_sky.run.orphans import usual_places

    swept = _sweep(usual_places())
    if as_json:
        click.echo(json.dumps(_to_json(swept)))
        return
    _print(swept)
    if swept.finding.orphans:
        click.echo("`areal-sky down --orphans` ends them; it asks first")


def end_orphans(name: str | None, yes: bool) -> None:
    """Ends orphans: all that are certain, or those called `name`, doubtful ones too. Asks unless `yes`.

    Exits with 1 when one could not be ended, or when SkyPilot could not be asked.
    """
    from areal_sky.core.orphans import GRACE_S
    from areal_sky.errors import ArealSkyError
    from areal_sky.run.orphans import end, usual_places

    places = usual_places()
    swept = _sweep(places)
    _print(swept)
    named = [o for o in swept.finding.orphans if name is None or o.id == name]
    chosen = [o for o in named if o.ripe and (o.certain or o.id == name)]
    for o in named:
        if not o.ripe:
            click.echo(f"{o.id}: younger than {GRACE_S:.0f} s, left for now: somebody may just be recording it")
        elif o not in chosen:
            click.echo(f"{o.id}: left, another state folder may know it; `areal-sky down --orphans {o.id}` ends it")
    if name is not None and not named:
        click.echo(f"no orphan is called {name}", err=True)
        sys.exit(1)
    if chosen:
        click.echo("Nothing can be drained: no state knows what runs there. Work on them is lost.")
        if not yes and not click.confirm(f"End {_many(len(chosen))}?", default=False):
            sys.exit(1)
    failed = 0
    for o in chosen:
        try:
            click.echo(f"{KINDS[o.kind]} {o.id}: {end(o, places)}")
        except ArealSkyError as e:
            failed += 1
            click.echo(f"{KINDS[o.kind]} {o.id}: not ended: {e}", err=True)
    if failed or not swept.sky_told:
        sys.exit(1)


def _sweep(places: Places) -> Swept:
    from areal_sky.run.orphans import sweep

    with redirect_stdout(sys.stderr):  # SkyPilot prints what it likes, and stdout may be JSON
        return sweep(places)


def _print(swept: Swept) -> None:
    finding = swept.finding
    now_s = time.time()
    for o in finding.orphans:
        _print_orphan(o, now_s)
    for text in (*finding.left_alone, *finding.warnings):
        echo_line(text)
    for text in swept.unasked:
        echo_line(text, lead="not looked at: ")
    if not finding.orphans:
        click.echo("no orphans" if not swept.unasked else "no orphans where could be looked")


def _print_orphan(o: Orphan, now_s: float) -> None:
    from areal_sky.units import format_duration, format_usd

    parts = [o.where, o.what]
    if o.since_s:
        parts.append(f"for {format_duration(max(0, int(now_s - o.since_s)), 2)}")
    if o.usd_per_hour is not None:
        parts.append(f"about {format_usd(o.usd_per_hour)}/h")
    elif o.kind in ("skypilot", "ec2"):
        parts.append("price unknown")
    echo_line(f"{', '.join(p for p in parts if p)}: {o.reason}", lead=f"{KINDS[o.kind]} {o.id}  ")


def _many(n: int) -> str:
    return "this one" if n == 1 else f"these {n}"


def _to_json(swept: Swept) -> dict[str, object]:
    return {
        "orphans": [{k: v for k, v in asdict(o).items() if k != "handle"} for o in swept.finding.orphans],
        "left_alone": list(swept.finding.left_alone),
        "warnings": list(swept.finding.warnings),
        "not_looked_at": list(swept.unasked),
    }
