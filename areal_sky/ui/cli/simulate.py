"""`areal-sky simulate`: a spec in a virtual world, under one policy or several side by side."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path

import click

from areal_sky.errors import InvalidInput, StateError

_PATH = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("file", required=False)
@click.option("--workload", type=_PATH, help="A trace (Philly or Alibaba CSV) or a YAML of synthetic work.")
@click.option("--spot", type=_PATH, multiple=True, help="A spot-traces JSON; several: a zone each.")
@click.option("--world", default="usual", show_default=True, help="What goes wrong: calm, usual or rough.")
@click.option("--policy", help="Instead of the spec's: an order, a scaling policy, a market, joined by +.")
@click.option("--compare", default="", metavar="P1,P2,...", help="Several policies side by side.")
@click.option("--from", "source", metavar="CLUSTER", help="Replay what this cluster has recorded.")
@click.option("--days", type=click.FloatRange(min=0, min_open=True), help="How long work arrives; by default: 1.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same events.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="A folder for pictures and a report.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per policy and line.")
def simulate(
    file: str | None,
    workload: Path | None,
    spot: tuple[Path, ...],
    world: str,
    policy: str | None,
    compare: str,
    source: str | None,
    days: float | None,
    seed: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run the spec FILE in a virtual world: the production controller and scheduler on a virtual clock.

    Machines take their time, fail, are reclaimed; prices move; nothing is launched and nothing costs anything. Without
    --workload the work is made up from the models of the spec. With --from no FILE is needed: the spec, the tasks and
    the luck are those of a cluster of yours, live or down, so that "what would it have cost with ..." has an answer.
    docs/simulator.md says what is modelled and on whose figures.
    """
    from areal_sky.run.simulation import report, study

    names = [n.strip() for n in compare.split(",") if n.strip()] or [policy or study.AS_IS]
    if policy is not None and compare:
        raise InvalidInput("--policy and --compare say the same: name all policies with --compare")
    if (file is None) == (source is None):
        raise InvalidInput("expected a spec FILE, or --from CLUSTER")
    if source is not None and (workload or spot):
        raise InvalidInput("--from has its own work and its own luck: leave out --workload and --spot")
    if source is not None:
        made = study.of_cluster(source, seed)
    else:
        made = study.of_spec(str(file), workload, spot, world, days, seed, time.time())
    results = list(made.truth)
    controllers = logging.getLogger("areal_sky.run.controller")
    level = controllers.level
    controllers.setLevel(logging.ERROR)  # it tells its log of every refused launch; here that is weather
    try:
        for name in names:
            results.append(made.run(name))
            if as_json:
                click.echo(results[-1].to_json())
    finally:
        controllers.setLevel(level)
    if not as_json:
        click.echo(report.table(results, shutil.get_terminal_size().columns))
    if out is not None:
        try:
            for path in report.write(results, out):
                click.echo(f"wrote {path}", err=as_json)
        except OSError as e:
            raise StateError(f"cannot write to {out}: {e.strerror or e}") from None
