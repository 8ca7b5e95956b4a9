"""python -m benchmarks NAME [--json] | --check | --list"""

from __future__ import annotations

import argparse
import importlib
import json
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
    "local_up": "`up` on local to the first task running, against bare Ray",
    "task_latency": "submit to running command, against a bare Ray placement group and actor",
    "slurm_up": "`up` on real SkyPilot (Slurm testbed) against `sky launch` by hand, four groups at once, lost nodes",
}
BOUNDS = Path(__file__).with_name("bounds.yaml")


def measure(name: str) -> dict[str, float]:
    return importlib.import_module(f"benchmarks.{name}").measure()


def why_not(name: str) -> str | None:
    """Why the benchmark cannot run on this machine, in words; None when it can."""
    reason = getattr(importlib.import_module(f"benchmarks.{name}"), "why_not", None)
    return reason() if reason else None


def report(name: str, figures: dict[str, float]) -> dict[str, Any]:
    """The one JSON object of a run."""
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return {"benchmark": name, **{k: round(v, 4) for k, v in figures.items()}, "machine": machine}


def over_bounds(name: str, figures: dict[str, float]) -> list[str]:
    """What is over its limit, in words."""
    bounds: dict[str, dict[str, Any]] = yaml.safe_load(BOUNDS.read_text())[name]
    return [
        f"{name}.{figure} is {figures[figure]:.4g}, over {bound['max']:g} (usually {bound['measured']:g})"
        for figure, bound in bounds.items()
        if figures[figure] > bound["max"]
    ]


def show(name: str, figures: dict[str, float]) -> None:
    bounds: dict[str, dict[str, Any]] = yaml.safe_load(BOUNDS.read_text())[name]
    print(f"{name}: {BENCHMARKS[name]}")
    for figure, value in figures.items():
        limit = f"   limit {bounds[figure]['max']:g}" if figure in bounds else ""
        print(f"  {figure:<28} {value:10.4g}{limit}")


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
