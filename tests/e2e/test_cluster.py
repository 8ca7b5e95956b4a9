"""A whole cluster on this machine, driven by the command line as a user would. One cluster serves all tests here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ending import command, end_everything

from areal_sky.adapters import processes

pytestmark = pytest.mark.e2e

SPEC = """
name: whole
infra: local
head: {resources: {cpus: 1, memory: 2}}
resources: {accelerators: "V100:2", cpus: 2, memory: 4}
node_groups:
  rollout: {min_replicas: 1, max_replicas: 2}
models: [{name: m, model_type: moe}]
scheduling: {priority: [{model_type: moe, weight: 1.5}]}
scaling: {policy: fixed}
"""


class Shell:
    """`areal-sky` in a state folder of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.home = folder / "home"
        self.env = {**os.environ, "AREAL_SKY_HOME": str(self.home), "COLUMNS": "80"}
        self.spec = folder / "whole.yaml"
        self.spec.write_text(SPEC)

    def start(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "areal_sky.ui.cli.main", *args],
            env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *args: str, code: int = 0, timeout_s: float = 90) -> str:
        """stdout; fails unless the exit code is `code`. Never a traceback."""
        process = self.start(*args)
        out, err = process.communicate(timeout=timeout_s)
        assert "Traceback" not in out + err, err
        assert process.returncode == code, f"{args}: {process.returncode}\n{out}\n{err}"
        return out + err

    def json(self, *args: str) -> Any:
        return json.loads(self.run(*args, "--json"))

    def pids(self) -> list[int]:
        return [p for pids in processes.marked(f"{self.home}/clusters/").values() for p in pids]


def until(condition: Callable[[], Any], timeout_s: float = 40) -> Any:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if value := condition():
            return value
        time.sleep(0.1)
    raise AssertionError("did not come true in time")


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shell = Shell(tmp_path_factory.mktemp("whole"))
    two = [shell.start("up", str(shell.spec)) for _ in range(2)]  # twice at once
    outputs = [p.communicate(timeout=90) for p in two]
    assert [p.returncode for p in two] == [0, 0], outputs
    yield shell
    end_everything(shell.home)


def test_up_twice_at_once_made_one_cluster_and_again_changes_nothing(shell: Shell) -> None:
    events = [json.loads(line) for line in shell.run("events", "--json").splitlines()]
    assert [e["replica"] for e in events if e["event"] == "LaunchIntended"] == ["whole-head-0", "whole-rollout-0"]
    assert len([e for e in events if e["event"] == "ControllerStarted"]) == 1
    before = len(events)
    assert "is ready" in shell.run("up", str(shell.spec))
    assert len(shell.run("events", "--json").splitlines()) == before


def test_a_taken_name_is_said(shell: Shell, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(SPEC.replace("max_replicas: 2", "max_replicas: 3"))
    assert "'whole' is up with another spec" in shell.run("up", str(other), code=1)


def test_nodes_are_what_the_spec_declares(shell: Shell) -> None:
    status = shell.json("status", "whole")
    assert status["state"] == "READY"
    (group,) = [g for g in status["groups"] if g["group"] == "rollout"]
    assert group["shape"]["gpus"] == 2 and group["shape"]["cpus"] == 2
    view = gateway(shell).view()
    (node,) = [n for n in view.nodes if n.group == "rollout"]
    assert (node.shape.gpus, node.shape.cpus, node.free_gpus) == (2, 2, 2)


def gateway(shell: Shell, right: str = "operate") -> Any:
    from areal_sky.adapters.gateway_client import GatewayClient

    tokens = json.loads((shell.home / "clusters" / "whole" / "tokens.json").read_text())
    return GatewayClient(str(address(shell)["gateway_url"]), tokens[right])


def address(shell: Shell) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((shell.home / "clusters" / "whole" / "head" / "address.json").read_text())
    return found


def submit(shell: Shell, command: str, **fields: Any) -> str:
    from areal_sky.core.model import Bundle
    from areal_sky.core.taskmodel import TaskSpec

    spec = TaskSpec(kind="rollout", command=command, model="m", bundle=Bundle(gpus=1, cpus=1), **fields)
    return str(gateway(shell).submit(spec)["task_id"])


def task(shell: Shell, task_id: str) -> dict[str, Any]:
    found: dict[str, Any] = gateway(shell).task(task_id)
    return found


def test_kill_9_of_the_head_service_harms_no_task(shell: Shell) -> None:
    running = submit(shell, "for i in $(seq 1 60); do echo step $i; sleep 0.2; done")
    until(lambda: task(shell, running)["state"] == "RUNNING")
    (service,) = [
        p for p in shell.pids() if command(p).endswith(b"main\0head\0") and not command(p).startswith(b"/bin/sh")
    ]
    processes.kill([service])
    until(lambda: processes.identity(service) is None)
    until(lambda: answers(shell))
    ended = until(lambda: (t := task(shell, running))["state"] in ("SUCCEEDED", "FAILED") and t)
    assert ended["state"] == "SUCCEEDED" and ended["attempt"] == 1
    text = gateway(shell).logs(running)["text"]
    assert text.split() == [w for i in range(1, 61) for w in ("step", str(i))]


def answers(shell: Shell) -> bool:
    from areal_sky.errors import Unreachable

    try:
        gateway(shell).view()
    except Unreachable:
        return False
    return True


def test_a_command_that_does_not_exist_fails_with_its_message(shell: Shell) -> None:
    missing = submit(shell, "no-such-command --please")
    ended = until(lambda: (t := task(shell, missing))["state"] == "FAILED" and t)
    assert ended["exit_codes"] == {"0": 127}
    assert "no-such-command" in gateway(shell).logs(missing, stream="err")["text"]
    assert "127" in shell.run("why", missing)


def test_a_gang_that_can_never_fit_is_refused_at_submit(shell: Shell) -> None:
    said = shell.run("submit", "--gpus", "1", "--bundles", "5", "--", "true", code=3)
    assert "can never fit" in said and "group rollout takes at most 4 of them" in said
    assert "can never fit" not in shell.run("queue")


def test_scale_up_and_down_with_drain(shell: Shell) -> None:
    shell.run("scale", "rollout=+1", "--wait")
    assert shell.json("status", "whole")["tasks"] == {"running": 0, "waiting": 0}
    keeps_on = submit(shell, "sleep 4; echo done", group="rollout")
    until(lambda: task(shell, keeps_on)["state"] == "RUNNING")
    where = task(shell, keeps_on)["where"]
    shell.run("scale", "rollout=-1")
    until(lambda: len([r for r in shell.json("status", "whole")["replicas"] if r["group"] == "rollout"]) == 1)
    assert until(lambda: task(shell, keeps_on)["state"] == "SUCCEEDED"), where
    assert "bounds" not in shell.run("why", "rollout")
    assert "may have 1 to 2 replicas, not 3" in shell.run("scale", "rollout=3", code=3)
    assert "no group 'rolout'" in shell.run("scale", "rolout=2", code=1)
    assert "expected GROUP=N" in shell.run("scale", "rollout", code=2)


def test_a_killed_node_is_replaced_and_its_task_goes_on(shell: Shell) -> None:
    marker = shell.folder / "checkpoint"
    work = submit(
        shell, f"test -e {marker} && echo resumed || {{ touch {marker}; sleep 60; }}; echo attempt $AREAL_SKY_ATTEMPT"
    )
    until(lambda: marker.exists())
    replica = next(r["replica"] for r in shell.json("status", "whole")["replicas"] if r["group"] == "rollout")
    mark = f"{shell.home}/clusters/whole::{replica}/0"
    assert processes.kill_marked(mark) > 3
    ended = until(lambda: (t := task(shell, work))["state"] == "SUCCEEDED" and t, timeout_s=60)
    assert ended["attempt"] == 2
    assert "resumed" in gateway(shell).logs(work)["text"]
    assert "lost" in shell.run("why", replica)


def test_a_dead_controller_is_started_again_by_up(shell: Shell) -> None:
    events = [json.loads(line) for line in shell.run("events", "--json").splitlines()]
    pid = [e["pid"] for e in events if e["event"] == "ControllerStarted"][-1]
    processes.kill([pid])
    until(lambda: shell.json("status", "whole")["controller"] == "not running")
    assert "its controller is not running" in shell.run("status")
    swept = shell.json("status", "--orphans")
    assert any("cluster whole: its controller is gone" in w for w in swept["warnings"])
    assert not [o for o in swept["orphans"] if "whole" in o["id"] and str(shell.home) in o["reason"]]
    shell.run("up", str(shell.spec))
    assert shell.json("status", "whole")["controller"] == "running"


def test_tokens_have_rights(shell: Shell) -> None:
    from areal_sky.adapters.gateway_client import GatewayClient
    from areal_sky.errors import Unauthorized

    with pytest.raises(Unauthorized):
        gateway(shell, "read").drain("whole-rollout-0", "no", 0.0)
    with pytest.raises(Unauthorized):
        GatewayClient(str(address(shell)["gateway_url"]), "wrong").view()


def test_no_secret_in_argv_logs_or_events(shell: Shell) -> None:
    folder = shell.home / "clusters" / "whole"
    secrets = set(json.loads((folder / "tokens.json").read_text()).values())
    for pid in shell.pids():
        assert not any(s.encode() in command(pid) for s in secrets)
    for file in [*folder.rglob("*.log"), *folder.rglob("ray.json"), *folder.rglob("*.out"), *folder.rglob("*.err")]:
        assert not any(s in file.read_text(errors="replace") for s in secrets), file
    assert not any(s in shell.run("events", "--json") for s in secrets)


# Last: ends the cluster that the others share.
def test_zz_down_leaves_nothing_and_the_bill_stays(shell: Shell) -> None:
    submit(shell, "sleep 300")
    out = shell.run("down", "--drain", "1s")
    assert "verified: no process of it is left" in out
    assert shell.pids() == []
    assert shell.json("status", "whole")["state"] == "DOWN"
    bill = shell.json("cost", "whole")
    assert bill["usd"] > 0 and bill["usd_per_hour_now"] == 0
    tasks = shell.json("cost", "whole", "--by", "task")
    assert tasks["usd"] == bill["usd"] == pytest.approx(sum(x["usd"] for x in tasks["lines"]))
    roles = {x["role"] for x in tasks["lines"]}
    assert {"rollout", "head", "idle"} <= roles and "unattributed" not in roles
    again = shell.run("down", "whole")
    assert "verified" in again


def test_down_while_launching(shell: Shell) -> None:
    if shell.json("status", "whole")["state"] != "DOWN":
        shell.run("down", "--drain", "0s")
    up = shell.start("up", str(shell.spec))
    until(lambda: shell.pids())
    out = shell.run("down", "--drain", "0s")
    assert "verified" in out and shell.pids() == []
    up.communicate(timeout=30)
    assert up.returncode == 1


def test_ctrl_c_during_up_loses_nothing(shell: Shell) -> None:
    up = shell.start("up", str(shell.spec))
    until(lambda: shell.pids())
    up.send_signal(signal.SIGINT)
    _, err = up.communicate(timeout=20)
    assert up.returncode == 130 and "still coming up in the background" in err
    assert "is ready" in shell.run("up", str(shell.spec))
    shell.run("down", "--drain", "0s")
    assert shell.pids() == []
