"""From nothing to the first task running: `areal-sky up` and `submit`, against the bare Ray commands.

Both start one head and one node with a GPU to declare, then run one thing on that GPU; both use token
authentication and no dashboard. The two alternate in one run, so that a busy machine is busy for both.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from areal_sky.adapters.processes import kill_marked
from areal_sky.core.nodeenv import NODE_MARK

PAIRS = 3
BIN = Path(sys.executable).parent
SPEC = """\
name: bench
infra: local
resources: {accelerators: "V100:1", cpus: 4, memory: 8}
"""
ACTOR = """\
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
@ray.remote(num_gpus=1)
class Actor:
    def ping(self): return True
ray.get(Actor.remote().ping.remote())
"""


def measure() -> dict[str, float]:
    ours, bare = [], []
    for _ in range(PAIRS):
        bare.append(bare_ray_s())
        ours.append(areal_sky_s())
    ours_s, bare_s = statistics.median(ours), statistics.median(bare)
    return {
        "ours_s": ours_s,
        "bare_ray_s": bare_s,
        "ours_over_bare_ratio": statistics.median(o / b for o, b in zip(ours, bare, strict=True)),
    }


def bare_ray_s() -> float:
    """`ray start --head`, `ray start --address`, and a driver whose actor on the GPU has answered."""
    with scratch() as folder:
        mark = f"bench-bare/{secrets.token_hex(4)}"
        token = secrets.token_hex(32)
        env = {**clean_env(), NODE_MARK: mark, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        address = f"127.0.0.1:{free_port()}"
        common = ["--disable-usage-stats", "--node-ip-address=127.0.0.1", "--object-store-memory=100000000"]
        head = ["--head", f"--port={address.split(':')[1]}", "--include-dashboard=false", f"--temp-dir={folder}"]
        started = time.perf_counter()
        try:
            run([str(BIN / "ray"), "start", *head, "--num-cpus=1", "--num-gpus=0", *common], env)
            run([str(BIN / "ray"), "start", f"--address={address}", "--num-cpus=4", "--num-gpus=1", *common], env)
            run([sys.executable, "-c", ACTOR, address], env)
            return time.perf_counter() - started
        finally:
            kill_marked(mark)


def areal_sky_s() -> float:
    """`areal-sky up` and `areal-sky submit`, until the task's first command has run."""
    with scratch() as folder:
        spec, stamp = folder / "bench.yaml", folder / "running"
        spec.write_text(SPEC)
        env = {**clean_env(), "AREAL_SKY_HOME": str(folder / "home")}
        areal_sky = str(BIN / "areal-sky")
        started = time.perf_counter()
        try:
            run([areal_sky, "up", str(spec)], env)
            run([areal_sky, "submit", "--gpus", "1", "--", f"touch {stamp}"], env)
            while not stamp.exists():
                if time.perf_counter() - started > 120:
                    raise SystemExit("the task did not start within two minutes")
                time.sleep(0.005)
            return time.perf_counter() - started
        finally:
            run([areal_sky, "down", "bench", "--drain", "0s"], env)


def run(argv: list[str], env: dict[str, str]) -> None:
    # Files, not pipes: Ray's daemons inherit the output, and a pipe would not end before they do.
    with tempfile.TemporaryFile("w+") as out:
        done = subprocess.run(argv, env=env, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            out.seek(0)
            raise SystemExit(f"{' '.join(argv)} failed:\n{out.read()}")


def clean_env() -> dict[str, str]:
    unwanted = ("RAY_", "AREAL_SKY_", "PYTHONDONTWRITEBYTECODE")
    return {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder with a short path: Ray puts sockets into it, whose paths may have 107 characters at most."""
    folder = Path(tempfile.mkdtemp(prefix="skybench", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
