"""`areal-sky queue`, `cancel`, `logs`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from areal_sky.errors import InvalidInput, NotFound, Unreachable
from areal_sky.ui.cli.lines import echo_line

if TYPE_CHECKING:
    from rich.table import Table

    from areal_sky.adapters.gateway_client import GatewayClient

ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")
POLL_S = 0.2
RECENT = 5  # ended tasks that `queue` shows without --all
REASONS = 5
SILENT_S = 60.0  # how long following sits out a head that restarts
STATE_STYLE = {"RUNNING": "green", "PLACED": "green", "SUCCEEDED": "dim", "CANCELLED": "dim", "FAILED": "red"}

cluster_option = click.option("-c", "--cluster", metavar="NAME", help="Which cluster; default: the only one up.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command()
@cluster_option
@click.option("--all", "-a", "show_all", is_flag=True, help="The latest 1,000 that ended, not only the latest 5.")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="Only tasks with this label; repeatable.")
@click.option("--explain", is_flag=True, help="Every term of each waiting task's place, and what it waits for.")
@click.option("--state", metavar="STATE", help="Only tasks in this state, or `active`: all that have not ended.")
@json_option
def queue(
    cluster: str | None, show_all: bool, labels: Sequence[str], explain: bool, state: str | None, as_json: bool
) -> None:
    """Show running and waiting tasks in order, and the latest that ended."""
    from areal_sky import home

    tasks = home.choose_cluster(cluster).gateway("read").tasks(state, pairs(labels, "--label"), explain=explain)
    if as_json:
        click.echo(json.dumps({"tasks": tasks}, indent=2))
        return
    ended = [t for t in tasks if t["state"] in ENDED]
    hidden = 0 if show_all or state is not None else max(0, len(ended) - RECENT)
    shown = tasks[: len(tasks) - hidden]
    if not shown:
        click.echo("no such task" if labels or state else "no tasks; `areal-sky submit` queues one")
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(queue_table(shown))
    if explain:
        _explain(shown)
    for line in () if explain else _reasons(shown, console.width):
        console.print(line, style="dim", markup=False)
    waiting = sum(t["state"] == "QUEUED" for t in tasks)
    more = f", {hidden} more that ended (--all)" if hidden else ""
    console.print(f"{len(tasks) - waiting - len(ended)} running, {waiting} waiting{more}", style="dim")


@click.command()
@click.argument("task_ids", nargs=-1, required=True, metavar="ID...")
@cluster_option
@json_option
def cancel(task_ids: Sequence[str], cluster: str | None, as_json: bool) -> None:
    """Cancel tasks: waiting ones at once, running ones by SIGTERM and SIGKILL 10 s later."""
    from areal_sky import home

    gateway = home.choose_cluster(cluster).gateway("submit")
    results: list[dict[str, Any]] = []
    missing: list[str] = []
    for task_id in task_ids:
        try:
            task = gateway.cancel(task_id)
        except NotFound as e:
            missing.append(str(e))
            continue
        results.append({"task_id": task_id, "state": task["state"], "reason": task["reason"]})
        if not as_json:
            words = {"CANCELLED": "cancelled", "SUCCEEDED": "had succeeded", "FAILED": "had failed"}
            click.echo(f"{task_id} {words.get(task['state'], 'is being ended')}")
    if as_json:
        click.echo(json.dumps({"tasks": results}))
    if missing:
        raise NotFound("; ".join(missing))


@click.command()
@click.argument("task_id", metavar="ID")
@cluster_option
@click.option("--follow", "-f", is_flag=True, help="Go on until the task ends.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Whose output.")
@click.option("--stderr", "only_err", is_flag=True, help="Only stderr, printed to stdout.")
@click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="An earlier attempt; default: the latest.")
def logs(
    task_id: str, cluster: str | None, follow: bool, rank: int, only_err: bool, attempt: int | None
) -> None:
    """Print what a task wrote: its stdout to stdout, its stderr to stderr."""
    from areal_sky import home

    gateway = home.choose_cluster(cluster).gateway("read")
    streams = ("err",) if only_err else ("out", "err")
    if follow:
        follow_output(gateway, task_id, range(rank, rank + 1), streams, merge=only_err)
        return
    for stream in streams:
        offset = 0
        while (page := gateway.logs(task_id, stream=stream, rank=rank, offset=offset, attempt=attempt))["text"]:
            click.echo(page["text"], nl=False, err=stream == "err" and not only_err)
            offset = page["next_offset"]


def queue_table(tasks: Iterable[Mapping[str, Any]]) -> Table:
    """One line per task, fit for 80 columns."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", expand=True)
    for name, options in (
        ("ID", {}), ("NAME", {"max_width": 12}), ("KIND", {}), ("MODEL", {"max_width": 13}), ("PRIO", {}),
        ("STATE", {}), ("TIME", {"justify": "right"}), ("WHERE", {"ratio": 1, "min_width": 12}),
    ):  # fmt: skip
        table.add_column(name, no_wrap=True, overflow="ellipsis", **options)  # type: ignore[arg-type]
    for t in tasks:
        state = t["state"]
        seconds = t["waiting_s"] if state == "QUEUED" else t["running_s"]
        weighted = f"{t['priority']:g}" + (f"x{t['weight']:g}" if t["weight"] != 1 else "")
        table.add_row(
            t["task_id"], Text(_name(t)), t["kind"], Text(t["model"] or "-"), weighted,
            Text(state.lower(), style=STATE_STYLE.get(state, "")), "-" if seconds is None else _short(seconds),
            Text(t["where"] or "-"),
        )  # fmt: skip
    return table


def _reasons(tasks: Iterable[Mapping[str, Any]], width: int) -> list[str]:
    """Why tasks wait or failed, a line each for the first few."""
    told = [t for t in tasks if t["reason"] and t["state"] != "CANCELLED"]
    lines = [f"{t['task_id']}: {' '.join(t['reason'].split())}" for t in told[:REASONS]]
    lines = [line if len(line) <= width else line[: width - 1] + "…" for line in lines]
    return lines + (["`areal-sky why ID` tells of the others"] if len(told) > REASONS else [])


def _explain(tasks: Iterable[Mapping[str, Any]]) -> None:
    """Two lines for each waiting task: its place in the order, and what it waits for."""
    for task in tasks:
        if task["state"] == "QUEUED":
            lead = f"{task['task_id']}: "
            if task["terms"]:
                echo_line(task["terms"], lead=lead)
            echo_line(f"waits because {task['reason']}", lead=" " * len(lead) if task["terms"] else lead)


def _name(task: Mapping[str, Any]) -> str:
    index = task["array_index"]
    return task["name"] if index is None else f"{task['name']}[{index}]"


def pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    """K=V, repeated. Raises InvalidInput."""
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InvalidInput(f"{option} {text!r}: expected K=V")
        found[key] = value
    return found


def _short(seconds: float) -> str:
    from areal_sky.units import format_duration

    return format_duration(int(seconds), parts=2)


def follow_output(
    gateway: GatewayClient, task_id: str, ranks: Iterable[int], streams: Sequence[str], *, merge: bool = False
) -> None:
    """Prints output as it comes, attempt after attempt, until the task has ended."""
    offsets = {(rank, stream): 0 for rank in ranks for stream in streams}
    attempt = gateway.task(task_id)["attempt"]
    silent_since_s: float | None = None
    try:
        while True:
            try:
                open_streams, news = 0, False
                latest = attempt
                for rank, stream in offsets:
                    page = gateway.logs(
                        task_id, stream=stream, rank=rank, offset=offsets[rank, stream], attempt=attempt or None
                    )
                    click.echo(page["text"], nl=False, err=stream == "err" and not merge)
                    offsets[rank, stream] = page["next_offset"]
                    open_streams += not page["ended"]
                    news = news or bool(page["text"])
                if not news:
                    latest = gateway.task(task_id)["attempt"]
                silent_since_s = None
            except Unreachable:
                # A head that is restarted comes back within seconds; the task goes on meanwhile.
                silent_since_s = silent_since_s or time.monotonic()
                if time.monotonic() - silent_since_s > SILENT_S:
                    raise
                time.sleep(POLL_S)
                continue
            if latest != attempt:
                if attempt:
                    click.echo(f"[{task_id} runs again, attempt {latest}]", err=True)
                attempt, offsets = latest, dict.fromkeys(offsets, 0)
            elif not open_streams:
                return
            elif not news:
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        click.echo(f"\n{task_id} goes on; `areal-sky logs -f {task_id}` shows it again", err=True)
        sys.exit(130)


def exit_like(task: Mapping[str, Any]) -> None:
    reason = f": {task['reason']}" if task["reason"] else ""
    click.echo(f"{task['task_id']} {task['state'].lower()}{reason}", err=True)
    sys.exit(0 if task["state"] == "SUCCEEDED" else 1)
