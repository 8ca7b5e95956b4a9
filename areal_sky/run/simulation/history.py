"""What a cluster has recorded, as a scenario: its tasks at the times when they came, its machines as they behaved.

Tasks come from the head's journal where it lies on this machine, else from what the controller kept of who held what
(then a task comes when it first got its place, since nobody knows how long it had waited). How long launches took, how
many failed and how often spot machines were lost is taken from the cluster's events.
"""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from areal_sky.core.events import (
    LaunchAccepted,
    LaunchFailed,
    LaunchIntended,
    Record,
    ReplicaGone,
    ReplicaLost,
    ReplicaProvisioned,
    fold,
)  # fmt: skip
from areal_sky.core.model import Bundle, LaunchPlan, LedgerLine
from areal_sky.core.tasklife import TaskRecord, apply
from areal_sky.core.taskmodel import TaskState
from areal_sky.core.usage import Hold
from areal_sky.errors import InvalidInput
from areal_sky.home import ClusterHome, past_clusters
from areal_sky.run.journal import Journal
from areal_sky.run.simulation.engine import Scenario
from areal_sky.run.simulation.result import Point, SimResult, TaskRow
from areal_sky.run.simulation.simtask import SimTask
from areal_sky.run.simulation.world import DAY_S, HOUR_S, World
from areal_sky.run.usage import read_usage

RECORDED = "as recorded"
POINTS = 200
_MARKETS = ("on_demand", "spot")


def find(name: str) -> ClusterHome:
    """The cluster of that name, the latest that went down if none is there now. Raises NotFound, InvalidInput."""
    cluster = ClusterHome(name)
    past = [c for c in past_clusters() if c.name == name]
    return past[-1] if not cluster.exists() and past else cluster


def recorded(cluster: ClusterHome, plan: LaunchPlan, seed: int) -> tuple[Scenario, SimResult]:
    """What is known of its past as a scenario, and what became of it in truth. Raises NotFound, StateError, and
    InvalidInput when no task of it is known to have run.
    """
    records = cluster.records()
    start_s, end_s = records[0].t_s, records[-1].t_s
    tasks = _from_journal(cluster, start_s) or _from_usage(read_usage(cluster).holds, start_s)
    if not tasks:
        raise InvalidInput(f"nothing is known of tasks that ran on {cluster.name!r}: there is nothing to replay")
    end_s = max(end_s, *(start_s + row.ended_s for _, row in tasks if row.ended_s is not None), start_s + 1.0)
    days = (end_s - start_s) / DAY_S
    scenario = Scenario(
        f"{cluster.name} replayed", tuple(t for t, _ in tasks), world=_world(records, end_s), days=days, seed=seed
    )
    state = fold(records)
    counts = [r.event for r in records]
    truth = SimResult(
        name=scenario.name, policy=RECORDED, seed=seed, days=days, tasks=tuple(row for _, row in tasks),
        points=_points(state.ledger, plan, [row for _, row in tasks], start_s, end_s), events=len(records),
        reclaims=sum(isinstance(e, ReplicaLost) for e in counts),
        launches=sum(isinstance(e, LaunchIntended) for e in counts),
        launch_failures=sum(isinstance(e, LaunchFailed) for e in counts),
    )  # fmt: skip
    return scenario, truth


# ---------------------------------------------------------------- tasks


def _from_journal(cluster: ClusterHome, start_s: float) -> list[tuple[SimTask, TaskRow]]:
    """A copy is read: the head may have the journal open."""
    files = [p for p in cluster.head_dir.glob("journal.db*") if p.suffix != ".lock"]
    if not files:
        return []
    with tempfile.TemporaryDirectory() as folder:
        for path in files:
            shutil.copy(path, folder)
        journal = Journal(Path(folder) / "journal.db")
        try:
            events = journal.read()
        finally:
            journal.close()
    lives: dict[str, TaskRecord] = {}
    for e in events:
        if e.task_id:
            lives[e.task_id] = apply(lives.get(e.task_id), e)
    found = (_of_record(r, start_s) for r in lives.values() if r.state is not TaskState.CANCELLED)
    return sorted((x for x in found if x is not None), key=lambda x: x[0].submitted_s)


def _of_record(r: TaskRecord, start_s: float) -> tuple[SimTask, TaskRow] | None:
    """A task that ran to its end (what it needs is known), with what became of it."""
    if r.ended_s is None or r.started_s is None:
        return None
    spec = r.spec
    ran_s = max(1.0, r.served_s - r.lost_s)
    deadline_s = None if spec.deadline_s is None else spec.deadline_s - start_s
    task = SimTask(
        r.task_id, max(0.0, r.submitted_s - start_s), ran_s, spec.bundle, spec.bundles, tenant=spec.model or "all",
        model=spec.model or "", model_type=spec.model_type or "", kind=spec.kind, priority=spec.priority,
        deadline_s=deadline_s, estimate_s=spec.estimate_s, preemptible=spec.may_be_preempted, group=spec.group,
        accelerators=spec.accelerators, like=spec.title,
    )  # fmt: skip
    first_s = r.first_started_s if r.first_started_s is not None else r.started_s
    row = TaskRow(
        r.task_id, task.tenant, task.model, spec.kind, task.gpus, task.submitted_s, first_s - start_s,
        r.ended_s - start_s, ran_s, deadline_s, r.lost_s, r.preempted, max(0, r.attempt - 1 - r.retries - r.preempted),
        r.state.value.lower(),
    )  # fmt: skip
    return task, row


def _from_usage(holds: Iterable[Hold], start_s: float) -> list[tuple[SimTask, TaskRow]]:
    by_task: dict[str, list[Hold]] = {}
    for h in holds:
        if h.until_s is not None:
            by_task.setdefault(h.task_id, []).append(h)
    found: list[tuple[SimTask, TaskRow]] = []
    for task_id, mine in by_task.items():
        last = max(h.attempt for h in mine)
        nodes = [h for h in mine if h.attempt == last]
        from_s, until_s = min(h.from_s for h in mine), max(h.until_s or 0.0 for h in nodes)
        held_s = sum({h.attempt: (h.until_s or 0.0) - h.from_s for h in mine}.values())
        bundle = Bundle(max(h.gpus for h in nodes), max(h.cpus for h in nodes), 0.0)
        task = SimTask(
            task_id, from_s - start_s, max(1.0, held_s), bundle, len(nodes), kind=nodes[0].kind, like=nodes[0].name
        )
        row = TaskRow(
            task_id, "all", "", task.kind, task.gpus, task.submitted_s, from_s - start_s, until_s - start_s,
            max(1.0, held_s), None, 0.0, 0, 0, "succeeded",
        )  # fmt: skip
        found.append((task, row))
    return sorted(found, key=lambda x: x[0].submitted_s)


# ---------------------------------------------------------------- machines


def _points(
    ledger: Sequence[LedgerLine], plan: LaunchPlan, rows: Sequence[TaskRow], start_s: float, end_s: float
) -> tuple[Point, ...]:
    """From what was paid for, and from tasks between first start and end. Prices that nobody knows are left out."""
    points: list[Point] = []
    for n in range(POINTS + 1):
        t_s = (end_s - start_s) * n / POINTS
        gpus, usd = dict.fromkeys(_MARKETS, 0.0), dict.fromkeys(_MARKETS, 0.0)
        for x in ledger:
            until_s = min(start_s + t_s, end_s if x.until_s is None else x.until_s)
            if x.from_s <= start_s + t_s:
                usd[x.market] += replace(x, until_s=until_s).usd(until_s) or 0.0
                if until_s == start_s + t_s and (group := plan.group(x.group)) is not None:
                    gpus[x.market] += group.shape.gpus * x.nodes
        running = [r for r in rows if r.started_s is not None and r.started_s <= t_s < (r.ended_s or 0.0)]
        waiting = [r for r in rows if r.submitted_s <= t_s and (r.started_s is None or r.started_s > t_s)]
        busy = min(sum(gpus.values()), sum(r.gpus for r in running))
        points.append(
            Point(
                t_s, {"busy": busy, "idle": sum(gpus.values()) - busy, "starting": 0.0, "draining": 0.0}, gpus,
                len(waiting), sum(r.gpus for r in waiting), sum(usd.values()), usd,
            )
        )  # fmt: skip
    return tuple(points)


def _world(records: Sequence[Record], end_s: float) -> World:
    """Launch times, failures and losses as they were."""
    accepted: dict[str, float] = {}
    market: dict[str, str] = {}
    took_s: list[float] = []
    launches = dict.fromkeys(_MARKETS, 0)
    failures = dict.fromkeys(_MARKETS, 0)
    spot_s, losses = 0.0, 0
    for r in records:
        e = r.event
        if isinstance(e, LaunchIntended):
            market[e.replica] = e.market
            launches[e.market] = launches.get(e.market, 0) + 1
        elif isinstance(e, LaunchAccepted):
            accepted[e.replica] = r.t_s
        elif isinstance(e, ReplicaProvisioned):
            took_s.append(r.t_s - accepted.get(e.replica, r.t_s))
        elif isinstance(e, LaunchFailed):
            failures[market.get(e.replica, "on_demand")] += 1
        elif isinstance(e, ReplicaLost):
            losses += market.get(e.replica) == "spot"
        if isinstance(e, ReplicaGone) and market.get(e.replica) == "spot":
            spot_s += r.t_s - accepted.pop(e.replica, r.t_s)
    spot_s += sum(end_s - t_s for name, t_s in accepted.items() if market.get(name) == "spot")
    world = World(
        failed_launch_frac={m: min(1.0, failures[m] / launches[m]) if launches[m] else 0.0 for m in _MARKETS},
        reclaims_per_hour=losses * HOUR_S / spot_s if spot_s > 0 else 0.0,
    )
    if not took_s:
        return world
    logs = [math.log(max(t, 0.1)) for t in took_s]
    sigma = statistics.stdev(logs) if len(logs) > 1 else 0.0
    return replace(world, launch_sigma=sigma, launch_median_s=statistics.median(took_s))
