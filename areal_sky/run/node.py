"""`areal-sky node`: joins this machine to the cluster's Ray, reports its GPUs, and holds its lease.

It ends the machine's part by itself when the head has been silent for longer than the lease: a forgotten node dies.
Imports neither ray nor sky. Exit codes: 0 planned end, 78 it can never work as configured, others: try again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from areal_sky.adapters import processes
from areal_sky.core.nodeenv import EXIT_NEVER, NODE_MARK, NodeEnv
from areal_sky.run import raydaemon
from areal_sky.run.agent import Agent, connect
from areal_sky.run.giveback import give_back

log = logging.getLogger(__name__)


def run_node(
    environ: Mapping[str, str], stop: threading.Event, on_agent: Callable[[Agent, str], object] | None = None
) -> int:
    """Runs until the lease ends, the raylet dies or `stop` is set; returns the exit code.

    `on_agent` gets the agent, once there is one, and the node token.

    Raises InvalidInput when the environment is not that of a node.
    """
    node = NodeEnv.from_env(environ)
    state_dir = Path(node.state_dir).expanduser()
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    mark = environ.get(NODE_MARK) or f"{node.cluster}::{node.replica}/{node.index}"
    env = raydaemon.ray_env(environ, environ.get("AREAL_SKY_RAY_TOKEN", ""), pretend=node.simulated_gpus)
    env |= {NODE_MARK: mark, "AREAL_SKY_NODE_DIR": str(state_dir)}
    # The runners in this node's Ray push logs to the head in the node's name.
    token = env["AREAL_SKY_NODE_TOKEN"] = environ.get("AREAL_SKY_NODE_TOKEN", "")
    env["AREAL_SKY_GATEWAY"] = f"http://{node.head_ip}:{node.gateway_port}"
    if not _head_answers(node, stop):
        if not stop.is_set():
            log.error("no head at %s:%s for %.0f s: giving up", node.head_ip, node.ray_port, node.lease_s)
            give_back(environ)
        return 0
    daemon, adopted = raydaemon.start_or_adopt(state_dir, _arguments(node, environ, state_dir), env)
    log.info("%s raylet pid %s of %s", "adopted" if adopted else "started", daemon.pid, node.replica)
    agent = connect(node, token, raylet_alive=daemon.alive)
    if on_agent is not None:
        on_agent(agent, token)
    thread = threading.Thread(target=agent.run, args=(stop,), name="agent", daemon=True)
    thread.start()
    try:
        code = _watch(daemon, agent, state_dir, stop)
        if code == 0 and not stop.is_set():
            give_back(environ)
        return code
    finally:
        stop.set()
        thread.join(timeout=3.0)


def _watch(daemon: raydaemon.RayDaemon, agent: Agent, state_dir: Path, stop: threading.Event) -> int:
    joined = state_dir / "joined"  # the task's own `run` waits for it (core/taskscripts.py)
    while not stop.wait(0.2):
        raydaemon.reap()
        if not joined.exists() and agent.last_ok_s is not None and _ray_has_joined(state_dir):
            joined.touch()
        if not daemon.alive():
            log.error("the raylet has ended (see %s)", state_dir / "ray.log")
            return 1
        if agent.lease_left_s() < 0:
            log.error("no head has renewed the lease of %.0f s: ending this node", agent.lease_s)
            daemon.end()
            return 0
    return 0


def _ray_has_joined(state_dir: Path) -> bool:
    # `ray start` says this once the cluster's control plane lists the node (ray/_private/node.py, 2.60).
    try:
        return "Ray runtime started" in (state_dir / "ray.log").read_text(errors="replace")
    except OSError:
        return False


def _arguments(node: NodeEnv, environ: Mapping[str, str], state_dir: Path) -> list[str]:
    accelerator = node.shape.accelerator if node.shape else None
    arguments = [
        f"--address={node.head_ip}:{node.ray_port}",
        raydaemon.labels_argument(node.cluster, node.group, node.replica, node.index, accelerator),
        *raydaemon.shape_arguments(node.shape, environ),
    ]
    if node.simulated_gpus:
        arguments.append("--node-ip-address=127.0.0.1")
    arguments.append(f"--temp-dir={raydaemon.ray_tmp(environ, state_dir)}")
    return arguments


def _head_answers(node: NodeEnv, stop: threading.Event) -> bool:
    # Joining as soon as the head's store listens, not when the head is complete, saves seconds of a cold start.
    until_s = time.monotonic() + node.lease_s
    while not stop.is_set() and time.monotonic() < until_s:
        if processes.port_answers(node.head_ip, node.ray_port):
            return True
        stop.wait(0.05)
    return False


def fail_for_good(state_dir: str, message: str) -> int:
    """Leaves word for the backend why this node will never work, and returns the exit code that says so."""
    try:
        folder = Path(state_dir).expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "failed").write_text(message)
    except OSError:
        log.exception("could not record the failure")
    return EXIT_NEVER
