"""A cluster without machines for tests of the task service: fake Ray, fake clock, a real journal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_sky.adapters.fake_ray import FakeRayCluster
from areal_sky.adapters.fakes import FakeClock
from areal_sky.core.model import Bundle, NodeShape
from areal_sky.core.nodeenv import GroupShape, HeadEnv
from areal_sky.core.taskmodel import TaskSpec
from areal_sky.run.journal import Journal
from areal_sky.run.tasks import TaskService

GPU4 = NodeShape(gpus=4, cpus=16, memory_gib=64, accelerator="H100")


class World:
    """A cluster, a clock, a journal on disk, and a service that can die and come back."""

    def __init__(self, folder: Path, nodes: int = 2, journal: Callable[[Path], Journal] = Journal, **ray: Any):
        self.clock = FakeClock()
        self.ray = FakeRayCluster(**ray)
        self.nodes = [self.ray.add_node("w", f"c-w-{i}", GPU4) for i in range(nodes)]
        self.env = HeadEnv(
            "c", "c-head-0", str(folder), groups=(GroupShape("w", GPU4, 1, 1, 4),),
            weights=(("moe", 1.5), ("base", 1.0)), models=(("m", "moe"), ("b", "base")),
        )  # fmt: skip
        self.make_journal = journal
        self.service: TaskService = None  # type: ignore[assignment]
        self.journal: Journal = None  # type: ignore[assignment]
        self.start()

    def start(self) -> None:
        """A new process."""
        if self.journal is not None:
            self.journal.close()
        self.journal = self.make_journal(Path(self.env.state_dir) / "journal.db")
        self.service = TaskService(self.ray.connection(), self.journal, self.clock, self.env, jitter=lambda: 1.0)

    def tick(self, times: int = 1, seconds: float = 0.1) -> None:
        for _ in range(times):
            self.service.tick(self.clock.advance(seconds))

    def submit(self, gpus: float = 1, bundles: int = 1, **more: Any) -> str:
        return self.service.submit(self.spec(gpus, bundles, **more))["task_id"]

    def spec(self, gpus: float = 1, bundles: int = 1, **more: Any) -> TaskSpec:
        defaults = {"kind": "train", "command": "x", "backoff_s": 0.0}
        return TaskSpec(**{**defaults, **more}, bundles=bundles, bundle=Bundle(gpus, 1))

    def state(self, task_id: str) -> str:
        return self.service.get(task_id)["state"]

    def finish(self, task_id: str, code: int = 0) -> None:
        task = self.service.get(task_id)
        for rank in range(task["bundles"]):
            self.ray.finish(f"{task_id}.{task['attempt']}", rank, code)

    def story(self, task_id: str) -> str:
        return "\n".join(line["text"] for line in self.service.story(task_id))
