"""How fast the simulator is: task events a minute on one core, and 1,000 nodes for a week with all that goes wrong.

`task_events_per_min`: submits, starts, stops and ends of a made-up day of short tasks on 128 nodes of 8 GPUs, the
controller included. `week_*`: up to 1,000 nodes of both markets, 50,000 tasks in seven days, reclaims and faults as
usual. All in CPU time of one process; the controller looks at most every 30 s.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from typing import Any

from areal_sky.adapters.catalog import shipped_offers
from areal_sky.core.model import Bundle
from areal_sky.core.offers import Known
from areal_sky.run.simulation.engine import Scenario, Simulation
from areal_sky.run.simulation.policies import choose
from areal_sky.run.simulation.simtask import SimTask
from areal_sky.run.simulation.world import DAY_S, WORLDS, lots
from areal_sky.spec import load_text

SPEC = """
name: speed
infra: aws/us-east-1
node_groups:
  pool:
    resources: {{accelerators: "A100-80GB:8"}}
    min_replicas: {least}
    max_replicas: {most}
    market: {market}
scaling: {{idle: 30m, cooldown: 5m}}
"""


def measure() -> dict[str, Any]:
    """Each in a process of its own, so that its peak memory is its own."""
    return {**_apart("events"), **_apart("week")}


def _apart(what: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.simulator_speed", what], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


def events() -> dict[str, float]:
    tasks = made_up(100_000, days=1.0, gpus=(1, 1, 1, 2, 4, 8), median_s=180.0, sigma=0.8)
    return {"task_events_per_min": 60.0 * run(tasks, 1.0, 128, 128, "on_demand", "calm", 30.0)["events_per_s"]}


def week() -> dict[str, float]:
    tasks = made_up(50_000, days=7.0, gpus=(1, 2, 4, 8, 8, 16, 32), median_s=3600.0, sigma=1.2)
    took = run(tasks, 7.0, 200, 1000, "mixed", "usual", 30.0)
    return {"week_cpu_s": took["cpu_s"], "week_peak_mib": took["peak_mib"], "week_peak_gpus": took["peak_gpus"]}


def run(
    tasks: tuple[SimTask, ...], days: float, least: int, most: int, market: str, world: str, tick_s: float
) -> dict[str, float]:
    spec = load_text(SPEC.format(least=least, most=most, market=market), "speed.yaml", None)
    choice = choose("spec", spec, Known(shipped_offers()))
    scenario = Scenario("speed", tasks, world=WORLDS[world], days=days, seed=1)
    started = time.process_time()
    simulation = Simulation(scenario, choice, tick_s=tick_s)
    result = simulation.run()
    cpu_s = time.process_time() - started
    if any(t.outcome != "succeeded" for t in result.tasks):
        raise SystemExit("not all tasks ended")
    return {
        "events_per_s": simulation.tasks.events / cpu_s, "cpu_s": cpu_s, "peak_mib": peak_mib(),
        "peak_gpus": max(sum(p.gpus_by_market.values()) for p in result.points), "ticks": result.metrics["ticks"],
    }  # fmt: skip


def made_up(count: int, days: float, gpus: tuple[int, ...], median_s: float, sigma: float) -> tuple[SimTask, ...]:
    draw = lots(1, "speed")
    at_s = sorted(draw.random() * days * DAY_S for _ in range(count))
    tasks: list[SimTask] = []
    for n, t in enumerate(at_s):
        n_gpus = draw.choice(gpus)
        bundle, bundles = Bundle(float(min(8, n_gpus)), 0.0, 0.0), max(1, n_gpus // 8)
        took_s = min(median_s * draw.lognormvariate(0.0, sigma), DAY_S)
        tasks.append(SimTask(f"t{n}", t, took_s, bundle, bundles, kind="eval", checkpoint_s=900.0))
    return tuple(tasks)


def peak_mib() -> float:
    """The most memory that this process has held."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    logging.disable()  # the controller tells of every refused launch
    print(json.dumps({"events": events, "week": week}[sys.argv[1]]()))
