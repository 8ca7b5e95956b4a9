"""What a task costs before its command runs, against a bare Ray placement group and actor on the same nodes.

Both reserve one GPU on a local cluster that is up, and end when a command of `/bin/sh` has run there: ours by HTTP
submit, queue, journal, placement group, runner and warden; bare Ray by a placement group and an actor that starts the
command. The two alternate in one run, so that a busy machine is busy for both.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.local_up import BIN, clean_env, run, scratch

PAIRS = 6
SPEC = """\
name: bench
infra: local
resources: {accelerators: "V100:4", cpus: 8, memory: 8}
"""
# Its own process: a driver that joins Ray, and starts bare actors when told to on stdin.
BARE = """\
import os, subprocess, sys
import ray
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Strategy
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False, namespace="bare", _temp_dir=sys.argv[2])
@ray.remote(num_cpus=1, num_gpus=1)
class Actor:
    def run(self, command):
        return subprocess.run(["/bin/sh", "-c", command], start_new_session=True).returncode
print("ready", flush=True)
for line in sys.stdin:
    group = placement_group([{"CPU": 1, "GPU": 1}], strategy="PACK")
    group.wait(60)
    actor = Actor.options(scheduling_strategy=Strategy(group, 0)).remote()
    ray.get(actor.run.remote(line.strip()))
    print("done", flush=True)
    remove_placement_group(group)
"""


def measure() -> dict[str, float]:
    with scratch() as folder:
        (folder / "bench.yaml").write_text(SPEC)
        env = {**clean_env(), "AREAL_SKY_HOME": str(folder / "home")}
        try:
            run([str(BIN / "areal-sky"), "up", str(folder / "bench.yaml")], env)
            return _pairs(folder, env)
        finally:
            run([str(BIN / "areal-sky"), "down", "bench", "--drain", "0s"], env)


def _pairs(folder: Path, env: dict[str, str]) -> dict[str, float]:
    from areal_sky.core.model import Bundle
    from areal_sky.core.taskmodel import TaskSpec
    from areal_sky.home import ClusterHome

    home = ClusterHome("bench", folder / "home" / "clusters" / "bench")
    address = str(home.address()["ray_address"])
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": home.tokens()["ray"]}
    ray_tmp = _ray_tmp(address)
    driver = subprocess.Popen(
        [str(BIN / "python"), "-c", BARE, address, ray_tmp], env=env | token, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    assert driver.stdin is not None and driver.stdout is not None
    gateway = home.gateway("submit")

    def bare(stamp: Path) -> None:
        print(f"touch {stamp}", file=driver.stdin, flush=True)

    def ours(stamp: Path) -> None:
        gateway.submit(TaskSpec("eval", command=f"touch {stamp}", bundle=Bundle(gpus=1, cpus=1)))

    try:
        assert driver.stdout.readline().strip() == "ready"
        pairs: list[tuple[float, float]] = []
        for n in range(PAIRS + 1):
            ours_s = _timed(folder / f"ours{n}", ours)
            time.sleep(0.3)  # until the task is over and Ray has everything back
            bare_s = _timed(folder / f"bare{n}", bare)
            driver.stdout.readline()
            time.sleep(0.3)
            if n:  # the first pair warms both up
                pairs.append((ours_s, bare_s))
    finally:
        driver.stdin.close()
        driver.wait(30)
    return {
        "ours_ms": statistics.median(o for o, _ in pairs) * 1000,
        "bare_ray_ms": statistics.median(b for _, b in pairs) * 1000,
        "ratio_vs_bare": statistics.median(o for o, _ in pairs) / statistics.median(b for _, b in pairs),
    }


def _timed(stamp: Path, start: Callable[[Path], Any]) -> float:
    began = time.perf_counter()
    start(stamp)
    while not stamp.exists():
        if time.perf_counter() - began > 60:
            raise SystemExit("the command did not run within a minute")
        time.sleep(0.001)
    return time.perf_counter() - began


def _ray_tmp(address: str) -> str:
    """The temporary folder of the Ray head at that address, through which a driver on this machine joins."""
    import psutil

    port = address.rpartition(":")[2]
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if f"--port={port}" in words and "start" in words:
            return next(w.partition("=")[2] for w in words if w.startswith("--temp-dir="))
    raise SystemExit(f"no Ray head is found at {address}")
