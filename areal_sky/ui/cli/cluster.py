"""`areal-sky up`, `status`, `scale`, `down`."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import click

from areal_sky.errors import ArealSkyError, InvalidInput
from areal_sky.ui.cli.lines import echo_line

INFRA_HELP = "Where to run, instead of the spec's `infra` (`local`: on this machine)."


@click.command()
@click.argument("file", type=click.Path())
@click.option("--infra", metavar="INFRA", help=INFRA_HELP)
@click.option("--foreground", is_flag=True, help="Run the controller here instead of in the background.")
@click.option("--detach", "-d", is_flag=True, help="Do not wait until the cluster is ready.")
def up(file: str, infra: str | None, foreground: bool, detach: bool) -> None:
    """Bring the cluster of FILE up. Run again at any time: it goes on where things stand."""
    from areal_sky.cluster import Cluster
    from areal_sky.run import supervise

    began_s = time.monotonic()
    cluster = Cluster.create(file, infra=infra, warn=lambda line: echo_line(line, lead="warning: ", err=True))
    if foreground:
        run_in_foreground(cluster)
        return
    supervise.start_controller(cluster.home)
    if detach:
        click.echo(f"cluster {cluster.name}: coming up in the background; see `areal-sky status {cluster.name}`")
        return
    try:
        state = cluster.wait_ready(progress=progress_printer(began_s))
    except KeyboardInterrupt:
        click.echo(
            f"\nstill coming up in the background: `areal-sky status {cluster.name}` shows it, "
            f"`areal-sky down {cluster.name}` ends it",
            err=True,
        )
        sys.exit(130)
    ready = len(state.replicas) - 1
    click.echo(
        f"cluster {cluster.name} is ready after {time.monotonic() - began_s:.1f} s: "
        f"head and {ready} replica{'s' if ready != 1 else ''}, Ray at {cluster.home.address()['ray_address']}"
    )


@click.command()
@click.argument("name", required=False)
@click.option("--watch", "-w", is_flag=True, help="Refresh every second until Ctrl-C.")
@click.option("--orphans", is_flag=True, help="Show what runs though no state knows it: SkyPilot, EC2, this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(name: str | None, watch: bool, orphans: bool, as_json: bool) -> None:
    """Show cluster NAME, or all of them."""
    if orphans:
        from areal_sky.ui.cli.orphans import show_orphans

        if name or watch:
            raise InvalidInput("--orphans looks at everything, once: it goes with neither NAME nor --watch")
        show_orphans(as_json)
        return
    from areal_sky.home import choose_cluster, clusters

    homes = [choose_cluster(name)] if name else clusters()
    if not watch:
        _print_status(homes, as_json)
        return
    try:
        while True:
            if not as_json:
                click.clear()
            _print_status(homes, as_json)
            time.sleep(1.0)
    except KeyboardInterrupt:
        return


@click.command()
@click.argument("change", metavar="GROUP=N|+N|-N")
@click.option("--cluster", "-c", metavar="NAME", help="Which cluster; default: the only one that is up.")
@click.option("--market", type=click.Choice(["on_demand", "spot"]), help="Where new replicas come from.")
@click.option("--wait", is_flag=True, help="Wait until the group has that size.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def scale(change: str, cluster: str | None, market: str | None, wait: bool, as_json: bool) -> None:
    """Grow or shrink an elastic group, e.g. rollout=4, rollout=+1, rollout=-2."""
    from areal_sky.cluster import Cluster

    group, _, amount = change.partition("=")
    if not group or not amount.lstrip("+-").isdigit():
        raise InvalidInput(f"{change!r}: expected GROUP=N, GROUP=+N or GROUP=-N, e.g. rollout=+1")
    target = Cluster.attach(cluster)
    by = int(amount.lstrip("+-"))
    if amount.startswith("+"):
        decision = target.grow(group, by=by, market=market)
    elif amount.startswith("-"):
        decision = target.shrink(group, by=by)
    else:
        decision = target.scale(group, by, market=market)
    if as_json:
        click.echo(json.dumps({"group": group, "desired": decision.desired, "reason": decision.reason}))
    else:
        click.echo(f"{group}: {decision.desired} wanted ({decision.reason})")
    if wait:
        show = progress_printer(time.monotonic(), only_new=target.state().version)
        target.wait_ready(progress=None if as_json else show)


@click.command()
@click.argument("name", required=False)
@click.option("--drain", default="30s", show_default=True, metavar="TIME", help="What running tasks get to finish.")
@click.option("--detach", "-d", is_flag=True, help="Do not wait for the end.")
@click.option("--orphans", is_flag=True, help="End what `status --orphans` shows instead; NAME is one of these.")
@click.option("--yes", "-y", is_flag=True, help="With --orphans: do not ask.")
def down(name: str | None, drain: str, detach: bool, orphans: bool, yes: bool) -> None:
    """Drain and end a cluster, then check that nothing of it is left."""
    if orphans:
        from areal_sky.ui.cli.orphans import end_orphans

        end_orphans(name, yes)
        return
    from areal_sky.cluster import Cluster
    from areal_sky.units import parse_duration_s

    try:
        drain_s = parse_duration_s(drain)
    except ValueError as e:
        raise InvalidInput(f"--drain {drain!r}: {e}") from None
    cluster = Cluster.attach(name)
    if detach:
        cluster.request_down(drain_s)
        click.echo(f"cluster {cluster.name}: going down in the background; see `areal-sky status {cluster.name}`")
        return
    began_s = time.monotonic()
    try:
        left = cluster.down(
            drain_s=drain_s, progress=progress_printer(began_s, only_new=cluster.state().version)
        )
    except KeyboardInterrupt:
        click.echo(f"\nstill going down in the background: `areal-sky status {cluster.name}` shows it", err=True)
        sys.exit(130)
    if left:
        things = "thing" if len(left) == 1 else "things"
        click.echo(f"cluster {cluster.name}: {len(left)} {things} left or unknown:", err=True)
        for x in left:
            click.echo(f"  {x.what}", err=True)
        sys.exit(1)
    local = cluster.spec_and_plan()[0].is_local
    proof = "no process of it is left" if local else "SkyPilot lists nothing of it any more"
    click.echo(f"cluster {cluster.name} is down; verified: {proof}")


def progress_printer(began_s: float, only_new: int = 0) -> Any:
    """Prints each event as a line: seconds since `began_s`, then a sentence."""
    from areal_sky.core.story import sentence

    def show(record: Any) -> None:
        if record.seq > only_new:
            echo_line(sentence(record.event), lead=f"{time.monotonic() - began_s:6.1f} s  ")

    return show


def run_in_foreground(cluster: Any) -> None:
    """The controller in this process, as systemd or Kubernetes want it. SIGTERM ends it and leaves the cluster up."""

    from areal_sky.adapters.processes import stop_on_signals
    from areal_sky.run.supervise import run_controller
    from areal_sky.ui.cli.processes import set_up_logging

    set_up_logging()
    stop = threading.Event()
    stop_on_signals(stop)
    run_controller(cluster.home, stop)


def _print_status(homes: list[Any], as_json: bool) -> None:
    from areal_sky.cluster import Cluster

    reports: list[dict[str, Any]] = []
    for home in homes:
        try:
            reports.append(Cluster(home).status())
        except ArealSkyError as e:
            if len(homes) == 1:
                raise
            reports.append({"cluster": home.name, "state": "UNREADABLE", "problem": str(e)})
    if as_json:
        click.echo(json.dumps(reports if len(reports) != 1 else reports[0]))
        return
    if not reports:
        click.echo("no clusters; `areal-sky up FILE` brings one up")
    for report in reports:
        if "problem" in report:
            echo_line(f"{report['cluster']}  {report['state']}  {report['problem']}")
        else:
            _print_report(report)


def _print_report(report: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from areal_sky.units import format_duration, format_usd

    console = Console(highlight=False)
    cost = report["cost"]
    spent = f"{format_usd(cost['usd'])} so far, {format_usd(cost['usd_per_hour_now'])}/h now"
    console.print(f"[bold]{report['cluster']}[/]  {report['state']}  {spent}")
    if report["state"] != "DOWN" and report["controller"] != "running":
        console.print("  [yellow]its controller is not running: `areal-sky up` or `down` starts it again[/]")
    if report["cloud"]["problem"] and report["state"] != "DOWN":
        console.print(f"  [yellow]cloud: {report['cloud']['problem']}[/]", soft_wrap=True)
    if report["head"].get("problem") and report["state"] not in ("STARTING", "DOWN"):
        console.print(f"  [yellow]head: {report['head']['problem']}[/]", soft_wrap=True)
    if tasks := report["tasks"]:
        console.print(f"  tasks: {tasks['running']} running, {tasks['waiting']} waiting")
    for g in report["groups"]:
        if g["group"] == "head":
            continue
        size = f"{g['ready']} of {g['desired']} ready" + (f" ({g['min']}..{g['max']})" if g["min"] != g["max"] else "")
        echo_line(f"{size}  {g['by']}: {g['reason']}", lead=f"  {g['group']}: ")
        if g["given_up"]:
            again = f"given up after {g['failures']} failed launches, `areal-sky up` again for more: {g['given_up']}"
            echo_line(again, lead="    ")
    if not report["replicas"]:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading, justify in (
        ("replica", "left"), ("state", "left"), ("for", "right"), ("market", "left"),
        ("$/h", "right"), ("tasks", "right"), ("GPU", "right"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for r in report["replicas"]:
        table.add_row(
            r["replica"],
            r["state"],
            format_duration(int(r["for_s"]), 2),
            r["market"].replace("_", "-"),
            "?" if r["usd_per_hour"] is None else f"{r['usd_per_hour']:.2f}",
            "" if r["running_tasks"] is None else str(r["running_tasks"]),
            "n/a" if r["gpu_utilization"] is None else f"{r['gpu_utilization']:.0%}",
        )
    console.print(table)
    for r in report["replicas"]:
        if r["note"] and r["state"] != "READY":
            echo_line(r["note"], lead=f"  {r['replica']}: ")
