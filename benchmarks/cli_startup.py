"""How long the two commands take that people run most, each as a new process: median of several runs."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples/03-full.yaml"
RUNS = 9


def measure() -> dict[str, float]:
    areal_sky = str(Path(sys.executable).with_name("areal-sky"))
    return {
        "help_s": median_s([areal_sky, "--help"]),
        "check_s": median_s([areal_sky, "check", str(EXAMPLE)]),
        "bare_python_s": median_s([sys.executable, "-c", "pass"]),
    }


def median_s(argv: list[str]) -> float:
    """Wall time of a process. The first run, which may write byte code, does not count."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    times: list[float] = []
    for _ in range(RUNS + 1):
        started = time.perf_counter()
        done = subprocess.run(argv, capture_output=True, text=True, env=env)
        times.append(time.perf_counter() - started)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(argv)} failed:\n{done.stdout}{done.stderr}")
    return statistics.median(times[1:])
