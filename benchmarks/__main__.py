"""python -m benchmarks NAME [--json] | --check | --list"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import sys
from pathlib import Path
from typing import Any

import yaml

# name -> what it tells
BENCHMARKS = {
    "cli_startup": "how long `areal-sky --help` and `areal-sky check FILE` take",
    "controller_tick": "one tick() over 100 replicas, and the memory of an idle controller",
    "scheduler_throughput": "speed and memory of the admission engine at scale, against Ray and Slurm",
    "local_up": "`up` on local to the first task running, against bare Ray",
    "task_latency": "submit to running command, against a bare Ray placement group and actor",
    "slurm_up": "`up` on real SkyPilot (Slurm testbed) against `sky launch` by hand, four groups at once, lost nodes",
}
BOUNDS = Path(__file__).with_name("bounds.yaml")


def measure(name: str) -> dict[str, float | None]:
    """The figures; None where a peer is not here to be measured."""
    return importlib.import_module(f"benchmarks.{name}").measure()


def why_not(name: str) -> str | None:
    """Why the benchmark cannot run on this machine, in words; None when it can."""
    reason = getattr(importlib.import_module(f"benchmarks.{name}"), "why_not", None)
    return reason() if reason else None


def report(name: str, figures: dict[str, float | None]) -> dict[str, Any]:
    """The one JSON object of a run."""
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
    rounded = {k: None if v is None else round(v, 4) for k, v in figures.items()}
    return {"benchmark": name, **rounded, "machine": machine}


def over_bounds(name: str, figures: dict[str, float | None]) -> list[str]:
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


def show(name: str, figures: dict[str, float | None]) -> None:
    bounds: dict[str, dict[str, Any]] = yaml.safe_load(BOUNDS.read_text())[name]
    print(f"{name}: {BENCHMARKS[name]}")
    for figure, value in figures.items():
        bound = bounds.get(figure, {})
        limits = "".join(f"   {kind} {bound[kind]:g}" for kind in ("min", "max") if kind in bound)
        print(f"  {figure:<28} {'not measured' if value is None else format(value, '10.4g')}{limits}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("name", nargs="?", choices=sorted(BENCHMARKS))
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--check", action="store_true", help="run all (or NAME) against bounds.yaml")
    args = parser.parse_args()
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
        figures = measure(name)
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
