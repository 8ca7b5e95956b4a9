"""python -m benchmarks NAME [--json] | --check | --list"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import math
import os
import platform
import sys
from typing import Any, cast

import yaml

from areal_sky.errors import InvalidInput
from benchmarks.table import BOUNDS, flat, keep

# name -> what it tells
BENCHMARKS = {
    "cli_startup": "how long `areal-sky --help` and `areal-sky check FILE` take",
    "controller_tick": "one tick() over 100 and over 1,000 replicas, and the memory of an idle controller",
    "scheduler_throughput": "speed and memory of the admission engine at scale, against Ray and Slurm",
    "local_up": "`up` on local to the first task running, against bare Ray",
    "task_latency": "submit to running command, against a bare Ray placement group and actor",
    "placement": "GPUs left over when the Alibaba cluster is full: ours, best fit, fragmentation gradient descent",
    "detection": "how soon and how surely scripted faults are found, and what is raised where nothing is wrong",
    "scheduler_quality": "completion times of traces replayed on the engine: ours, FIFO, EASY, SRTF, LAS, Gittins",
    "telemetry_overhead": "what the node's agent costs with 8 GPUs at 10 Hz, beside nvitop and gpustat",
    "head_ingest": "what the head spends on the windows of 1,000 nodes with 8 GPUs each",
    "random_histories": "crashes, lost calls, partitions in any order: what of the invariants does not hold",
    "spot_replay": "13 days of spot capacity under nine market policies: what each saves, how long that takes",
    "simulator_speed": "simulated task events a minute, and 1,000 nodes for a week",
    "slurm_up": "`up` on real SkyPilot (Slurm testbed) against `sky launch` by hand, four groups at once, lost nodes",
}


# name -> what it can be given
OPTIONS = {"scheduler_quality": ("traces",), "placement": ("nodes", "pods"), "spot_replay": ("traces",)}


def measure(name: str, options: dict[str, str]) -> dict[str, Any]:
    """The figures of a run; None: a peer is not here to be measured. What is not a number is detail beside them."""
    return importlib.import_module(f"benchmarks.{name}").measure(**options)


def why_not(name: str) -> str | None:
    """Why the benchmark cannot run on this machine, in words; None when it can."""
    reason = getattr(importlib.import_module(f"benchmarks.{name}"), "why_not", None)
    return reason() if reason else None


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in cast("dict[str, Any]", value).items()}
    return round(value, 4) if isinstance(value, float) else value


def report(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    """The one JSON object of a run."""
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return {"benchmark": name, **rounded(figures), "machine": machine}


def over_bounds(name: str, figures: dict[str, Any]) -> list[str]:
    """What is beyond its limit, in words."""
    bounds: dict[str, dict[str, Any]] = yaml.safe_load(BOUNDS.read_text())[name]
    told: list[str] = []
    for figure, bound in bounds.items():
        value = figures[figure]
        usual = f"(usually {bound['measured']:g})"
        if value is not None and value > bound.get("max", math.inf):
            told.append(f"{name}.{figure} is {value:.4g}, over {bound['max']:g} {usual}")
        if value is not None and value < bound.get("min", -math.inf):
            told.append(f"{name}.{figure} is {value:.4g}, under {bound['min']:g} {usual}")
    return told


def show(name: str, figures: dict[str, Any]) -> None:
    bounds: dict[str, dict[str, Any]] = yaml.safe_load(BOUNDS.read_text())[name]
    print(f"{name}: {BENCHMARKS[name]}")
    for figure, value in flat(figures):
        bound = bounds.get(figure, {})
        limits = "".join(f"   {kind} {bound[kind]:g}" for kind in ("min", "max") if kind in bound)
        print(f"  {figure:<28} {'not measured' if value is None else format(value, '10.4g')}{limits}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("name", nargs="?", choices=sorted(BENCHMARKS))
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--check", action="store_true", help="run all (or NAME) against bounds.yaml")
    parser.add_argument("--keep", action="store_true", help="write the run into last_run.json and docs/benchmarks.md")
    parser.add_argument("--traces", metavar="DIR", help="scheduler_quality: CSV files as Microsoft Philly's")
    parser.add_argument("--nodes", metavar="CSV", help="placement: machines in the format of Alibaba gpu-v2023")
    parser.add_argument("--pods", metavar="CSV", help="placement: pods in the format of Alibaba gpu-v2023")
    args = parser.parse_args()
    given = {o: v for o in ("traces", "nodes", "pods") if (v := getattr(args, o)) is not None}
    if foreign := [o for o in given if o not in OPTIONS.get(args.name or "", ())]:
        parser.error(f"{args.name or '--check'} takes no --{foreign[0]}")
    if args.name is None and not args.check:
        for name, text in BENCHMARKS.items():
            print(f"{name:<18} {text}")
        return 0
    too_much: list[str] = []
    for name in [args.name] if args.name else BENCHMARKS:
        if reason := why_not(name):
            print(f"{name}: not run: {reason}", file=sys.stderr)
            if args.name:
                return 1
            continue
        try:
            figures = measure(name, given)
        except InvalidInput as e:
            print(f"error: {e}", file=sys.stderr)
            return 2
        if args.keep:
            keep(name, report(name, figures), datetime.date.today())
        if args.json:
            print(json.dumps(report(name, figures)), flush=True)
        else:
            show(name, figures)
        if args.check:
            too_much += over_bounds(name, figures)
    for line in too_much:
        print(f"over its bound: {line}", file=sys.stderr)
    return 1 if too_much else 0


if __name__ == "__main__":
    sys.exit(main())
