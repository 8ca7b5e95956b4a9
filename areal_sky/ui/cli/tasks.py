"""`areal-sky submit`, `queue`, `cancel`, `logs`."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_sky.core.taskspec import KINDS
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

_cluster_option = click.option("-c", "--cluster", metavar="NAME", help="Which cluster; default: the only one up.")
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("what", nargs=-1, required=True, metavar="FILE.yaml | [--] COMMAND...")
@_cluster_option
@click.option("--kind", type=click.Choice(KINDS), help="What it is.  [default: train]")
@click.option("--model", metavar="NAME", help="Which model of the spec it works on; its weight counts.")
@click.option("--model-type", metavar="TYPE", help="The type to weigh it by, where the spec lists no models.")
@click.option("--bundles", type=int, metavar="N", help="Processes that start together.  [default: 1]")
@click.option("--gpus", type=float, metavar="G", help="GPUs per process, whole or below 1.  [default: 0]")
@click.option("--cpus", type=float, metavar="C", help="CPUs per process.  [default: 1]")
@click.option("--memory", metavar="SIZE", help="Memory per process, e.g. 8GiB.")
@click.option("--priority", type=float, metavar="P", help="0 to 100.  [default: 5]")
@click.option("--group", metavar="G", help="Run only on nodes of this group.")
@click.option("--accelerator", "accelerators", multiple=True, metavar="NAME", help="Only on these; repeatable.")
@click.option("--name", metavar="N", help="A name to show.")
@click.option("--env", "envs", multiple=True, metavar="K=V", help="An environment variable; repeatable.")
@click.option("--retries", "max_retries", type=int, metavar="N", help="Run again after own failures.")
@click.option("--deadline", metavar="TIME", help="When it should be done, e.g. 2h.")
@click.option("--workdir", metavar="DIR", help="Start in this directory of the node instead of a fresh one.")
@click.option("--follow", "-f", is_flag=True, help="Print its output until it ends; exit 1 unless it succeeds.")
@_json_option
def submit(what: Sequence[str], cluster: str | None, follow: bool, as_json: bool, **options: Any) -> None:
    """Queue a task: a shell command line (one quoted text, or words), or a YAML file of these options.

    \b
      areal-sky submit --gpus 2 --bundles 4 -- torchrun train.py --lr 1e-4
      areal-sky submit --kind eval 'python eval.py | tee out.txt'

    In the file, `run` is the command; options on the command line win. A SkyPilot task will do.
    """
    from areal_sky import home
    from areal_sky.task import Task

    fields: dict[str, Any] = {}
    if what[0].endswith((".yaml", ".yml")):
        if len(what) > 1:
            raise InvalidInput(f"{' '.join(what[1:])!r} after {what[0]}: options go before the file")
        fields = _task_file(Path(what[0]))
    else:
        fields["entrypoint"] = what[0] if len(what) == 1 else shlex.join(what)
    options["envs"] = _envs(options["envs"])
    given = {k: v for k, v in options.items() if v not in (None, (), {})}
    given["envs"] = {**fields.get("envs", {}), **given.get("envs", {})}
    spec = Task(**{**fields, **given}).spec()
    gateway = home.choose_cluster(cluster).gateway("submit")
    answer = gateway.submit(spec)
    task_id = answer["task_id"]
    if as_json:
        click.echo(json.dumps(answer))
    elif answer["status"] == "SCHEDULED":
        click.echo(f"{task_id} scheduled", err=follow)
    else:
        echo_line(f"queued: {answer['reason']}", lead=f"{task_id} ", err=follow)
    if follow:
        _follow(gateway, task_id, range(1), ("out", "err"))
        _exit_like(gateway.task(task_id))


@click.command()
@_cluster_option
@click.option("--all", "-a", "show_all", is_flag=True, help="All ended tasks too, not only the latest.")
@_json_option
def queue(cluster: str | None, show_all: bool, as_json: bool) -> None:
    """Show running and waiting tasks in order, and the latest that ended."""
    from areal_sky import home

    tasks = home.choose_cluster(cluster).gateway("read").tasks()
    if as_json:
        click.echo(json.dumps({"tasks": tasks}, indent=2))
        return
    ended = [t for t in tasks if t["state"] in ENDED]
    hidden = 0 if show_all else max(0, len(ended) - RECENT)
    shown = tasks[: len(tasks) - hidden]
    if not shown:
        click.echo("no tasks; `areal-sky submit` queues one")
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(queue_table(shown))
    for line in _reasons(shown, console.width):
        console.print(line, style="dim", markup=False)
    waiting = sum(t["state"] == "QUEUED" for t in tasks)
    more = f", {hidden} more that ended (--all)" if hidden else ""
    console.print(f"{len(tasks) - waiting - len(ended)} running, {waiting} waiting{more}", style="dim")


@click.command()
@click.argument("task_ids", nargs=-1, required=True, metavar="ID...")
@_cluster_option
@_json_option
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
@_cluster_option
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
        _follow(gateway, task_id, range(rank, rank + 1), streams, merge=only_err)
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
            t["task_id"], Text(t["name"]), t["kind"], Text(t["model"] or "-"), weighted,
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


def _short(seconds: float) -> str:
    from areal_sky.units import format_duration

    return format_duration(int(seconds), parts=2)


def _follow(
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


def _exit_like(task: Mapping[str, Any]) -> None:
    reason = f": {task['reason']}" if task["reason"] else ""
    click.echo(f"{task['task_id']} {task['state'].lower()}{reason}", err=True)
    sys.exit(0 if task["state"] == "SUCCEEDED" else 1)


def _envs(pairs: Sequence[str]) -> dict[str, str]:
    envs: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InvalidInput(f"--env {pair!r}: expected K=V")
        envs[key] = value
    return envs


def _task_file(path: Path) -> dict[str, Any]:
    """The fields of a task YAML: those of areal_sky.task.Task, with `run` for the command.

    Of a SkyPilot task, what describes machines is left out: those of a cluster that is up are there already.
    """
    import dataclasses
    import difflib

    import yaml

    from areal_sky.spec.skypilot_keys import TASK_KEYS, TASK_KEYS_READ
    from areal_sky.task import Task

    try:
        raw = yaml.safe_load(path.read_text())
    except OSError as e:
        raise InvalidInput(f"cannot read {path}: {e.strerror or e}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise InvalidInput(f"{path} is not YAML: {' '.join(str(e).split())}") from None
    if not isinstance(raw, dict):
        raise InvalidInput(f"{path}: expected keys and values, such as `run: python train.py`")
    known = {f.name for f in dataclasses.fields(Task)} - {"entrypoint"} | {"run"}
    machines = [k for k in raw if k in {*TASK_KEYS, *TASK_KEYS_READ} - known]
    if machines:
        machines += [k for k in ("workdir",) if k in raw]  # SkyPilot's copies a folder, ours is one on the node
        raw = {k: v for k, v in raw.items() if k not in machines}
        click.echo(f"{path}: left out, since the cluster's machines are up: {', '.join(machines)}", err=True)
    wrong: list[str] = []
    for key in raw:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, 1)
            wrong.append(f"{path}: unknown key {str(key)!r}" + (f", did you mean {close[0]!r}?" if close else ""))
    run = raw.pop("run", None)
    if not isinstance(run, str) or not run.strip():
        wrong.append(f"{path}: `run` is missing: the task's command")
    if not isinstance(raw.get("envs") or {}, dict):
        wrong.append(f"{path}: `envs` must be keys and values")
    if wrong:
        raise InvalidInput("\n".join(wrong))
    envs = {str(k): str(v) for k, v in (raw.pop("envs", None) or {}).items()}
    return {**raw, "entrypoint": run, "envs": envs}
