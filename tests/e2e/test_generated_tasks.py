"""The bash of generated SkyPilot tasks, run for real: a head and a node that find each other and stay."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from areal_sky.adapters.catalog import shipped_offers
from areal_sky.core.launch import plan
from areal_sky.core.taskyaml import task_dicts
from areal_sky.run import shipping
from areal_sky.spec import load_text

SPEC = """
name: gen
infra: aws
resources: {accelerators: V100:8}
run: |
  python -c 'import os, ray; ray.init(os.environ["RAY_ADDRESS"]); print("RAY NODES", len(ray.nodes()))'
  exit 5
"""
STARTED_S = 90.0


@pytest.fixture
def home() -> Iterator[Path]:
    """A home folder with a short path (Ray puts sockets there); every process that has it is ended afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="asky"))
    yield folder
    for process in processes_of(folder):
        with contextlib.suppress(psutil.Error):
            process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def processes_of(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("HOME") == str(folder):
                found.append(process)
    return found


def wait_for(what: str, found: Callable[[], Any]) -> Any:
    until_s = time.monotonic() + STARTED_S
    while time.monotonic() < until_s:
        if value := found():
            return value
        time.sleep(0.2)
    pytest.fail(f"no {what} within {STARTED_S:g} s")


class TwoMachines:
    """A head and a node of a spec on this one machine, installed and started by the bash of their tasks."""

    def __init__(self, spec_text: str, home: Path, free_port: Callable[[], int]):
        spec = load_text(spec_text, "gen.yaml")
        self.home = home
        self.tasks = task_dicts(spec, plan(spec, shipped_offers()))
        self.tokens = {right: secrets.token_hex(32) for right in ("read", "submit", "operate", "node", "ray")}
        self.ports = {"AREAL_SKY_RAY_PORT": str(free_port()), "AREAL_SKY_GATEWAY_PORT": str(free_port())}

    def start(self, name: str, **given: str) -> subprocess.Popen[bytes]:
        task = self.tasks[name]
        env = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(self.home),
            "SKYPILOT_NODE_IPS": "127.0.0.1",
            "SKYPILOT_NODE_RANK": "0",
            **{k: str(v) for k, v in task["envs"].items()},
            **self.ports,
            "AREAL_SKY_PACKAGE": str(shipping.wheel()),
            **given,
        }
        assert subprocess.run(["bash", "-c", task["setup"]], env=env).returncode == 0
        with (self.home / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                ["bash", "-c", task["run"]], env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def start_both(self) -> list[subprocess.Popen[bytes]]:
        head = self.start("head", AREAL_SKY_TOKENS=json.dumps(self.tokens), AREAL_SKY_RAY_TMP=str(self.home / "r"))
        node = self.start(
            "main",
            AREAL_SKY_HEAD_IP="127.0.0.1",
            AREAL_SKY_NODE_TOKEN=self.tokens["node"],
            AREAL_SKY_RAY_TOKEN=self.tokens["ray"],
        )
        return [head, node]

    def groups_seen(self) -> set[str]:
        try:
            answer = httpx.get(
                f"http://127.0.0.1:{self.ports['AREAL_SKY_GATEWAY_PORT']}/v1/view",
                headers={"Authorization": f"Bearer {self.tokens['read']}"},
                timeout=3.0,
            )
        except httpx.HTTPError:
            return set()
        return {n["group"] for n in answer.json()["nodes"]} if answer.status_code == 200 else set()

    def agent(self) -> psutil.Process | None:
        found = processes_of(self.home)
        own = [p for p in found if p.cmdline()[-2:][-1:] == ["node"] and "areal-sky" in p.cmdline()[-2]]
        return own[0] if own else None


def end(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.e2e
def test_head_and_node_form_a_cluster_and_survive_the_death_of_their_process(
    home: Path, free_port: Callable[[], int]
) -> None:
    machines = TwoMachines(SPEC, home, free_port)
    head, node = machines.start_both()
    groups_seen, agent = machines.groups_seen, machines.agent
    wait_for("node in the head's view", lambda: {"head", "main"} <= groups_seen())
    log = home / "main.log"
    wait_for("end of the user's run", lambda: "own run ended with code 5; the node stays" in log.read_text())
    assert "RAY NODES 2" in log.read_text()

    raylet = json.loads(next(home.glob(".areal_sky/nodes/gen-main-0-0/ray.json")).read_text())["pid"]
    first = wait_for("node process", agent)
    first.send_signal(signal.SIGKILL)
    wait_for("new node process", lambda: (p := agent()) is not None and p.pid != first.pid)
    wait_for("adoption", lambda: f"adopted raylet pid {raylet}" in log.read_text())
    assert psutil.pid_exists(raylet) and head.poll() is None and node.poll() is None
    end(head, node)


OWN_RAY = """
name: gen
infra: aws
resources: {accelerators: V100:8}
envs: {AREAL_SKY_OWN_RAY: '1', OWN_PORT: '%d'}
run: |
  ray start --head --port=$OWN_PORT --num-cpus=1 --include-dashboard=false --temp-dir="$HOME/u"
  python -c 'import os, ray; ray.init("127.0.0.1:" + os.environ["OWN_PORT"]); print("OWN NODES", len(ray.nodes()))'
  ray stop
"""


@pytest.mark.e2e
def test_a_ray_that_the_task_starts_for_itself_stands_beside_ours(home: Path, free_port: Callable[[], int]) -> None:
    """Two raylets on the node's machine, of two clusters: neither takes the other's ports, and `ray stop` ends none."""
    machines = TwoMachines(OWN_RAY % free_port(), home, free_port)
    head, node = machines.start_both()
    log = home / "main.log"
    wait_for("end of the user's run", lambda: "the task's own run ended with code" in log.read_text())
    assert "OWN NODES 1" in log.read_text(), log.read_text()[-3000:]
    assert "left out: ray stop" in log.read_text()
    wait_for("node in the head's view", lambda: {"head", "main"} <= machines.groups_seen())
    assert head.poll() is None and node.poll() is None
    end(head, node)
