"""`areal-sky alerts`: what is wrong, since when, on what evidence, and what was done about it."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from areal_sky.errors import InvalidInput
from areal_sky.ui.cli.lines import echo_line
from areal_sky.ui.cli.story import CLUSTER_OPTION, JSON_OPTION
from areal_sky.units import format_duration


@click.command()
@CLUSTER_OPTION
@click.option("--limit", "-n", default=10, show_default=True, help="How many alerts that are over to show.")
@click.option("--uncordon", metavar="NODE", help="Let NODE (REPLICA/INDEX) take work again.")
@JSON_OPTION
def alerts(cluster: str | None, limit: int, uncordon: str | None, as_json: bool) -> None:
    """Show what is wrong now, and what was."""
    from areal_sky.home import choose_cluster

    home = choose_cluster(cluster)
    if uncordon is not None:
        replica, _, index = uncordon.rpartition("/")
        if not replica or not index.isdigit():
            raise InvalidInput(f"--uncordon {uncordon}: expected REPLICA/INDEX, such as grpo-main-0/1")
        with home.gateway("operate") as gateway:
            click.echo(gateway.uncordon(replica, int(index))["done"])
        return
    with home.gateway("read") as gateway:
        known = gateway.alerts(limit)
    if as_json:
        click.echo(json.dumps(known))
        return
    for alert in known["active"]:
        _print(alert, known["t_s"])
    if not known["active"]:
        click.echo("nothing is wrong")
    if known["over"]:
        click.echo("over:")
    for alert in known["over"]:
        _print(alert, known["t_s"])


def _print(alert: dict[str, Any], now_s: float) -> None:
    until_s = alert["resolved_s"] or now_s
    since = time.strftime("%H:%M:%S", time.localtime(alert["since_s"]))
    lasted = format_duration(max(0, round(until_s - alert["since_s"])), parts=2)
    times = f", {alert['times']} times" if alert["times"] > 1 else ""
    lead = f"{since}  {alert['alert_id']:<5} "
    echo_line(f"{alert['kind']} at {alert['place']}: {alert['what']} ({lasted}{times})", lead=lead)
    echo_line(alert["evidence"], lead=" " * len(lead) + "because ")
    for words in alert["done"]:
        echo_line(words, lead=" " * len(lead) + "done: ")
