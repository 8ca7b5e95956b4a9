"""An asynchronous RL run on a cluster: one train task, rollout tasks, an eval task every so many versions.

Each is a task of its own in the queue; what they do together is the pipeline's business (pipeline.py). The run is
looked at every `LOOK_S`: so much later than in truth may its evals be submitted and its tasks end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from areal_sky.core.model import Bundle
from areal_sky.run.simulation.pipeline import Pipeline, PipelineFigures, Setup
from areal_sky.run.simulation.simtask import SimTask
from areal_sky.run.simulation.tasks import TaskWorld

LOOK_S = 15.0


@dataclass(frozen=True, slots=True)
class RlRunSpec:
    """`train` bundles and `rollouts` replicas of so many GPUs each. `eval_every` versions one eval task, 0: none."""

    name: str
    setup: Setup
    submitted_s: float = 0.0
    tenant: str = "all"
    model_type: str = ""
    priority: float = 5.0
    train_bundles: int = 1
    train_bundle_gpus: float = 8.0
    train_group: str | None = None
    rollouts: int = 3
    rollout_gpus: float = 8.0
    rollout_group: str | None = None
    eval_every: int = 0
    eval_s: float = 600.0
    eval_gpus: float = 1.0
    deadline_s: float | None = None
    checkpoint_s: float = 600.0


class RlRun:
    """See the module."""

    def __init__(self, spec: RlRunSpec, tasks: TaskWorld, draw: Random):
        self.spec = spec
        self._tasks = tasks
        self._pipeline = Pipeline(spec.setup, draw, tasks.start_s + spec.submitted_s)
        self._up: set[str] = set()
        self._look_s = math.inf
        self._evals = 0
        self.train = self._task("train", "train", spec.train_bundle_gpus, spec.train_bundles, spec.train_group)
        self.rollouts = [
            self._task(f"rollout-{i}", "rollout", spec.rollout_gpus, 1, spec.rollout_group)
            for i in range(spec.rollouts)
        ]
        tasks.expect((self.train, *self.rollouts))

    @property
    def task_ids(self) -> tuple[str, ...]:
        """Of the tasks that make it up; evals are apart."""
        return self.train.task_id, *(t.task_id for t in self.rollouts)

    @property
    def finished(self) -> bool:
        return self._pipeline.finished

    def figures(self) -> PipelineFigures:
        return self._pipeline.figures()

    def next_s(self) -> float:
        """When it wants to be looked at."""
        return self._look_s

    def started(self, task: SimTask, now_s: float) -> None:
        self._up.add(task.task_id)
        self._tell(task, now_s)
        self._look_s = min(self._look_s, now_s + LOOK_S)

    def stopped(self, task: SimTask, now_s: float) -> None:
        self._up.discard(task.task_id)
        if not self.finished:
            self._tell(task, now_s)

    def look(self, now_s: float) -> None:
        """What has come of it so far: evals to submit, or its end."""
        self._pipeline.advance(now_s)
        self._look_s = now_s + LOOK_S if self._up and not self.finished else math.inf
        s = self.spec
        while s.eval_every and self._pipeline.version >= (self._evals + 1) * s.eval_every:
            self._evals += 1
            since_s = now_s - self._tasks.start_s
            self._tasks.expect([self._task(f"eval-{self._evals}", "eval", s.eval_gpus, 1, None, since_s, s.eval_s)])
        if self.finished:
            for task_id in self.task_ids:
                self._tasks.finish(task_id, now_s)

    def _tell(self, task: SimTask, now_s: float) -> None:
        if task is self.train:
            self._pipeline.trainer(task.task_id in self._up, now_s)
        else:
            up = sum(1 for t in self.rollouts if t.task_id in self._up)
            self._pipeline.rollouts(up * self.spec.rollout_gpus, now_s)

    def _task(
        self,
        name: str,
        kind: str,
        gpus: float,
        bundles: int,
        group: str | None,
        at_s: float | None = None,
        duration_s: float | None = None,
    ) -> SimTask:
        s = self.spec
        return SimTask(
            f"{s.name}/{name}", s.submitted_s if at_s is None else at_s, duration_s, Bundle(gpus, 0.0, 0.0), bundles,
            tenant=s.tenant, model=s.setup.profile.name, model_type=s.model_type, kind=kind, priority=s.priority,
            deadline_s=s.deadline_s if kind == "train" else None, group=group, like=f"{s.name}/{kind}",
            checkpoint_s=s.checkpoint_s if kind == "train" else 0.0,
        )  # fmt: skip
