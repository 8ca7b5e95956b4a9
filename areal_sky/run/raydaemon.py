"""Starts this machine's Ray daemon (`ray start --block`) in a session of its own, or adopts the one that runs.

The daemon outlives the process that started it, so that a restart of ours harms no task. Never `ray stop`: it ends
every Ray on the host, other people's included.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from areal_sky.adapters import processes
from areal_sky.core.model import NodeShape
from areal_sky.core.nodeenv import NODE_MARK
from areal_sky.core.tokens import SECRET_KEYS

# Ray notices a killed node after 3 s instead of 16 s, a hung one after 9 s instead of 66 s (measured on Ray 2.60).
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
# Many pretend machines share one real one: its memory says nothing about theirs, and idle interpreters add up.
PRETEND = {"RAY_memory_monitor_refresh_ms": "0", "RAY_prestart_worker_first_driver": "0"}
PRETEND_OBJECT_STORE_BYTES = 100 * 2**20


@dataclass(frozen=True)
class RayDaemon:
    """A running `ray start --block` with everything below it."""

    pid: int
    started: float
    mark: str

    def alive(self) -> bool:
        return processes.identity(self.pid) == self.started

    def end(self) -> None:
        """Kills the daemon and every process of this node but ourselves and the shell that restarts us."""
        processes.kill([self.pid], signal.SIGKILL)
        processes.kill_marked(self.mark, spare=(os.getpid(), os.getppid()))


def start_or_adopt(state_dir: Path, arguments: list[str], env: Mapping[str, str]) -> tuple[RayDaemon, bool]:
    """The daemon recorded in `state_dir`/ray.json if it still lives (True), else a new one (False)."""
    mark = env[NODE_MARK]
    adopted = recorded(state_dir, mark)
    if adopted is not None:
        return adopted, True
    # Leftovers of a daemon that died (a raylet's children) would hold its ports.
    processes.kill_marked(mark, spare=(os.getpid(), os.getppid()))
    process = processes.spawn(
        [*ray_command(), "start", *arguments, "--block", "--disable-usage-stats"], env, state_dir / "ray.log"
    )
    _reap_later(process)
    started = processes.identity(process.pid) or 0.0
    (state_dir / "ray.json").write_text(json.dumps({"pid": process.pid, "started": started}))
    return RayDaemon(process.pid, started, mark), False


def recorded(state_dir: Path, mark: str) -> RayDaemon | None:
    """The daemon that an earlier process of this node started, if it lives."""
    try:
        data = json.loads((state_dir / "ray.json").read_text())
        daemon = RayDaemon(int(data["pid"]), float(data["started"]), mark)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return daemon if daemon.alive() else None


def ray_tmp(environ: Mapping[str, str], state_dir: Path) -> Path:
    """Ray's folder for sessions and sockets, one per node: raylets of one host that share it take the same names."""
    if given := environ.get("AREAL_SKY_RAY_TMP"):
        return Path(given)
    # Short, since Ray adds 70 characters for sockets and those paths may have 107 in all.
    return Path("/tmp", f"areal-sky-{hashlib.sha256(str(state_dir).encode()).hexdigest()[:12]}")


def ray_env(base: Mapping[str, str], ray_token: str, *, pretend: bool) -> dict[str, str]:
    """The environment of a Ray daemon: token auth said out loud, health checks tuned, our secrets left out."""
    env = {k: v for k, v in base.items() if k not in SECRET_KEYS and not k.startswith("RAY_")}
    env |= HEALTH_CHECKS | (PRETEND if pretend else {})
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": ray_token, "PYTHONUNBUFFERED": "1"}
    env["RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL"] = "minor"  # bytecode is the same within one; images differ by patch
    return env


def shape_arguments(shape: NodeShape | None, environ: Mapping[str, str]) -> list[str]:
    """`ray start` arguments for a pretend machine; Ray looks at a real one itself, but for its GPUs.

    Where several share a host (Slurm), Ray would count all that it sees: SkyPilot knows how many this one was given.
    """
    if shape is None:
        given = environ.get("SKYPILOT_NUM_GPUS_PER_NODE", "")
        return [f"--num-gpus={given}"] if given.isdigit() else []
    return [
        f"--num-cpus={max(0, int(shape.cpus))}",
        f"--num-gpus={math.ceil(shape.gpus)}",
        f"--memory={int(shape.memory_gib * 2**30)}",
        f"--object-store-memory={PRETEND_OBJECT_STORE_BYTES}",
        "--include-log-monitor=false",  # tasks' output reaches the head by our own runners
    ]


def labels_argument(cluster: str, group: str, replica: str, index: int, accelerator: str | None) -> str:
    """Who a node is, in Ray's own labels."""
    labels = {"cluster": cluster, "group": group, "replica": replica, "index": str(index)}
    if accelerator:
        labels["accelerator"] = accelerator
    return "--labels=" + ",".join(f"areal-sky/{k}={v}" for k, v in labels.items())


def ray_command() -> list[str]:
    """Ray of this interpreter, else the first one on PATH (an image's own)."""
    beside = Path(sys.executable).with_name("ray")
    return [str(beside)] if beside.exists() else [shutil.which("ray") or "ray"]


_children: list[subprocess.Popen[bytes]] = []


def _reap_later(process: subprocess.Popen[bytes]) -> None:
    # Popen reaps forgotten children when the next one starts; keeping the handle lets `reap` do it at once.
    _children.append(process)


def reap() -> None:
    """Collects daemons that ended, so that they do not stay as zombies."""
    for process in list(_children):
        if process.poll() is not None:
            _children.remove(process)
