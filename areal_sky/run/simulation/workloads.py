"""Work for a simulation: from a public trace, from a YAML of synthetic runs and tasks, or made up for a spec.

Synthetic arrivals are Poisson processes (`every`: mean time between), running times log-normal (`median`, `sigma`): the
shape that traces of GPU clusters show (Philly, USENIX ATC'19: most tasks short, a few very long). No public trace of RL
tasks is known; what is synthetic says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TypeVar

from areal_sky.adapters import traces
from areal_sky.core.capacity import replicas_for
from areal_sky.core.model import Bundle, GangDemand, GroupPlan, LaunchPlan
from areal_sky.errors import InvalidInput
from areal_sky.run.simulation.pipeline import PROFILES, Setup
from areal_sky.run.simulation.rlrun import RlRunSpec
from areal_sky.run.simulation.simtask import SimTask
from areal_sky.run.simulation.world import DAY_S, SpotTrace, lots
from areal_sky.spec.cluster import ClusterSpec
from areal_sky.spec.fields import Fields
from areal_sky.spec.marks import Notes, parse
from areal_sky.specfile import read_text

T = TypeVar("T")
YEAR_S = 365 * DAY_S


@dataclass(frozen=True, slots=True)
class Workload:
    """`days`: how long work arrives, where the file says it."""

    name: str
    tasks: tuple[SimTask, ...] = ()
    runs: tuple[RlRunSpec, ...] = ()
    days: float | None = None


def read_workload(path: Path, plan: LaunchPlan, days: float | None, seed: int) -> Workload:
    """The work in a file, of the first `days` days. Raises InvalidInput, SpecError."""
    if path.suffix != ".csv":
        return _synthetic(path, plan, days or 1.0, seed)
    columns = traces.columns_of(path)
    if {"timestamp", "duration", "num_gpus"} <= set(columns):
        tasks = tuple(_philly(path, plan))
    elif {"num_gpu", "creation_time", "deletion_time"} <= set(columns):
        tasks = tuple(_alibaba(path))
    else:
        raise InvalidInput(
            f"{path}:1: no known trace: expected the columns of Philly (timestamp, duration, num_gpus) or of Alibaba "
            "gpu-v2023 (num_gpu, gpu_milli, creation_time, deletion_time), or a .yaml with `runs` and `tasks`"
        )
    span = max(t.submitted_s for t in tasks) / DAY_S
    kept = tasks if days is None else tuple(t for t in tasks if t.submitted_s < days * DAY_S)
    return Workload(path.stem, _fitting(path.stem, kept, plan), days=min(days or span, span) or 1.0)


def made_up(spec: ClusterSpec, plan: LaunchPlan, days: float, seed: int) -> Workload:
    """RL runs of the models of the spec (of a 7b where it has none), one a model every twelve hours. Synthetic."""
    models = [(m.name, m.model_type) for m in spec.models] or [("7b", "")]
    draw = lots(seed, "workload")
    runs: list[RlRunSpec] = []
    train, rollout = _usual_gpus(plan)
    for name, model_type in models:
        setup = Setup(PROFILES[profile_of(name)], steps=40, train_gpus=train, batch=256)
        for at_s in _arrivals(12 * 3600.0, 0.0, days, draw):
            at = RlRunSpec(
                f"{name}-{len(runs) + 1}", setup, at_s, tenant=name, model_type=model_type, rollouts=2, eval_every=10,
                train_bundle_gpus=train, rollout_gpus=rollout,
            )  # fmt: skip
            runs.append(_sized(at, plan))
    return Workload("synthetic", runs=tuple(runs), days=days)


def _usual_gpus(plan: LaunchPlan) -> tuple[float, float]:
    """GPUs of a trainer and of each of its two rollout replicas: eight, less where all of them would not fit at once.

    Raises InvalidInput: there are too few GPUs.
    """
    all_gpus = sum(g.shape.gpus * g.nodes_per_replica * g.max_replicas for g in plan.groups)
    if all_gpus < 3:
        raise InvalidInput(f"an RL run takes three GPUs, this spec has {all_gpus:g} at its largest: give a --workload")
    share = 8.0 if all_gpus >= 24 else float(max(1, all_gpus // 4))
    train, rollout = (min(share, g.shape.gpus) for g in _groups(plan))
    return train, rollout


def _groups(plan: LaunchPlan) -> tuple[GroupPlan, GroupPlan]:
    """Where trainers and rollouts go: the groups whose names speak of them, else the one with the largest nodes."""
    largest = max(plan.groups, key=lambda g: g.shape.gpus)
    train, rollout = (next((g for g in plan.groups if kind in g.name), largest) for kind in ("train", "rollout"))
    return train, rollout


def read_spot_traces(paths: Iterable[Path]) -> tuple[SpotTrace, ...]:
    """One zone per file. Raises InvalidInput."""
    return tuple(SpotTrace(path.stem, *traces.read_spot(path)) for path in paths)


def profile_of(model: str) -> str:
    """The profile nearest in size to a model by the number in its name (`qwen2.5-7b`); 7b without one."""
    sizes = {name: float(name[:-1]) for name in PROFILES}
    found = re.findall(r"(\d+(?:\.\d+)?)b\b", model.lower())
    if not found:
        return "7b"
    size = float(found[0])
    return min(sizes, key=lambda name: abs(math.log(sizes[name] / size)))


# ---------------------------------------------------------------- traces


def _philly(path: Path, plan: LaunchPlan) -> Iterator[SimTask]:
    rows = traces.read_philly(path)
    start_s = rows[0].submitted_s
    for n, row in enumerate(rows, 1):
        bundles, gpus = gang_of(row.gpus, plan)
        yield SimTask(
            f"t{n}", row.submitted_s - start_s, max(1.0, row.duration_s), Bundle(gpus, 0.0, 0.0), bundles, path.stem,
            preemptible=True,
        )  # fmt: skip


def _alibaba(path: Path) -> Iterator[SimTask]:
    """Pods that ran and ended: from creation to deletion, less the time until they were scheduled."""
    pods = [p for p in traces.read_alibaba_pods(path) if p.created_s is not None and p.deleted_s is not None]
    pods.sort(key=lambda p: (p.created_s or 0.0, p.name))
    start_s = pods[0].created_s or 0.0 if pods else 0.0
    for p in pods:
        since_s = p.created_s if p.scheduled_s is None else p.scheduled_s
        ran_s = (p.deleted_s or 0.0) - (since_s or 0.0)
        if ran_s > 0:
            ranks = max(1, p.gpus)
            bundle = Bundle(p.gpu_request if p.gpus <= 1 else 1.0, p.cpus / ranks, p.memory_gib / ranks)
            yield SimTask(p.name, (p.created_s or 0.0) - start_s, ran_s, bundle, ranks, kind="eval", preemptible=True)


def gang_of(gpus: int, plan: LaunchPlan) -> tuple[int, float]:
    """(bundles, GPUs of each) of a task that asks for so many: whole nodes where it fills them, else one bundle, else
    single GPUs.
    """
    node = int(max((g.shape.gpus for g in plan.groups), default=0))
    if gpus <= node:
        return 1, float(gpus)
    return (gpus // node, float(node)) if node and gpus % node == 0 else (gpus, 1.0)


def _fitting(name: str, tasks: tuple[SimTask, ...], plan: LaunchPlan) -> tuple[SimTask, ...]:
    """Raises InvalidInput when a task could never run: it would wait for ever."""
    misfits = [t for t in tasks if not any(_fits(t, g) for g in plan.groups)]
    if misfits:
        t = max(misfits, key=lambda t: t.gpus)
        groups = ", ".join(
            f"{g.name} (at most {g.max_replicas * g.nodes_per_replica} nodes of {g.shape.gpus:g} GPUs)"
            for g in plan.groups
        )
        raise InvalidInput(
            f"{name}: {len(misfits)} of {len(tasks)} tasks could never run on {groups}; the largest asks for "
            f"{t.bundles} x {t.bundle.gpus:g} GPUs. Raise max_replicas, or take larger machines"
        )
    if not tasks:
        raise InvalidInput(f"{name}: no task arrives in the time that is simulated; raise --days")
    return tasks


def _fits(t: SimTask, g: GroupPlan) -> bool:
    return replicas_for(GangDemand(t.task_id, t.group, t.bundles, t.bundle, t.accelerators, 0.0, 0.0), g) is not None


# ---------------------------------------------------------------- synthetic


def _synthetic(path: Path, plan: LaunchPlan, days: float, seed: int) -> Workload:
    notes = Notes(str(path))
    top = Fields(parse(read_text(path), notes), "", notes)
    tasks: list[SimTask] = []
    runs: list[RlRunSpec] = []
    for where, node in top.items("runs", "a list of RL runs"):
        runs += _runs(Fields(node, where, notes), path.parent, plan, days, seed, len(runs))
    for where, node in top.items("tasks", "a list of tasks"):
        tasks += _tasks(Fields(node, where, notes), days, seed, len(tasks))
    if top.is_map and not top.map.entries:
        notes.add(top.at, "there is no work in it, expected `runs` or `tasks`")
    top.finish()
    notes.raise_if_any()
    fitting = _fitting(path.stem, tuple(tasks), plan) if tasks else ()
    return Workload(path.stem, fitting, tuple(_sized(r, plan) for r in runs), days)


def _runs(f: Fields, folder: Path, plan: LaunchPlan, days: float, seed: int, before: int) -> list[RlRunSpec]:
    name = f.text("name", "a name") or f"run-{before + 1}"
    profile = f.choice("model", tuple(PROFILES)) or "7b"
    lengths = f.text("lengths", "an Azure LLM trace (CSV)")
    bundles = f.whole("train_bundles", 1, 1024) or 1
    gpus = f.whole("train_gpus", 1, 1024) or 8
    interruptible = f.boolean("interruptible")
    setup = Setup(
        PROFILES[profile],
        steps=f.whole("steps", 1, 1_000_000) or 100,
        train_gpus=float(bundles * gpus),
        batch=f.whole("batch", 1, 100_000) or 512,
        eta=_or(f.whole("eta", 0, 1000), 4),
        interruptible=interruptible is None or interruptible,
        lengths=traces.read_lengths(folder / lengths) if lengths else (),
    )
    first = RlRunSpec(
        name, setup,
        tenant=f.text("tenant", "whose it is") or name,
        model_type=f.text("model_type", "a model type such as moe or base") or "",
        priority=_or(f.number("priority", "a number from 0 to 100", lambda v: 0 <= v <= 100), 5.0),
        train_bundles=bundles, train_bundle_gpus=float(gpus),
        rollouts=f.whole("rollouts", 1, 10_000) or 3,
        rollout_gpus=float(f.whole("rollout_gpus", 1, 1024) or 8),
        eval_every=f.whole("eval_every", 0, 1_000_000) or 0,
        eval_s=_or(f.duration_s("eval", 1, YEAR_S), 600.0),
        eval_gpus=float(f.whole("eval_gpus", 1, 1024) or 1),
        deadline_s=f.duration_s("deadline", 1, YEAR_S),
    )  # fmt: skip
    at_s = list(_times(f, days, seed, name))
    return [
        replace(
            first, name=name if len(at_s) == 1 else f"{name}-{n}", submitted_s=t,
            deadline_s=None if first.deadline_s is None else t + first.deadline_s,
        )
        for n, t in enumerate(at_s, 1)
    ]  # fmt: skip


def _tasks(f: Fields, days: float, seed: int, before: int) -> list[SimTask]:
    name = f.text("name", "a name") or f"tasks-{before + 1}"
    median = _or(f.duration_s("median", 1, YEAR_S), 1800.0)
    sigma = _or(f.number("sigma", "a number from 0 to 5", lambda v: 0 <= v <= 5), 1.0)
    deadline = f.duration_s("deadline", 1, YEAR_S)
    first = SimTask(
        name, 0.0, 0.0, Bundle(float(_or(f.whole("gpus", 0, 1024), 1)), 0.0, 0.0), f.whole("bundles", 1, 1024) or 1,
        tenant=f.text("tenant", "whose it is") or name,
        model_type=f.text("model_type", "a model type such as moe or base") or "",
        kind=f.choice("kind", ("train", "rollout", "eval", "reward")) or "eval",
        priority=_or(f.number("priority", "a number from 0 to 100", lambda v: 0 <= v <= 100), 5.0),
        checkpoint_s=f.duration_s("checkpoint", 0, YEAR_S), like=name,
    )  # fmt: skip
    draw = lots(seed, "tasks", name)
    return [
        replace(
            first, task_id=f"{name}-{n}", submitted_s=t, duration_s=median * draw.lognormvariate(0.0, sigma),
            deadline_s=None if deadline is None else t + deadline,
        )
        for n, t in enumerate(_times(f, days, seed, name), 1)
    ]  # fmt: skip


def _times(f: Fields, days: float, seed: int, name: str) -> Iterator[float]:
    """When copies of an entry arrive: once at `start`, with `every` again and again, at most `count` times."""
    start, every = f.duration_s("start", 0, YEAR_S) or 0.0, f.duration_s("every", 1, YEAR_S)
    count = f.whole("count", 1, 10_000_000)
    f.finish()
    if every is None:
        yield from [start] * (count or 1)
        return
    for n, at_s in enumerate(_arrivals(every, start, days, lots(seed, "arrivals", name))):
        if count is not None and n >= count:
            return
        yield at_s


def _arrivals(every_s: float, start_s: float, days: float, draw: Random) -> Iterator[float]:
    t_s = start_s
    while t_s < days * DAY_S:
        yield t_s
        t_s += draw.expovariate(1.0 / every_s)


def _sized(run: RlRunSpec, plan: LaunchPlan) -> RlRunSpec:
    """The run in the groups whose names speak of its tasks. Raises InvalidInput when they could never run there."""
    groups = {kind: next((g.name for g in plan.groups if kind in g.name), None) for kind in ("train", "rollout")}
    run = replace(run, train_group=groups["train"], rollout_group=groups["rollout"])
    bundle = Bundle(run.train_bundle_gpus, 0.0, 0.0)
    train = SimTask("train", 0.0, 0.0, bundle, run.train_bundles, group=run.train_group)
    rollout = SimTask("rollout", 0.0, 0.0, Bundle(run.rollout_gpus, 0.0, 0.0), group=run.rollout_group)
    _fitting(run.name, (train, rollout), plan)
    return run


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
