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


@pytest.mark.e2e
def test_head_and_node_form_a_cluster_and_survive_the_death_of_their_process(
    home: Path, free_port: Callable[[], int]
) -> None:
    spec = load_text(SPEC, "gen.yaml")
    tasks = task_dicts(spec, plan(spec, shipped_offers()))
    tokens = {right: secrets.token_hex(32) for right in ("read", "submit", "operate", "node", "ray")}
    ports = {"AREAL_SKY_RAY_PORT": str(free_port()), "AREAL_SKY_GATEWAY_PORT": str(free_port())}
    common = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(home),
        "SKYPILOT_NODE_IPS": "127.0.0.1",
        "SKYPILOT_NODE_RANK": "0",
    }

    def start(name: str, given: dict[str, str]) -> subprocess.Popen[bytes]:
        task = tasks[name]
        env = common | {k: str(v) for k, v in task["envs"].items()} | ports | given
        assert subprocess.run(["bash", "-c", task["setup"]], env=env).returncode == 0
        with (home / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                ["bash", "-c", task["run"]], env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def groups_seen() -> set[str]:
        try:
            answer = httpx.get(
                f"http://127.0.0.1:{ports['AREAL_SKY_GATEWAY_PORT']}/v1/view",
                headers={"Authorization": f"Bearer {tokens['read']}"},
                timeout=3.0,
            )
        except httpx.HTTPError:
            return set()
        return {n["group"] for n in answer.json()["nodes"]} if answer.status_code == 200 else set()

    def agent() -> psutil.Process | None:
        own = [p for p in processes_of(home) if p.cmdline()[-2:][-1:] == ["node"] and "areal-sky" in p.cmdline()[-2]]
        return own[0] if own else None

    head = start("head", {"AREAL_SKY_TOKENS": json.dumps(tokens), "AREAL_SKY_RAY_TMP": str(home / "r")})
    node = start(
        "main",
        {
            "AREAL_SKY_HEAD_IP": "127.0.0.1",
            "AREAL_SKY_NODE_TOKEN": tokens["node"],
            "AREAL_SKY_RAY_TOKEN": tokens["ray"],
        },
    )
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
    for process in (head, node):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
