"""`areal-sky top`: the cluster's GPUs, live."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from areal_sky.errors import ArealSkyError, InvalidInput
from areal_sky.units import parse_duration_s

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

HISTORY_S = 60
POINTS = 30  # of a curve over a longer time
MAX_S = 7 * 86400
REFRESH_S = 1.0
BLOCKS = "▁▂▃▄▅▆▇█"
BAR_WIDTH = 10
SLOWED = ("hw_slowdown", "hw_thermal", "sw_thermal", "hw_power_brake")  # a power cap is everyday
COLOR = {"known": "", "unknown": "yellow", "stale": "yellow", "lost": "bold red"}


@click.command()
@click.option("-c", "--cluster", help="Which cluster; not needed where there is only one.")
@click.option("--once", is_flag=True, help="Print one picture and end.")
@click.option("--last", metavar="TIME", help="The curves over this long, up to 7d, instead of the last minute.")
@click.option("--json", "as_json", is_flag=True, help="Print what the head knows, once, as JSON.")
def top(cluster: str | None, once: bool, last: str | None, as_json: bool) -> None:
    """Live GPUs: load now and over the last seconds (or `--last 6h`), memory, temperature, power, tasks, trouble.

    What a GPU does not tell is shown as n/a, never as 0. Ctrl-C ends it.
    """
    from areal_sky import home

    span = {"seconds": HISTORY_S} if last is None else {"seconds": _span_s(last), "points": POINTS}
    gateway = home.choose_cluster(cluster).gateway("read")
    view = gateway.gpus(**span)
    if as_json:
        click.echo(json.dumps(view, indent=2))
        return
    if once or not sys.stdout.isatty():
        from rich.console import Console

        console = Console(highlight=False)
        console.print(picture(view, console.width))
        return
    _live(gateway, view, span)


def _span_s(text: str) -> float:
    try:
        seconds = parse_duration_s(text)
    except InvalidInput as e:
        raise click.BadParameter(str(e), param_hint="--last") from None
    if not HISTORY_S <= seconds <= MAX_S:
        raise click.BadParameter("expected 1m to 7d: older windows are not kept", param_hint="--last")
    return seconds


def _live(gateway: Any, view: Mapping[str, Any], span: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    trouble = ""
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(picture(view, console.width, console.height, trouble), refresh=True)
                time.sleep(REFRESH_S)
                try:
                    view, trouble = gateway.gpus(**span), ""
                except ArealSkyError as e:  # the last picture stays, and says that it is old
                    trouble = str(e)
    except KeyboardInterrupt:
        return


def picture(view: Mapping[str, Any], width: int = 80, height: int | None = None, trouble: str = "") -> Group:
    """The answer of GET /v1/gpus as lines of at most `width` columns, and `height` lines (the rest is counted)."""
    from rich.console import Group
    from rich.text import Text

    nodes = view["nodes"]
    lines = [_summary(nodes)]
    for node in nodes:
        lines.append(Text())
        lines.append(_node_line(node))
        lines += [_gpu_line(gpu, width) for gpu in node["gpus"]]
    if not nodes:
        lines.append(Text("no node has reported yet", style="dim"))
    foot = [Text(trouble, style="red")] if trouble else []
    room = None if height is None else height - len(foot) - 1
    if room is not None and len(lines) > room:
        hidden = len(lines) - room + 1
        lines = [*lines[: max(0, room - 1)], Text(f"... {hidden} more lines: a higher window shows them", style="dim")]
    for line in lines + foot:
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return Group(*lines, *foot)


def _summary(nodes: Sequence[Mapping[str, Any]]) -> Text:
    from rich.text import Text

    gpus = [gpu for node in nodes for gpu in node["gpus"]]
    known = [gpu["utilization"] for gpu in gpus if gpu["utilization"] is not None]
    parts = [_count(len(nodes), "node"), _count(len(gpus), "GPU")]
    if known:
        of = f" of {len(known)}" if len(known) < len(gpus) else ""
        parts.append(f"mean load {sum(known) / len(known):.0%}{of}")
    for word in ("unknown", "stale", "lost"):
        if number := sum(1 for gpu in gpus if gpu["validity"] == word):
            parts.append(f"{number} {word}")
    return Text(", ".join(parts), style="bold")


def _node_line(node: Mapping[str, Any]) -> Text:
    from rich.text import Text

    line = Text()
    line.append(node["replica"], style="bold cyan")
    if node["index"]:
        line.append(f" node {node['index']}", style="cyan")
    if not node["alive"]:
        line.append(f"  silent for {_duration(node['age_s'])}", style="bold red")
    elif not node["raylet_alive"]:
        line.append("  its Ray is down", style="bold red")
    elif node["telemetry_error"]:
        line.append(f"  {node['telemetry_error']}", style="yellow")
    else:
        line.append(f"  heard {_duration(node['age_s'])} ago", style="dim")
    if node.get("dropped_windows"):
        line.append(f"  {node['dropped_windows']} windows lost", style="yellow")
    if not node["gpus"]:
        line.append("  no GPUs", style="dim")
        return line
    names = sorted({gpu["name"] for gpu in node["gpus"] if gpu["age_s"] is not None}) or ["GPU"]
    line.append(f"  {len(node['gpus'])}x {', '.join(names)}")
    line.append(f"  every {_duration(node['interval_s'])}", style="dim")
    return line


def _gpu_line(gpu: Mapping[str, Any], width: int) -> Text:
    from rich.text import Text

    validity, load = gpu["validity"], gpu["utilization"]
    spark_width = min(30, max(10, width - 62))
    line = Text()
    line.append(f"{gpu['device']:>3} ")
    line.append(*_bar(load))
    line.append(f" {_or_na(load, lambda v: f'{v:.0%}'):>4} ")
    if validity == "known":
        line.append(_sparkline(gpu["history"], spark_width), style="green")
    else:  # a word is worth more here than a curve that has ended
        age = f" {_duration(gpu['age_s'])}" if validity == "stale" else ""
        line.append(f"{validity}{age}".ljust(spark_width), style=COLOR[validity])
    line.append(f" {_memory(gpu):>10}")
    line.append(f" {_or_na(gpu['temperature_celsius'], lambda v: f'{v:.0f}°C'):>5}")
    line.append(f" {_or_na(gpu['power_watts'], lambda v: f'{v:.0f}W'):>5}  ")
    notes = [gpu["error"]] if gpu["error"] else _trouble(gpu)
    line.append(" ".join(gpu["tasks"]) or ("" if notes else _without_task(load)), style="dim")
    if notes:
        line.append(("  " if gpu["tasks"] else "") + ", ".join(notes), style=COLOR[validity] or "yellow")
    return line


def _trouble(gpu: Mapping[str, Any]) -> list[str]:
    """What else is wrong with a GPU that answers, in few words."""
    notes = [f"XID {gpu['xid']}"] if gpu.get("xid") is not None else []
    notes += [f"{gpu['ecc_uncorrected']} ECC errors"] if gpu.get("ecc_uncorrected") else []
    return notes + [reason.replace("_", " ") for reason in gpu.get("throttle") or () if reason in SLOWED]


def _without_task(load: float | None) -> str:
    if load is None:
        return ""
    return "idle" if load <= 0.05 else "in use, no task"


def _bar(load: float | None) -> tuple[str, str]:
    if load is None:
        return "·" * BAR_WIDTH, "dim"
    full = round(load * BAR_WIDTH)
    color = "red" if load > 0.95 else "green" if load > 0.3 else "blue"
    return "█" * full + "░" * (BAR_WIDTH - full), color


def _sparkline(history: Sequence[float | None], width: int) -> str:
    """The last seconds, one block each; a blank where nothing is known, so that it cannot be read as idle."""
    told = list(history)
    while told and told[-1] is None:  # the window of this very second is still on its way
        told.pop()
    return "".join(" " if v is None else BLOCKS[min(7, int(v * 8))] for v in told[-width:]).rjust(width)


def _memory(gpu: Mapping[str, Any]) -> str:
    used, total = gpu["memory_used_gib"], gpu["memory_total_gib"]
    if used is None or total is None:
        return "n/a"
    return f"{used:.1f}/{total:.0f}GiB"


def _or_na(value: float | None, show: Any) -> str:
    return "n/a" if value is None else show(value)


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
