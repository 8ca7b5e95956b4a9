"""How long tasks take from submit to end under each order, in a replay of traces (benchmarks/replay.py says how).

`--traces DIR`: CSV files in the format of Microsoft Philly; without it a small synthetic trace, made here from a seed.
Per file and policy: mean, median and 99th percentile of completion times, 99th percentile of slowdowns (completion
time / running time), and the mean as a ratio to clairvoyant SRTF.

- fifo: first come, first served; the nodes that the first in line needs are kept free for it.
- fifo_easy: FIFO with reservations and exact running times known: EASY backfill (Lifka, JSSPP'95).
- srtf: clairvoyant shortest remaining time first, preemptive (Schrage and Miller, 1966).
- las: discretised two-dimensional least attained service: Tiresias (Gu et al., NSDI'19), limits 1 GPU-hour x 4^k.
- gittins: the Gittins index of the whole file's distribution per GPU count, known beforehand: Tiresias' 2D-Gittins.
- ours: `strategy: shortest`, no hints: what it knows it has learnt within the replay, from tasks that had ended.
- ours_estimates: the same with users' estimates: the true time x a log-normal error of sigma 1.
- ours_weighted: no hints, tasks have weights 0.5, 1 and 2 at random; `jct_by_weight_s` says what each weight got.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from areal_sky.adapters.traces import TraceTask, read_philly, trace_files
from areal_sky.core.order_policies import AttainedOrder, FifoOrder, ShortestOrder
from areal_sky.run.simulation.baselines import Gittins, Srtf
from areal_sky.run.simulation.simtask import Clairvoyance
from benchmarks.replay import Outcome, gpus_for, replay

SEED = 1
SIGMA = 1.0
WEIGHTS = (0.5, 1.0, 2.0)


def measure(traces: str | None = None) -> dict[str, Any]:
    if traces is None:
        files = {"synthetic": synthetic()}
    else:
        files = {path.stem: read_philly(path) for path in trace_files(Path(traces))}
    figures = {name: of_file(tasks) for name, tasks in files.items()}
    mean = {policy: statistics.fmean(f[policy]["ratio_vs_srtf"] for f in figures.values()) for policy in POLICIES}
    slowdown = max(f["ours"]["p99_slowdown"] / f["fifo_easy"]["p99_slowdown"] for f in figures.values())
    return {
        "files": figures,
        "ours_ratio_vs_srtf": mean["ours"],
        "ours_estimates_ratio_vs_srtf": mean["ours_estimates"],
        "las_ratio_vs_srtf": mean["las"],
        "ours_over_las": statistics.fmean(f["ours"]["avg_jct_s"] / f["las"]["avg_jct_s"] for f in figures.values()),
        "p99_slowdown_over_fifo_easy": slowdown,
        "heavy_over_light_jct": max(_heavy_over_light(f["ours_weighted"]["jct_by_weight_s"]) for f in figures.values()),
    }


def of_file(tasks: Sequence[TraceTask]) -> dict[str, Any]:
    """The figures of each policy."""
    gpus = gpus_for(tasks)
    rows: dict[str, Any] = {"gpus": gpus, "tasks": len(tasks)}
    for name, run in POLICIES.items():
        outcome = run(tasks, gpus)
        rows[name] = figures_of(outcome)
        if name == "ours_weighted":
            rows[name]["jct_by_weight_s"] = by_weight(outcome, weights_of(tasks))
    for name in POLICIES:
        rows[name]["ratio_vs_srtf"] = rows[name]["avg_jct_s"] / rows["srtf"]["avg_jct_s"]
    return rows


def figures_of(outcome: Outcome) -> dict[str, Any]:
    took = outcome.completion_s
    return {
        "avg_jct_s": statistics.fmean(took),
        "p50_jct_s": percentile(took, 0.5),
        "p99_jct_s": percentile(took, 0.99),
        "p99_slowdown": percentile(outcome.slowdowns, 0.99),
        "preemptions": outcome.preemptions,
    }


def percentile(values: Sequence[float], q: float) -> float:
    """The least value that a share `q` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


def by_weight(outcome: Outcome, weights: Sequence[float]) -> dict[str, float]:
    return {
        f"{weight:g}": statistics.fmean(t for t, w in zip(outcome.completion_s, weights, strict=True) if w == weight)
        for weight in WEIGHTS
    }


def weights_of(tasks: Sequence[TraceTask]) -> list[float]:
    lots = random.Random(SEED)
    return [lots.choice(WEIGHTS) for _ in tasks]


def estimates_of(tasks: Sequence[TraceTask]) -> list[float]:
    lots = random.Random(SEED)
    return [t.duration_s * lots.lognormvariate(0.0, SIGMA) for t in tasks]


def synthetic(tasks: int = 400) -> tuple[TraceTask, ...]:
    """Bursts of like tasks, their lengths from seconds to days, as in sweeps of experiments. Made up, from a seed."""
    lots = random.Random(SEED)
    now_s = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
    out: list[TraceTask] = []
    while len(out) < tasks:
        now_s += lots.expovariate(1 / 7200.0)
        gpus = lots.choice((1, 1, 1, 2, 4, 8))
        typical_s = lots.lognormvariate(math.log(3600.0), 2.0)
        for _ in range(lots.choice((1, 1, 2, 4, 12))):
            now_s += lots.uniform(1.0, 20.0)
            out.append(TraceTask(now_s, typical_s * lots.lognormvariate(0.0, 0.4), gpus))
    return tuple(out[:tasks])


def _heavy_over_light(jct_s: dict[str, float]) -> float:
    """The largest ratio of a weight's mean time to that of the next lighter one: below 1, heavier is faster."""
    in_order = [jct_s[f"{w:g}"] for w in WEIGHTS]
    return max(heavy / light for light, heavy in pairwise(in_order))


def _clairvoyant(tasks: Sequence[TraceTask], gpus: int) -> Outcome:
    known = Clairvoyance()
    return replay(tasks, Srtf(known), gpus, known=known)


def _gittins(tasks: Sequence[TraceTask], gpus: int) -> Outcome:
    return replay(tasks, Gittins.knowing([(t.gpus, t.duration_s) for t in tasks]), gpus)


def _easy(tasks: Sequence[TraceTask], gpus: int) -> Outcome:
    exact = [t.duration_s for t in tasks]
    return replay(tasks, FifoOrder(), gpus, estimates_s=exact, preemptible=False)


POLICIES: dict[str, Callable[[Sequence[TraceTask], int], Outcome]] = {
    "fifo": lambda tasks, gpus: replay(tasks, FifoOrder(), gpus, preemptible=False, patience_s=0.0),
    "fifo_easy": _easy,
    "srtf": _clairvoyant,
    "las": lambda tasks, gpus: replay(tasks, AttainedOrder(), gpus),
    "gittins": _gittins,
    "ours": lambda tasks, gpus: replay(tasks, ShortestOrder(), gpus),
    "ours_estimates": lambda tasks, gpus: replay(tasks, ShortestOrder(), gpus, estimates_s=estimates_of(tasks)),
    "ours_weighted": lambda tasks, gpus: replay(tasks, ShortestOrder(), gpus, weights=weights_of(tasks)),
}
