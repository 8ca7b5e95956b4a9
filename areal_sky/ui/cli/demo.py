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
from typing import Any

import click

from areal_sky.errors import ArealSkyError, Refused, StateError

NAME = "demo"
SPEC = "01-local-demo.yaml"
TRAINED = (("tiny-base", 1, 2), ("tiny-moe", 2, 1))  # model, ranks, GPUs of each: together the trainer's four
ROLLOUTS = ("tiny-base", "tiny-base", "tiny-moe", "tiny-moe")  # submitted in this order, which is not the queue's


@click.command()
@click.option("--keep", is_flag=True, help="Leave the cluster up at the end.")
@click.option("--fast", is_flag=True, help="Shorter tasks, for a quick check.")
def demo(keep: bool, fast: bool) -> None:
    """The whole loop on this machine in about a minute.

    A Ray cluster comes up, tasks of two models queue by weight, a group grows because work waits, a node is killed
    and its work goes on, the group shrinks, the bill is printed, and everything is torn down. Ctrl-C tears down too.
    """
    story = Story(fast=fast)
    with _ended_by_signals():
        try:
            story.tell()
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt | click.Abort):
                click.echo("\ninterrupted: tearing down")
            story.tear_down()
            raise
        if keep:
            click.echo(f"\nThe cluster stays up. `areal-sky down {NAME}` ends it.")
        else:
            story.bill_and_down()
    story.farewell()


class Story:
    """The demo's steps in order; each leaves the next one what it needs."""

    def __init__(self, fast: bool):
        from areal_sky.data import data_dir
        from areal_sky.home import ClusterHome, home

        self._examples = data_dir("examples")
        self._home = ClusterHome(NAME)
        self._work = home() / "demo"
        self._iterations = 24 if fast else 40
        self._started_s = time.monotonic()
        self._chapter = 0
        self._seen = 0
        self._told: dict[str, str] = {}
        self._mine = False

    def tell(self) -> None:
        """Everything up to the quiet cluster that has done its work."""
        self.bring_up()
        tasks = self.submit_work()
        self.watch_it_grow()
        self.show_gpus()
        self.lose_a_node(tasks)
        self.finish(tasks)
        self.evaluate()
        self.watch_it_shrink()

    # ------------------------------------------------------------ the steps

    def bring_up(self) -> None:
        if self._home.exists() and self._home.state().down_s is None:
            raise Refused(f"a cluster `{NAME}` is up already: end it with `areal-sky down {NAME}`, then try again")
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir(mode=0o700, parents=True)
        self.chapter("A real Ray cluster: a head and two groups, as processes on this machine")
        self._mine = True
        self.shell("up", self._spec_path())
        self._seen = self._last_seq()

    def submit_work(self) -> dict[str, str]:
        """Task ids by name."""
        self.chapter("Two models to train, four rollouts; mixture-of-experts weighs 1.5, base 1.0")
        for model, ranks, gpus in TRAINED:
            self.submit("train", model, f"train-{model}", "trainer", ranks, gpus, self._iterations)
        for number, model in enumerate(ROLLOUTS, 1):
            self.submit("rollout", model, f"rollout-{number}", "rollout", 1, 2, self._iterations)
        self.shell("queue", "-c", NAME)
        return {str(t["name"]): str(t["task_id"]) for t in self._tasks()}

    def watch_it_grow(self) -> None:
        self.chapter("Work waits, so the rollout group grows; the heavier model goes first")
        self.until(lambda: len(self._ready("rollout")) >= 3, "the group to grow", 60)
        self.until(lambda: sum(t["state"] == "RUNNING" for t in self._tasks()) >= 5, "the tasks to start", 30)
        self.shell("why", "rollout", "-c", NAME)

    def show_gpus(self) -> None:
        self.chapter("The GPUs heat up: their load follows the tasks that run on them")
        self.until(lambda: False, "", 2)
        self.shell("top", "--once", "-c", NAME)

    def lose_a_node(self, tasks: dict[str, str]) -> None:
        from areal_sky.adapters.processes import kill_marked, marked

        victim, name = self._a_rollout_of("tiny-moe")
        self.chapter(f"An accident, on purpose: the power of {victim} is cut while it runs {name}")
        prefix = f"{self._home.dir}::{victim}/"
        count = sum(kill_marked(mark) for mark in list(marked(prefix)))
        click.echo(f"  SIGKILL to all {count} processes of {victim}")
        task = tasks[name]
        self.until(lambda: self._task(task)["state"] != "RUNNING", "the loss to be noticed", 30)
        self.until(
            lambda: self._task(task)["state"] == "RUNNING" and "resumed" in self._log(task),
            f"{name} to go on from its checkpoint", 60,
        )  # fmt: skip
        self.shell("why", task, "-c", NAME)
        click.echo(f"  its own words: {_line_with(self._log(task), 'resumed')}")

    def finish(self, tasks: dict[str, str]) -> None:
        self.chapter("The rest of the work")
        self.until(lambda: all(t["state"] in ENDED for t in self._tasks()), "all tasks to end", 120)
        self.shell("queue", "--all", "-c", NAME)
        if bad := [t["name"] for t in self._tasks() if t["state"] != "SUCCEEDED"]:
            raise StateError(f"these tasks did not succeed: {', '.join(bad)}")

    def evaluate(self) -> None:
        self.chapter("Did they learn? Chance is 0.10")
        for model, _, _ in TRAINED:
            self.submit("eval", model, f"eval-{model}", None, 1, 1, 1)
        evals = [t["task_id"] for t in self._tasks() if t["name"].startswith("eval-")]
        self.until(lambda: all(self._task(t)["state"] in ENDED for t in evals), "the evaluations", 30)
        for task in evals:
            self.shell("logs", task, "-c", NAME)

    def watch_it_shrink(self) -> None:
        self.chapter("Nothing waits, nothing runs: the group shrinks to its minimum")
        self.until(lambda: len(self._replicas("rollout")) == 1, "the group to shrink", 60)

    def bill_and_down(self) -> None:
        self.chapter("The bill, priced as if these machines were in a cloud; then everything goes")
        self.shell("cost", "-c", NAME)
        self.shell("down", NAME, "--yes")
        if left := self._pids():
            raise StateError(f"processes of the demo are left: {left}")
        click.echo("  looked for processes of any node by pid: none is left")

    def tear_down(self) -> None:
        """Whatever happened: end what we started. Does nothing to a cluster that was there before."""
        from areal_sky.adapters.processes import kill_marked, marked
        from areal_sky.cluster import Cluster

        if not self._mine or not self._home.exists():
            return
        with contextlib.suppress(ArealSkyError):
            Cluster(self._home).down(drain_s=0, timeout_s=30)
        for mark in list(marked(f"{self._home.dir}::")):
            kill_marked(mark)

    def farewell(self) -> None:
        click.secho(f"\nDone in {self._elapsed():.0f} s.", bold=True)
        click.echo(f"Its story stays readable: `areal-sky events {NAME}`, `areal-sky cost -c {NAME}`.")

    # ------------------------------------------------------------ telling

    def chapter(self, title: str) -> None:
        self._chapter += 1
        click.secho(f"\n[{self._elapsed():3.0f} s] {self._chapter}. {title}", bold=True)

    def shell(self, *args: str) -> None:
        """Runs a command of ours in this process, after showing how to type it."""
        from areal_sky.ui.cli.main import cli

        click.secho(f"$ {shlex.join(['areal-sky', *args])}", fg="cyan")
        cli.main(args=list(args), prog_name="areal-sky", standalone_mode=False)
        sys.stdout.flush()

    def submit(
        self, kind: str, model: str, name: str, group: str | None, ranks: int, gpus: int, iterations: int
    ) -> None:
        program = [sys.executable, str(self._examples / "rl/policy_gradient.py"), kind]
        program += ["--model", model, "--dir", str(self._work), "--iterations", str(iterations), "--pace", "0.3"]
        where = ["--group", group] if group else []
        size = ["--bundles", str(ranks), "--gpus", str(gpus)]
        args = ["--kind", kind, "--model", model, "--name", name, *where, *size]
        self.shell("submit", "-c", NAME, *args, "--", shlex.join(program))

    def until(self, reached: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Waits, telling every event of the cluster and each step of the tasks. `what` empty: only waits."""
        give_up_s = time.monotonic() + timeout_s
        while not reached():
            self.tell_news()
            if time.monotonic() > give_up_s:
                if not what:
                    return
                raise StateError(f"the demo waited {timeout_s:.0f} s for {what}; see `areal-sky events {NAME}`")
            time.sleep(0.3)
        self.tell_news()

    def tell_news(self) -> None:
        pass

    # ------------------------------------------------------------ looking
