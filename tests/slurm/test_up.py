"""`areal-sky up`, `scale`, `status`, `down` by real `sky launch`, and what goes wrong on the way.

One cluster serves all tests of this module, in their order; each leaves it with one rollout replica that is ready.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_sky.adapters import processes
from areal_sky.core.events import (
    CloudSilent,
    ControllerStarted,
    Event,
    LaunchAccepted,
    LaunchFailed,
    LaunchIntended,
    ReplicaGone,
    ReplicaLost,
    ReplicaReady,
)  # fmt: skip
from areal_sky.core.model import ReplicaState
from areal_sky.home import ClusterHome
from tests.testbed.testbed import Testbed, until

pytestmark = pytest.mark.timeout(1800)

SECRET = "sesame-open-7f3a"
SPEC = """\
name: up
infra: {infra}
head:
  resources: {{cpus: 1}}
resources: {{accelerators: "{gpu}:4", cpus: 2}}
envs: {{GREETING: hello, WANDB_API_KEY: {secret}}}
secrets: {{HF_TOKEN: {secret}}}
scaling: {{idle: 1h}}
node_groups:
  gang:
    replicas: 2
    resources: {{accelerators: "{gpu}:2", cpus: 1}}
  rollout:
    min_replicas: 1
    max_replicas: 3
"""
LAUNCH_S = 600.0  # 30 s on a machine of its own, many times that beside others


class Up:
    """The cluster of this module, through the command line and its files."""

    def __init__(self, bed: Testbed, folder: Path):
        self.bed = bed
        self.spec = folder / "up.yaml"
        gpu = bed.accelerators.partition(":")[0]
        self.spec.write_text(SPEC.format(infra=bed.infra, gpu=gpu, secret=SECRET))
        self.state_folder = folder / "home"
        self.home = ClusterHome("up", self.state_folder / "clusters" / "up")

    def __call__(self, *args: str, timeout_s: float = LAUNCH_S, code: int | None = 0) -> str:
        return self.bed.areal_sky(self.state_folder, *args, timeout_s=timeout_s, code=code)

    def status(self) -> dict[str, Any]:
        return json.loads(self("status", "up", "--json"))

    def events(self, kind: type[Event], after: int = 0) -> list[Any]:
        return [r.event for r in self.home.records(after) if isinstance(r.event, kind)]

    @property
    def seq(self) -> int:
        return self.home.state().version

    def rollouts(self, state: ReplicaState | None = ReplicaState.READY) -> list[str]:
        found = self.home.state().replicas.values()
        return sorted(r.name for r in found if r.group == "rollout" and state in (None, r.state))

    def settle(self, ready: int, timeout_s: float = LAUNCH_S) -> list[str]:
        """Waits until that many rollout replicas exist and all are ready."""
        def settled() -> bool:
            return len(self.rollouts()) == len(self.rollouts(None)) == ready

        until(settled, timeout_s, what=lambda: self("status", "up") + self.home.controller_log.read_text()[-4000:])
        return self.rollouts()

    def begin(self) -> tuple[str, int]:
        """One rollout replica, ready, whatever a test before has left; and the number of the last event."""
        self("scale", "rollout=1", "-c", "up")
        (name,) = self.settle(1)
        return name, self.seq

    def submit(self, *args: str) -> str:
        """Queues a task; its id."""
        return json.loads(self("submit", "-c", "up", "--json", *args))["task_id"]

    def state_of(self, task_id: str) -> str:
        with self.home.gateway("read") as client:
            return str(client.task(task_id)["state"])

    def controller_pid(self) -> int:
        return self.events(ControllerStarted)[-1].pid


@pytest.fixture(scope="module")
def up(testbed: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    cluster = Up(testbed, tmp_path_factory.mktemp("up"))
    cluster.printed = cluster("up", str(cluster.spec), timeout_s=1200)  # type: ignore[attr-defined]
    try:
        yield cluster
    finally:
        cluster("down", "up", "--drain", "1s", timeout_s=1200, code=None)
        processes.kill([e.pid for e in cluster.events(ControllerStarted)[-1:]], signal.SIGTERM)


def names(bed: Testbed) -> set[str]:
    """The Slurm jobs that are up, by the names of their SkyPilot clusters."""
    return {job["name"].rpartition("-")[0] for job in bed.jobs() if job["state"] == "RUNNING"}


def test_up_shows_what_it_does_and_ends_with_a_ready_cluster(up: Up) -> None:
    report = up.status()
    assert report["state"] == "READY" and report["controller"] == "running"
    assert names(up.bed) == {"up-head-0", "up-gang-0", "up-rollout-0"}
    assert "Provisioning on slurm" in up.printed and "is ready after" in up.printed  # type: ignore[attr-defined]
    again = up("up", str(up.spec))
    assert "is ready after" in again and len(up.events(LaunchIntended)) == 3


def test_both_nodes_of_a_gang_run_one_task_with_the_gpus_that_they_were_given(up: Up) -> None:
    show = 'echo "$GREETING at $(hostname)"'
    task = up.submit("--group", "gang", "--bundles", "2", "--gpus", "2", "--", show)
    until(lambda: up.state_of(task) == "SUCCEEDED", 120, what=lambda: up("why", task, "-c", "up"))
    hosts = {up("logs", task, "-c", "up", "--rank", str(rank)).strip() for rank in (0, 1)}
    assert all(line.startswith("hello at ") for line in hosts), hosts
    nodes = up.bed.on("login", "scontrol", "show", "hostnames", up.bed.job_of("up-gang")["nodes"]).split()
    assert {line.removeprefix("hello at ") for line in hosts} == set(nodes)
    too_much = up("submit", "-c", "up", "--group", "gang", "--bundles", "3", "--gpus", "2", "--", "true", code=3)
    assert "can never fit" in too_much


def test_no_secret_is_written_anywhere(up: Up) -> None:
    token = json.loads(up.home.tokens_file.read_text())["node"]
    for file in (f for f in up.state_folder.rglob("*") if f.is_file()):
        content = file.read_bytes()
        assert SECRET.encode() not in content, file
        assert token.encode() not in content or file == up.home.tokens_file, file
    told = up("submit", "-c", "up", "--group", "rollout", "-f", "--", "echo ${#HF_TOKEN} ${#WANDB_API_KEY}")
    assert f"{len(SECRET)} {len(SECRET)}" in told


def test_a_reclaimed_replica_is_noticed_its_task_goes_back_to_the_queue_and_it_is_replaced(up: Up) -> None:
    old, before = up.begin()
    task = up.submit("--group", "rollout", "--gpus", "4", "--", "sleep 20; echo through")
    until(lambda: up.state_of(task) == "RUNNING", 60)
    up.bed.scancel(old)
    began_s = time.monotonic()
    until(lambda: up.state_of(task) == "QUEUED", 30)
    assert time.monotonic() - began_s < 15  # 3 s on a machine of its own
    until(lambda: up.state_of(task) == "SUCCEEDED", LAUNCH_S, what=lambda: up("why", task, "-c", "up"))
    (new,) = up.settle(1)
    assert new != old and [e.replica for e in up.events(ReplicaLost, before)] == [old]


def test_a_group_grows_though_its_controller_is_killed_in_mid_launch_and_shrinks(up: Up) -> None:
    _, before = up.begin()
    up("scale", "rollout=+1", "-c", "up")
    name = until(lambda: up.rollouts(ReplicaState.REQUESTED), 60)[0]
    until(lambda: [j for j in up.bed.jobs() if j["name"].startswith(name + "-")], 120)
    job, asked = up.bed.job_of(name), up.bed.launches_of(name)
    os.kill(up.controller_pid(), signal.SIGKILL)
    assert "controller is not running" in up("status", "up")
    up("up", str(up.spec), "-d")
    assert name in up.settle(2)
    assert up.bed.job_of(name)["id"] == job["id"]
    assert up.bed.launches_of(name) == asked
    assert len(up.events(LaunchIntended, before)) == len(up.events(LaunchAccepted, before)) == 1
    assert not up.events(LaunchFailed, before) and len(names(up.bed)) == 4
    up.begin()
    assert len(names(up.bed)) == 3
    assert len(up.events(ReplicaGone, before)) == 1 and not up.events(ReplicaLost, before)


def test_sky_down_behind_our_back_is_noticed_and_made_good(up: Up) -> None:
    old, before = up.begin()
    up.bed.down(old)
    until(lambda: up.events(ReplicaLost, before), 60)
    (new,) = up.settle(1)
    assert new != old and len(names(up.bed)) == 3


def test_a_cluster_of_our_name_that_others_made_is_left_alone(up: Up) -> None:
    _, before = up.begin()
    taken = {r.slot for r in up.home.state().replicas.values() if r.group == "rollout"}
    theirs = f"up-rollout-{next(i for i in range(9) if i not in taken)}"
    up.bed.launch(theirs, "--infra", up.bed.infra, "--cpus", "1", "sleep 3600")
    try:
        job = up.bed.job_of(theirs)
        up("scale", "rollout=+1", "-c", "up")
        failed = until(lambda: up.events(LaunchFailed, before), 60)[0]
        assert failed.replica == theirs and "that this cluster did not make" in failed.reason
        up("scale", "rollout=1", "-c", "up")
        up.settle(1)
        assert up.bed.job_of(theirs)["id"] == job["id"] and not up.events(LaunchAccepted, before)
    finally:
        up.bed.down(theirs)


def test_an_api_server_killed_in_mid_launch_costs_nothing_that_works(up: Up) -> None:
    steady, before = up.begin()
    up("scale", "rollout=+1", "-c", "up")
    until(lambda: up.rollouts(ReplicaState.REQUESTED), 60)
    until(lambda: len(up.bed.jobs()) == 4, 120)
    up.bed.kill_api()
    time.sleep(5)
    up.bed.start_api()
    assert steady in up.settle(2, timeout_s=1200)
    assert [e.replica for e in up.events(ReplicaReady, before)] and not up.events(ReplicaLost, before)
    until(lambda: len(up.bed.jobs()) == 4, 60)  # what the killed launch had made is gone, or is the one that serves
    assert not up.events(CloudSilent, before) or not up.home.state().cloud_problem


def test_down_leaves_nothing(up: Up) -> None:
    out = up("down", "up", "--drain", "1s", timeout_s=1200)
    assert "SkyPilot lists nothing of it any more" in out
    assert up.bed.busy() == ""
    until(lambda: not processes.marked("up") and not _ssh_of(up), 20)


def _ssh_of(up: Up) -> list[str]:
    listed: Callable[..., str] = subprocess.check_output  # type: ignore[assignment]
    lines = str(listed(["ps", "-eo", "args"], text=True)).splitlines()
    return [line for line in lines if str(up.home.head_dir) in line]
