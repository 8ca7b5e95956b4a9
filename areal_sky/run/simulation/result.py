"""What a simulated run leaves: one row per task, points over time, totals. Frozen, and JSON as it stands.

Times are seconds since the start of the run; money is US dollars. `None` is "not known" or "never happened".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

STATES = ("busy", "idle", "starting", "draining")  # the keys of Point.gpus


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task. `ideal_s`: how long it takes alone, started at once; `lost_work_s`: work done twice, in run seconds.

    `preemptions` are ours, `reclaims` the cloud's (and broken nodes). `outcome`: "succeeded", "failed", or
    "unfinished" when the run ended first.
    """

    task_id: str
    tenant: str
    model: str
    kind: str
    gpus: float
    submitted_s: float
    started_s: float | None
    ended_s: float | None
    ideal_s: float
    deadline_s: float | None
    lost_work_s: float
    preemptions: int
    reclaims: int
    outcome: str


@dataclass(frozen=True, slots=True)
class Point:
    """The world at one moment: GPUs by state (`STATES`) and by market ("spot", "on_demand"), dollars so far."""

    t_s: float
    gpus: Mapping[str, float]
    gpus_by_market: Mapping[str, float]
    waiting_tasks: int
    waiting_gpus: float
    cost_usd: float
    cost_by_market: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SimResult:
    """A whole run. `events`: what happened in the virtual world; `metrics`: e.g. tokens_per_s, staleness, idle_frac."""

    name: str
    policy: str
    seed: int
    days: float
    tasks: tuple[TaskRow, ...]
    points: tuple[Point, ...]
    events: int
    reclaims: int
    launches: int
    launch_failures: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    def to_json(self) -> str:
        """One line; the same run gives the same bytes."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
