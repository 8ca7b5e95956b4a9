"""`areal-sky cost`: the bill, for people, spreadsheets and programs."""

from __future__ import annotations

import csv
import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from areal_sky.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from areal_sky.core.cost import Bill, BillLine

COLUMNS = (
    "cluster", "group", "role", "replica", "task", "task_name", "market", "replicas", "node_hours",
    "unpriced_node_hours", "usd", "on_demand_usd",
)  # fmt: skip
_SHOWN = {"group": ("group",), "role": ("role",), "replica": ("replica",), "task": ("task", "task_name", "role")}
_HEADINGS = {"task_name": "name", "role": "kind of task"}


@click.command()
@click.argument("name", required=False)
@click.option("--cluster", "-c", metavar="NAME", help="The same as NAME.")
@click.option("--by", type=click.Choice(["group", "role", "replica", "task"]), default="group", show_default=True,
              help="What each row is for.")  # fmt: skip
@click.option("--all", "every", is_flag=True, help="Every cluster (called NAME, if given) that there is or was.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV with the columns below.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def cost(name: str | None, cluster: str | None, by: Any, every: bool, as_csv: bool, as_json: bool) -> None:
    """Print the bill so far: hours x the price at which each replica was launched.

    The head (control plane) is part of it. Spot and on-demand have rows of their own. Works after `down`, too.

    A replica's cost goes to the tasks that held its GPUs (on CPU nodes: its CPUs), by share and time. The rest is
    `idle`: held by no task of the queue (programs that reserve in Ray on their own count as idle here). `head` is the
    control plane; `unattributed` is time of which nobody knows who held it, since the head did not answer.
    Every breakdown has the same total, exactly.

    \b
    CSV columns; what --by does not tell apart is empty:
      cluster              name of the cluster
      group                node group (`head`: the control plane)
      role                 kind of task (train, rollout, eval, reward, driver), head, idle or unattributed
      replica              name of the replica
      task, task_name      the task's id, and the name that it was given
      market               on_demand or spot
      replicas             how many replicas the row comes from
      node_hours           hours of one node, all together
      unpriced_node_hours  those among them whose price nobody knows
      usd                  US dollars for the others; empty if there are none
      on_demand_usd        the same hours at on-demand prices; empty if any of these prices is unknown
    """
    from areal_sky.run.bills import billed_clusters, read_bill, title

    if as_csv and as_json:
        raise InvalidInput("--csv and --json: choose one")
    homes = billed_clusters(name or cluster, every)
    if not homes:
        raise NotFound("no cluster has or had a bill here")
    now_s = time.time()
    bills = [(title(h), read_bill(h, by, now_s)) for h in homes]
    if as_json:
        shown = [{"cluster": n, **asdict(b)} for n, b in bills]
        click.echo(json.dumps(shown if every else shown[0]))
    elif as_csv:
        _print_csv(bills)
    else:
        for n, b in bills:
            _print_table(n, b, now_s)
        if every:
            _print_sum([b for _, b in bills])


def _print_csv(bills: list[tuple[str, Bill]]) -> None:
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(COLUMNS)
    for name, b in bills:
        for x in b.lines:
            values = {"cluster": name, **asdict(x)}
            values |= {k: f"{values[k]:.6f}" for k in ("node_hours", "unpriced_node_hours")}
            values |= {k: "" if values[k] is None else f"{values[k]:.4f}" for k in ("usd", "on_demand_usd")}
            out.writerow([values[c] for c in COLUMNS])


def _print_table(name: str, b: Bill, now_s: float) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from areal_sky.units import format_usd

    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"cluster {name}", title_justify="left", title_style="")
    shown = _SHOWN[b.by]
    for column in (*shown, "market"):
        table.add_column(_HEADINGS.get(column, column) if b.by == "task" or column != "role" else "role")
    for heading in (*(["replicas"] if b.by != "replica" else []), "node-hours", "cost", "all on demand"):
        table.add_column(heading, justify="right")
    for x in b.lines:
        table.add_row(
            *(str(getattr(x, c)) for c in shown),
            x.market.replace("_", "-"),
            *([str(x.replicas)] if b.by != "replica" else []),
            f"{x.node_hours:.4f}",
            _cost(x),
            _usd(x.on_demand_usd),
        )
    table.add_section()
    empty = [""] * (len(shown) + 2 + (b.by != "replica") - 1)
    table.add_row("total", *empty, _usd(b.usd), _usd(b.on_demand_usd), style="bold")
    console.print(table)
    if not b.complete:
        console.print(
            f"{b.unpriced_node_hours:.4f} node-hours have no known price: the true total is higher than this one",
            soft_wrap=True,
        )
    if b.complete and b.on_demand_usd is not None and b.on_demand_usd != b.usd:
        console.print(f"spot against on-demand so far: {_usd(b.usd - b.on_demand_usd)}")
    if b.by in ("role", "task") and any(x.role == "unattributed" for x in b.lines):
        known = "never told" if not b.usage_until_s else f"told until {_clock(b.usage_until_s, now_s)}"
        console.print(f"unattributed: who held what was {known}; the head did not answer after that", soft_wrap=True)
    if b.usd_per_hour_now:
        console.print(f"running now: {format_usd(b.usd_per_hour_now)} per hour")


def _print_sum(bills: list[Bill]) -> None:
    usd = sum(round(b.usd * 10_000) for b in bills) / 10_000
    note = "" if all(b.complete for b in bills) else " and more: some prices are unknown"
    click.echo(f"all {len(bills)} clusters: {_usd(usd)}{note}")


def _cost(x: BillLine) -> str:
    if x.usd is None:
        return "unknown"
    return _usd(x.usd) + (" + unknown" if x.unpriced_node_hours else "")


def _usd(usd: float | None) -> str:
    return "unknown" if usd is None else f"{'-' if usd < 0 else ''}${abs(usd):,.4f}"


def _clock(t_s: float, now_s: float) -> str:
    form = "%H:%M:%S" if now_s - t_s < 86_400 else "%Y-%m-%d %H:%M:%S"
    return time.strftime(form, time.localtime(t_s))
