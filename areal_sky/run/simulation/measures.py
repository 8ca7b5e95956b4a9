"""What is written down of a simulation: points over time, and at the end its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_sky.core.model import HEAD_GROUP, MachineState
from areal_sky.run.simulation.cloud import VirtualCloud
from areal_sky.run.simulation.head import VirtualHead
from areal_sky.run.simulation.result import Point, SimResult
from areal_sky.run.simulation.rlrun import RlRun
from areal_sky.run.simulation.tasks import TaskWorld
from areal_sky.run.simulation.world import DAY_S

if TYPE_CHECKING:
    from areal_sky.run.simulation.engine import Scenario, Simulation


class Measures:
    """`every_s` seconds between points."""

    def __init__(self, start_s: float, cloud: VirtualCloud, head: VirtualHead, tasks: TaskWorld, every_s: float):
        self._start_s, self._every_s = start_s, every_s
        self._cloud, self._head, self._tasks = cloud, head, tasks
        self._points: list[Point] = []
        self.next_s = start_s

    def point(self, now_s: float) -> None:
        self.next_s = now_s + self._every_s
        gpus = self._head.gpus()
        there = [m for m in self._cloud.all() if m.counted and m.plan.name != HEAD_GROUP]
        by_market = {"on_demand": 0.0, "spot": 0.0}
        for m in there:
            if m.state is not MachineState.STARTING:
                by_market[m.market] += m.plan.shape.gpus * m.plan.nodes_per_replica
        known = sum(gpus.values())
        gpus["starting"] = max(0.0, sum(m.plan.shape.gpus * m.plan.nodes_per_replica for m in there) - known)
        waiting, waiting_gpus = self._tasks.waiting_gpus()
        usd = self._cloud.bill()
        self._points.append(
            Point(
                t_s=now_s - self._start_s, gpus=gpus, gpus_by_market=by_market, waiting_tasks=waiting,
                waiting_gpus=waiting_gpus, cost_usd=sum(usd.values()), cost_by_market=usd,
            )
        )  # fmt: skip

    def result(self, scenario: Scenario, policy: str, simulation: Simulation) -> SimResult:
        """At the end."""
        self.point(simulation.now_s)
        cloud, tasks = self._cloud, self._tasks
        metrics = {
            "controller_events": float(len(simulation.records)), "ticks": float(simulation.ticks),
            "unpriced_node_hours": cloud.unpriced_hours, **rl_metrics(simulation.runs),
        }  # fmt: skip
        trajectories = sum(r.figures().trajectories for r in simulation.runs)
        return SimResult(
            name=scenario.name, policy=policy, seed=scenario.seed, days=(simulation.now_s - self._start_s) / DAY_S,
            tasks=tasks.rows(), points=tuple(self._points), reclaims=cloud.reclaims, launches=cloud.launches,
            events=tasks.events + len(simulation.records) + trajectories, launch_failures=cloud.launch_failures,
            metrics=metrics,
        )  # fmt: skip


def rl_metrics(runs: list[RlRun]) -> dict[str, float]:
    """Of all RL runs together: tokens trained on per second of their time, staleness by trajectory, idle shares."""
    figures = [f for r in runs if (f := r.figures()).seconds > 0]
    if not figures:
        return {}
    seconds = sum(f.seconds for f in figures)
    versions = sum(f.versions for f in figures)

    def mean(values: list[float]) -> float:
        return sum(v * f.seconds for v, f in zip(values, figures, strict=True)) / seconds

    return {
        "tokens": sum(f.tokens for f in figures),
        "tokens_per_s": sum(f.tokens for f in figures) / seconds,
        "lost_tokens": sum(f.lost_tokens for f in figures),
        "staleness": sum(f.staleness * f.versions for f in figures) / versions if versions else 0.0,
        "rollout_idle_frac": mean([f.rollout_idle_frac for f in figures]),
        "trainer_idle_frac": mean([f.trainer_idle_frac for f in figures]),
        "versions": float(versions),
    }
