"""Spot policies over 13 days of spot capacity: what each costs, and how long the replay of all nine takes.

A job of 16 nodes needs 8 of the 13 days. Without `traces` the capacity is made up: a random walk between none and 16
nodes, with outages. With it: the first 13 days of a file of skypilot-org/spot-traces.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from areal_sky.adapters.traces import read_spot
from areal_sky.errors import InvalidInput
from areal_sky.run.simulation.spot import NAMES, SpotJob, replay

DAYS, WORK_DAYS, NODES = 13, 8, 16
DAY_S = 86400.0


def measure(traces: str | None = None) -> dict[str, Any]:
    """`saving`: part of the price of all on demand that each policy saves; None where it missed the deadline."""
    gap_s, spot = (300.0, made_up(DAYS * 288)) if traces is None else read_spot(Path(traces))
    if len(spot) * gap_s < DAYS * DAY_S:
        raise InvalidInput(f"{traces}: expected at least {DAYS} days, found {len(spot) * gap_s / DAY_S:.1f}")
    spot = spot[: round(DAYS * DAY_S / gap_s)]
    job = SpotJob(WORK_DAYS * DAY_S, DAYS * DAY_S, nodes=NODES)
    started = time.perf_counter()
    results = {name: replay(name, job, gap_s, spot) for name in NAMES}
    seconds = time.perf_counter() - started
    whole = WORK_DAYS * 24 * NODES * job.on_demand_usd
    saving = {
        name: 1 - r.points[-1].cost_usd / whole if r.tasks[0].ended_s is not None else None
        for name, r in results.items()
    }
    return {"seconds": seconds, "policies": len(results), "saving": saving}


def made_up(ticks: int, seed: int = 0) -> tuple[int, ...]:
    dice = random.Random(seed)
    n, counts = NODES, list[int]()
    for _ in range(ticks):
        if dice.random() < 0.05:
            n = dice.choice((0, 0, 4, 8, 12, NODES, NODES))
        n = min(NODES, max(0, n + dice.choice((-1, 0, 0, 0, 1))))
        counts.append(n)
    return tuple(counts)
