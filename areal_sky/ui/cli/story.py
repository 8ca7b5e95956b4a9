"""`areal-sky why`, `events`: what happened, and for what reason."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from areal_sky.ui.cli.lines import echo_line

CLUSTER_OPTION = click.option(
    "--cluster", "-c", metavar="NAME", help="Which cluster; default: the only one that is up."
)
JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command()
@click.argument("subject", metavar="ID")
@CLUSTER_OPTION
@JSON_OPTION
def why(subject: str, cluster: str | None, as_json: bool) -> None:
    """Tell the story of a task, replica, group or cluster."""
    lines = _attach(cluster).why(subject)
    if as_json:
        click.echo(json.dumps([{"t_s": t_s, "text": text} for t_s, text in lines]))
        return
    _print_lines(lines)


@click.command()
@click.argument("name", required=False)
@CLUSTER_OPTION
@click.option("--follow", "-f", is_flag=True, help="Go on printing what happens until Ctrl-C.")
@JSON_OPTION
def events(name: str | None, cluster: str | None, follow: bool, as_json: bool) -> None:
    """Print what happened to cluster NAME, in order."""
    from areal_sky.core.events import encode
    from areal_sky.core.story import sentence

    target = _attach(name or cluster)
    seq = 0
    try:
        while True:
            for record in target.events(seq):
                seq = record.seq
                if as_json:
                    kind, fields = encode(record.event)
                    click.echo(json.dumps({"seq": record.seq, "t_s": record.t_s, "event": kind, **fields}))
                else:
                    _print_lines([(record.t_s, sentence(record.event))])
            if not follow:
                return
            time.sleep(0.3)
    except KeyboardInterrupt:
        return


def _attach(name: str | None) -> Any:
    from areal_sky.cluster import Cluster
    from areal_sky.errors import NotFound
    from areal_sky.home import clusters

    try:
        return Cluster.attach(name)
    except NotFound:
        # Reading is possible after the end, too: take the one cluster that there is.
        homes = clusters()
        if name is None and len(homes) == 1:
            return Cluster(homes[0])
        raise


def _print_lines(lines: list[tuple[float, str]]) -> None:
    for t_s, text in lines:
        echo_line(text, lead=f"{time.strftime('%H:%M:%S', time.localtime(t_s))}  ")
