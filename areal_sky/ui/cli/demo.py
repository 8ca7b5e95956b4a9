"""`areal-sky demo`: the whole loop on this machine in about a minute, told while it happens.

It is the product and nothing beside it: every step is a public command on examples/01-local-demo.yaml, echoed before
it runs in this process, and what it waits for it reads through the public Python API. The one thing that it does
by itself is the accident: it cuts the power of one node.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import click

from areal_sky.errors import ArealSkyError, Refused, StateError
from areal_sky.ui.cli.lines import echo_command, echo_line

NAME = "demo"
SPEC = "01-local-demo.yaml"
# (model, ranks, GPUs of each rank): together they fill the trainer's four GPUs.
TRAINED = (("tiny-base", 1, 2), ("tiny-moe", 2, 1))
# In the order of their submission, which is not the order of the queue.
ROLLOUTS = ("tiny-base", "tiny-base", "tiny-moe", "tiny-moe")
ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")
# Events that say nothing to a first-time reader; `areal-sky events` has them all.
TECHNICAL = ("ControllerStarted", "LaunchAccepted", "ReplicaProvisioned", "ScalingHeld", "TerminateIntended")


@click.command()
@click.option("--keep", is_flag=True, help="Leave the cluster up at the end.")
@click.option("--fast", is_flag=True, help="Shorter tasks, for a quick check.")
def demo(keep: bool, fast: bool) -> None:
    """The whole loop on this machine in about a minute.

    A Ray cluster comes up, tasks of two models queue by weight, a group grows because work waits, a node is killed
    and its work goes on, the group shrinks, the bill is printed, and everything is torn down. Ctrl-C tears down too.
    """
    story = Story(iterations=30 if fast else 50)
    with _signals_as_ctrl_c():
        try:
            story.tell()
            if not keep:
                story.bill_and_down()
        except BaseException as e:
            # Commands that can be interrupted halfway end with 130 by themselves.
            if isinstance(e, KeyboardInterrupt | click.Abort) or getattr(e, "code", None) == 130:
                click.echo("\ninterrupted: tearing everything down")
            story.tear_down()
            raise
    story.farewell(keep)


class Story:
    """The demo's steps in order; each leaves the next one what it needs."""

    def __init__(self, iterations: int):
        from areal_sky.data import data_dir
        from areal_sky.home import ClusterHome, home

        self._examples = data_dir("examples")
        self._home = ClusterHome(NAME)
        self._work = home() / "demo"
        program = self._examples / "rl/policy_gradient.py"
        self._rl = [sys.executable, str(program), "--dir", str(self._work), "--iterations", str(iterations)]
        self._started_s = time.monotonic()
        self._chapter = 0
        self._mine = False
        self._seen_seq = 0
        self._states: dict[str, str] = {}
        self._rewards_due_s = 0.0

    def tell(self) -> None:
        """Everything up to the quiet cluster that has done its work."""
        self.bring_up()
        tasks = self.submit_work()
        self.watch_it_grow()
        self.show_gpus()
        self.lose_a_node(tasks)
        self.finish()
        self.evaluate()
        self.watch_it_shrink()

    # ------------------------------------------------------------ the steps

    def bring_up(self) -> None:
        if self._home.exists() and self._home.state().down_s is None:
            raise Refused(f"a cluster `{NAME}` is up already: end it with `areal-sky down {NAME}`, then try again")
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir(mode=0o700, parents=True)
        self.chapter("A real Ray cluster: a head and two groups, all on this machine")
        self._mine = True
        self.shell("up", str(self._examples / SPEC))
        self._seen_seq = self._cluster().state().version

    def submit_work(self) -> dict[str, str]:
        """Task ids by name."""
        self.chapter("Work: two models learn one-digit sums; moe weighs 1.5, base 1.0")
        echo_command(f'RL="{_short(self._rl)}"')
        for model, ranks, gpus in TRAINED:
            gang = ("--group", "trainer", "--bundles", str(ranks))
            self.submit("train", model, f"train-{_family(model)}", *gang, gpus=gpus)
        for number, model in enumerate(ROLLOUTS, 1):
            self.submit("rollout", model, f"rollout-{number}", "--group", "rollout", gpus=2)
        self.shell("queue", "-c", NAME)
        return {str(t["name"]): str(t["task_id"]) for t in self._tasks()}

    def watch_it_grow(self) -> None:
        self.chapter("Work waits, so the rollout group grows; the heavier model goes first")
        self.until(lambda: len(self._replicas("rollout", ready=True)) > 1, 120, "the group to grow")
        self.until(lambda: not self._waiting("tiny-moe"), 60, "the heavier tasks to start")
        self.shell("why", "rollout", "-c", NAME)

    def show_gpus(self) -> None:
        self.chapter("The GPUs heat up: their load follows the tasks that run on them")
        self._rollout_in_progress("tiny-moe")
        warm_s = time.monotonic() + 1.5
        self.until(lambda: time.monotonic() > warm_s, 10, "the GPUs to heat up")
        self.shell("top", "--once", "-c", NAME)

    def lose_a_node(self, tasks: dict[str, str]) -> None:
        from areal_sky.adapters.processes import kill_marked, marked

        def goes_on() -> bool:
            now = self._task(task)
            return now["attempt"] > before and now["state"] in ("RUNNING", *ENDED) and "resumed" in self._log(task)

        name, victim = self._rollout_in_progress("tiny-moe")
        task = tasks[name]
        before = self._task(task)["attempt"]
        self.chapter(f"An accident, on purpose: {victim} loses power under {name}")
        killed = sum(kill_marked(mark) for mark in list(marked(f"{self._home.dir}::{victim}/")))
        click.echo(f"  SIGKILL to all {killed} processes of {victim}")
        self.until(goes_on, 120, f"{name} to go on from its checkpoint")
        self.shell("why", task, "-c", NAME)
        said = next(line for line in self._log(task).splitlines() if "resumed" in line)
        click.echo(f"  in its own words: {said}")

    def finish(self) -> None:
        self.chapter("The rest of the work")
        self.until(lambda: all(t["state"] in ENDED for t in self._tasks()), 180, "all tasks to end")
        if bad := [str(t["name"]) for t in self._tasks() if t["state"] != "SUCCEEDED"]:
            raise StateError(f"these tasks of the demo did not succeed: {', '.join(bad)}")

    def evaluate(self) -> None:
        self.chapter("Did they learn? Guessing gives 0.10")
        for model, _, _ in TRAINED:
            self.submit("eval", model, f"eval-{_family(model)}", gpus=1, steps=1)
        evals = [str(t["task_id"]) for t in self._tasks() if t["kind"] == "eval"]
        self.until(lambda: all(self._task(t)["state"] in ENDED for t in evals), 60, "the evaluations")
        for task in evals:
            self.shell("logs", task, "-c", NAME)

    def watch_it_shrink(self) -> None:
        self.chapter("Nothing waits and nothing runs, so the group shrinks to its minimum")
        self.until(lambda: len(self._replicas("rollout")) == 1, 60, "the group to shrink")
        self.shell("status", NAME)

    def bill_and_down(self) -> None:
        from areal_sky.adapters.processes import marked

        self.chapter("The bill, priced as if in a cloud; then everything goes")
        self.shell("cost", "-c", NAME)
        self.shell("down", NAME)
        if left := marked(f"{self._home.dir}::"):
            raise StateError(f"processes of the demo are left: {left}")

    def tear_down(self) -> None:
        """Whatever happened: end what we started, and nothing else."""
        from areal_sky.adapters.processes import kill_marked, marked

        if not self._mine or not self._home.exists():
            return
        with contextlib.suppress(ArealSkyError):
            self._cluster().down(drain_s=0, timeout_s=30)
        for mark in list(marked(f"{self._home.dir}::")):
            kill_marked(mark)

    def farewell(self, keep: bool) -> None:
        click.secho(f"\nDone in {self._elapsed_s():.0f} s.", bold=True)
        if keep:
            click.echo(f"The cluster stays up; `areal-sky down {NAME}` ends it.")
        else:
            click.echo(f"Its story can still be read: `areal-sky events {NAME}`, `areal-sky cost {NAME}`.")

    # ------------------------------------------------------------ telling

    def chapter(self, title: str) -> None:
        self._chapter += 1
        click.secho(f"\n{self._elapsed_s():3.0f} s  {self._chapter}. {title}", bold=True)

    def shell(self, *args: str, shown: str = "") -> None:
        """Runs a command of ours in this process, after showing how to type it."""
        from areal_sky.ui.cli.main import cli

        echo_command(shown or f"areal-sky {_short(args)}")
        cli.main(args=list(args), prog_name="areal-sky", standalone_mode=False)

    def submit(self, kind: str, model: str, name: str, *options: str, gpus: int, steps: int | None = None) -> None:
        ours = ["submit", "-c", NAME, "--name", name, "--kind", kind, "--model", model, *options, "--gpus", str(gpus)]
        theirs = [kind, "--model", model, *(["--iterations", str(steps)] if steps else [])]
        self.shell(*ours, "--", *self._rl, *theirs, shown=f"areal-sky {_short(ours)} -- $RL {_short(theirs)}")

    def until(self, reached: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Waits, telling meanwhile what happens to the cluster and to the tasks. Raises StateError when it is late."""
        give_up_s = time.monotonic() + timeout_s
        while not reached():
            self._tell_news()
            if time.monotonic() > give_up_s:
                raise StateError(f"the demo waited {timeout_s:.0f} s for {what}; see `areal-sky events {NAME}`")
            time.sleep(0.3)
        self._tell_news()

    def _tell_news(self) -> None:
        from areal_sky.core.story import sentence

        for record in self._cluster().events(self._seen_seq):
            self._seen_seq = record.seq
            if type(record.event).__name__ not in TECHNICAL:
                self._line(sentence(record.event))
        tasks = self._tasks()
        for task in tasks:
            before, now = self._states.get(task["task_id"]), task["state"]
            self._states[task["task_id"]] = now
            if before not in (None, now):
                told = {"RUNNING": f"runs on {task['where']}", "QUEUED": f"waits again: {task['reason']}"}
                if now != "PLACED":
                    self._line(f"{task['name']} {told.get(now, now.lower())}")
        learning = [t for t in tasks if t["kind"] == "train" and t["state"] == "RUNNING" and "reward" in t["metrics"]]
        if learning and time.monotonic() >= self._rewards_due_s:
            self._rewards_due_s = time.monotonic() + 2
            said = (f"{t['model']} {t['metrics']['reward']:.2f} at step {t['metrics']['step']:.0f}" for t in learning)
            self._line(f"reward: {', '.join(said)}")

    def _line(self, text: str) -> None:
        echo_line(text, lead=f"{self._elapsed_s():5.0f} s  ")

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    # ------------------------------------------------------------ looking

    def _cluster(self) -> Any:
        from areal_sky.cluster import Cluster

        return Cluster.attach(NAME)

    def _replicas(self, group: str, ready: bool = False) -> list[str]:
        replicas = self._cluster().state().replicas.values()
        return [r.name for r in replicas if r.group == group and (r.state == "READY" or not ready)]

    def _waiting(self, model: str) -> bool:
        return any(t["state"] in ("QUEUED", "PLACED") for t in self._tasks() if t["model"] == model)

    def _tasks(self) -> list[dict[str, Any]]:
        with self._home.gateway("read") as gateway:
            return sorted(gateway.tasks(), key=lambda t: t["number"])

    def _task(self, task_id: str) -> dict[str, Any]:
        with self._home.gateway("read") as gateway:
            return gateway.task(task_id)

    def _log(self, task_id: str) -> str:
        with self._home.gateway("read") as gateway:
            return str(gateway.logs(task_id)["text"])

    def _rollout_in_progress(self, model: str) -> tuple[str, str]:
        """(task name, replica) of a rollout that has already kept some of its work."""
        found: list[tuple[str, str]] = []

        def look() -> bool:
            found[:] = [
                (t["name"], t["places"][0]["replica"])
                for t in self._tasks()
                if t["kind"] == "rollout" and t["model"] == model and t["state"] == "RUNNING"
                if t["metrics"].get("step", 0) >= 3
            ]
            return bool(found)

        self.until(look, 60, f"a rollout of {model} to have done something")
        return found[-1]


def _family(model: str) -> str:
    return model.removeprefix("tiny-")


def _short(args: list[str] | tuple[str, ...]) -> str:
    """A command line as one would type it: folders of this session by their variables."""
    words = shlex.join(args)
    for folder, variable in ((Path.cwd(), "$PWD"), (Path.home(), "$HOME")):
        words = words.replace(f"{folder}{os.sep}", f"{variable}{os.sep}")
    return words


@contextlib.contextmanager
def _signals_as_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP tear down as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = {s: signal.signal(s, interrupt) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
