from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from areal_sky.adapters import processes
from areal_sky.core.model import NodeShape
from areal_sky.core.nodeenv import NODE_MARK, NodeEnv
from areal_sky.run import node as node_module
from areal_sky.run import raydaemon
from areal_sky.run.node import run_node

TREE = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
TREE += " start_new_session=True); time.sleep(60)"


def node_env(tmp_path: Path, **changes: object) -> dict[str, str]:
    fields: dict[str, object] = {
        "cluster": "c", "group": "rollout", "replica": "c-rollout-0", "index": 0, "head_ip": "127.0.0.1",
        "ray_port": 1, "gateway_port": 2, "state_dir": str(tmp_path / "node"), "lease_s": 0.5,
        "shape": NodeShape(gpus=1, cpus=1, memory_gib=1), "simulated_gpus": True,
    }  # fmt: skip
    env = NodeEnv(**{**fields, **changes})  # type: ignore[arg-type]
    return {"PATH": os.environ["PATH"], NODE_MARK: f"{tmp_path}::c-rollout-0/0", **env.to_env()}


def marked_tree(tmp_path: Path) -> tuple[raydaemon.RayDaemon, str]:
    """A stand-in for Ray's daemon: a process with a detached child, both with the node's mark."""
    mark = f"{tmp_path}::c-rollout-0/0"
    process = processes.spawn(
        [sys.executable, "-c", TREE], {**os.environ, NODE_MARK: mark}, tmp_path / "log"
    )
    while len(processes.marked(mark).get(mark, [])) < 2:
        time.sleep(0.02)
    return raydaemon.RayDaemon(process.pid, processes.identity(process.pid) or 0.0, mark), mark


class SilentHead:
    """An agent whose lease ran out, or never does."""

    lease_s = 0.5
    last_ok_s = None

    def __init__(self, left_s: float):
        self.left_s = left_s

    def lease_left_s(self) -> float:
        return self.left_s


def test_gives_up_in_good_order_when_there_is_no_head(tmp_path: Path) -> None:
    began_s = time.monotonic()
    assert run_node(node_env(tmp_path), threading.Event()) == 0
    assert 0.4 < time.monotonic() - began_s < 5


def test_ends_the_whole_node_when_the_lease_is_over(tmp_path: Path) -> None:
    daemon, mark = marked_tree(tmp_path)
    assert node_module._watch(daemon, SilentHead(-1.0), tmp_path, threading.Event()) == 0  # type: ignore[arg-type]
    until_s = time.monotonic() + 5.0
    while processes.marked(mark) and time.monotonic() < until_s:  # the kernel takes a moment to bury the killed
        time.sleep(0.02)
    assert processes.marked(mark) == {}


def test_keeps_the_node_while_the_lease_is_renewed_and_reports_a_dead_raylet(tmp_path: Path) -> None:
    daemon, mark = marked_tree(tmp_path)
    stop = threading.Event()
    codes: list[int] = []
    thread = threading.Thread(
        target=lambda: codes.append(node_module._watch(daemon, SilentHead(60.0), tmp_path, stop))  # type: ignore[arg-type]
    )
    thread.start()
    time.sleep(0.5)
    assert thread.is_alive() and daemon.alive()
    processes.kill([daemon.pid])
    thread.join(5)
    assert codes == [1]
    processes.kill_marked(mark)


def test_a_daemon_that_lives_is_adopted_and_a_reused_pid_is_not(tmp_path: Path) -> None:
    daemon, mark = marked_tree(tmp_path)
    (tmp_path / "ray.json").write_text(f'{{"pid": {daemon.pid}, "started": {daemon.started}}}')
    found = raydaemon.recorded(tmp_path, mark)
    assert found == daemon
    (tmp_path / "ray.json").write_text(f'{{"pid": {daemon.pid}, "started": {daemon.started - 1000}}}')
    assert raydaemon.recorded(tmp_path, mark) is None
    processes.kill_marked(mark)


def test_rays_environment_says_the_token_mode_and_carries_no_other_secret() -> None:
    env = raydaemon.ray_env(
        {"PATH": "/bin", "AREAL_SKY_TOKENS": "t", "AREAL_SKY_RAY_TOKEN": "r", "RAY_ADDRESS": "auto"},
        "tok",
        pretend=True,
    )
    assert env["RAY_AUTH_MODE"] == "token" and env["RAY_AUTH_TOKEN"] == "tok"
    assert "AREAL_SKY_TOKENS" not in env and "RAY_ADDRESS" not in env


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"cluster": "c"}', '{"nonsense": 1}'])
def test_a_damaged_environment_is_one_clear_error(damage: str) -> None:
    env = {**os.environ, "AREAL_SKY_NODE_CONFIG": damage}
    done = subprocess.run(
        [sys.executable, "-m", "areal_sky.ui.cli.main", "node"], env=env, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    assert "AREAL_SKY_NODE_CONFIG" in done.stderr and "Traceback" not in done.stderr


def handles_sigterm(pid: int) -> bool:
    caught = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_the_command_line_of_a_node_shows_no_secret(tmp_path: Path) -> None:
    env = {**node_env(tmp_path, lease_s=30.0), "AREAL_SKY_NODE_TOKEN": "s3cret", "AREAL_SKY_RAY_TOKEN": "s3cret"}
    process = processes.spawn([sys.executable, "-m", "areal_sky.ui.cli.main", "node"], env, tmp_path / "log")
    try:
        until_s = time.monotonic() + 20
        while not handles_sigterm(process.pid) and time.monotonic() < until_s:
            time.sleep(0.05)
        assert b"s3cret" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
    assert "s3cret" not in (tmp_path / "log").read_text()
