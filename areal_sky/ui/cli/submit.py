"""`areal-sky submit`."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_sky.errors import InvalidInput
from areal_sky.spec.tasks import IF_LATE, KINDS
from areal_sky.ui.cli.lines import echo_line
from areal_sky.ui.cli.tasks import cluster_option, exit_like, follow_output, json_option, pairs

if TYPE_CHECKING:
    from areal_sky.task import Task


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("what", nargs=-1, required=True, metavar="FILE.yaml | [--] COMMAND...")
@cluster_option
@click.option("--kind", type=click.Choice(KINDS), help="What it is.  [default: train]")
@click.option("--model", metavar="NAME", help="Which model of the spec it works on; its weight counts.")
@click.option("--model-type", metavar="TYPE", help="The type to weigh it by, where the spec lists no models.")
@click.option("--bundles", type=int, metavar="N", help="Processes that start together.  [default: 1]")
@click.option("--min-bundles", type=int, metavar="N", help="With how few it may run where there is no room for all.")
@click.option("--gpus", type=float, metavar="G", help="GPUs per process, whole or below 1.  [default: 0]")
@click.option("--cpus", type=float, metavar="C", help="CPUs per process.  [default: 1]")
@click.option("--memory", metavar="SIZE", help="Memory per process, e.g. 8GiB.")
@click.option("--priority", type=float, metavar="P", help="0 to 100.  [default: 5]")
@click.option("--preemptible/--no-preemptible", default=None, help="Others may take its place.  [default: by kind]")
@click.option("--group", metavar="G", help="Run only on nodes of this group.")
@click.option("--accelerator", "accelerators", multiple=True, metavar="NAME", help="Only on these; repeatable.")
@click.option("--backends", metavar="B", help="Of a driver: what it takes by itself, such as sglang:d4t2+fsdp:d8.")
@click.option("--name", metavar="N", help="A name to show, and for others to come after.")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="To find it again (`queue --label`); repeatable.")
@click.option("--env", "envs", multiple=True, metavar="K=V", help="An environment variable; repeatable.")
@click.option("--after", multiple=True, metavar="ID|NAME", help="Wait until this has succeeded; repeatable.")
@click.option("--array", type=int, metavar="N", help="N copies, each with its AREAL_SKY_ARRAY_INDEX from 0.")
@click.option("--retries", "max_retries", type=int, metavar="N", help="Run again after own failures.")
@click.option("--backoff", metavar="TIME", help="Wait before the first retry, doubled each time.  [default: 5s]")
@click.option("--timeout", metavar="TIME", help="End a run that takes longer.")
@click.option("--total-timeout", metavar="TIME", help="Give up this long after the first start.")
@click.option("--estimate", metavar="TIME", help="How long a run will take, as far as you know.")
@click.option("--deadline", metavar="TIME", help="When it should be done, e.g. 2h.")
@click.option("--if-late", type=click.Choice(IF_LATE), help="What if the deadline cannot be met.  [default: warn]")
@click.option("--submit-key", metavar="KEY", help="Submitting twice with one key is submitting once.")
@click.option("--workdir", metavar="DIR", help="Start in this directory of the node instead of a fresh one.")
@click.option("--follow", "-f", is_flag=True, help="Print its output until it ends; exit 1 unless it succeeds.")
@json_option
def submit(what: Sequence[str], cluster: str | None, follow: bool, as_json: bool, **options: Any) -> None:
    """Queue a task: a shell command line (one quoted text, or words), or a YAML file of tasks.

    \b
      areal-sky submit --gpus 2 --bundles 4 -- torchrun train.py --lr 1e-4
      areal-sky submit --kind eval 'python eval.py | tee out.txt'

    In the file, `run` is the command and keys are these options; several tasks are a list under `tasks`. Options on
    the command line win. A SkyPilot task will do.
    """
    from areal_sky import home

    options["envs"], options["labels"] = pairs(options["envs"], "--env"), pairs(options["labels"], "--label")
    given = {k: v for k, v in options.items() if v not in (None, (), {})}
    tasks = _tasks(what, given)
    if follow and (len(tasks) > 1 or tasks[0].array is not None):
        raise InvalidInput("--follow: shows one task, and these are several")
    specs = [task.spec() for task in tasks]
    gateway = home.choose_cluster(cluster).gateway("submit")
    if len(specs) == 1:
        answer = gateway.submit(specs[0])
        answers, warnings = [answer], answer["warnings"]
    else:
        answer = gateway.submit_many(specs)
        answers, warnings = answer["tasks"], answer["warnings"]
    for text in warnings:
        click.echo(f"warning: {text}", err=True)
    if as_json:
        click.echo(json.dumps(answer))
    for a in () if as_json else answers:
        lead = f"{a.get('task_ids') or a['task_id']} "
        if a["status"] == "SCHEDULED":
            click.echo(f"{lead}scheduled", err=follow)
        else:
            echo_line(f"queued: {a['reason']}", lead=lead, err=follow)
    if follow:
        task_id = answers[0]["task_id"]
        follow_output(gateway, task_id, range(1), ("out", "err"))
        exit_like(gateway.task(task_id))


def _tasks(what: Sequence[str], given: Mapping[str, Any]) -> list[Task]:
    """The tasks of the command line. Raises SpecError, InvalidInput."""
    from areal_sky.task import Task

    if not what[0].endswith((".yaml", ".yml")):
        return [Task(**{"entrypoint": what[0] if len(what) == 1 else shlex.join(what), **given})]
    if len(what) > 1:
        raise InvalidInput(f"{' '.join(what[1:])!r} after {what[0]}: options go before the file")
    from areal_sky.spec.tasks import load_tasks
    from areal_sky.specfile import read_text

    path = Path(what[0])
    tasks: list[Task] = []
    for found in load_tasks(read_text(path), str(path), time.time()):
        if found.left_out:
            machines = ", ".join(found.left_out)
            click.echo(f"{path}: left out, since the cluster's machines are up: {machines}", err=True)
        both = {**found.fields, **given}
        for key in ("envs", "labels"):
            both[key] = {**found.fields.get(key, {}), **given.get(key, {})}
        tasks.append(Task(**both))
    return tasks
