"""Others in our Ray cluster: placement groups, actors and tasks that we did not make are seen and respected."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_raycluster import TOKENS, PretendCluster, Service, served, submit, text, two_nodes, until, wait_state

from areal_sky.core.model import Bundle
from areal_sky.core.taskmodel import TaskSpec

PROGRAM = Path(__file__).with_name("areal_like.py")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster(free_port: Callable[[], int]) -> Iterator[PretendCluster]:
    with two_nodes(free_port) as made:
        yield made


@pytest.fixture(scope="module")
def service(cluster: PretendCluster) -> Iterator[Service]:
    with served(cluster) as made:
        yield made


class Stranger:
    """The program, started by nobody's task. `go(n)` lets it take its n-th step."""

    def __init__(self, cluster: PretendCluster, folder: Path, *steps: str):
        self.folder, self.cluster = folder, cluster
        folder.mkdir()
        env = os.environ | {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKENS["ray"], "RAY_ADDRESS": cluster.address,
        }  # fmt: skip
        self.log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), *steps], env=env, stdout=self.log, stderr=self.log,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def go(self, n: int) -> None:
        (self.folder / f"go{n}").touch()
        until(lambda: (self.folder / "log").read_text().count("made ") >= n, 90)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self.log.close()


def free_gpus(service: Service) -> dict[str, float]:
    return {v.replica: v.free_gpus for v in service.client().view().nodes if v.group == "w"}


def test_groups_actors_and_tasks_of_strangers_take_their_room(service: Service, cluster: PretendCluster) -> None:
    stranger = Stranger(cluster, cluster.folder / "stranger", "separate:1x2", "actor:1", "task:1")
    try:
        for n, left in ((1, 6), (2, 5), (3, 4)):
            stranger.go(n)
            until(lambda left=left: sum(free_gpus(service).values()) == left)
        waits = submit(service, "echo ran", bundles=2, gpus=4)
        assert " of 2 fit now" in service.client().task(waits)["reason"]
        fits = submit(service, "true", bundles=4, gpus=1)
        wait_state(service, fits, "SUCCEEDED")
        assert service.client().task(waits)["state"] == "QUEUED"
    finally:
        stranger.end()
    wait_state(service, waits, "SUCCEEDED", seconds=60)  # Ray ends what a dead program held
    until(lambda: sum(free_gpus(service).values()) == 8)


def start_driver(service: Service, folder: Path, backends: str, *steps: str) -> str:
    folder.mkdir()
    spec = TaskSpec(
        "driver", command=f"exec {sys.executable} {PROGRAM} {folder} {' '.join(steps)}", bundle=Bundle(0, 1, 0.5),
        backends=backends,
    )  # fmt: skip
    return service.client("submit").submit(spec)["task_id"]


def go(service: Service, task_id: str, folder: Path, n: int) -> None:
    (folder / f"go{n}").touch()
    until(lambda: text(service, task_id).count("made ") >= n or wait_state(service, task_id, "RUNNING"), 90)
    until(lambda: text(service, task_id).count("made ") >= n, 90)


def test_a_run_is_admitted_whole_and_never_counted_twice(service: Service, cluster: PretendCluster) -> None:
    """6 of 8 GPUs: kept from admission on, whether the run has made its groups or not; two are left all the time."""
    folder = cluster.folder / "run"
    steps = ("separate:1x2", "shared:2", "actor:1", "task:1")  # rollout apart, trainers in one group, and more
    run = start_driver(service, folder, "sglang:d1t2+fsdp:d4", *steps)
    wait_state(service, run, "RUNNING", seconds=60)
    until(lambda: "connected" in text(service, run), 60)
    two = submit(service, "sleep 600", bundles=2, gpus=1)  # takes what is left
    wait_state(service, two, "RUNNING")
    greedy = submit(service, "true", gpus=1)  # would take what the run has not made yet
    for n in range(1, len(steps) + 1):
        assert service.client().task(greedy)["state"] == "QUEUED"
        assert sum(free_gpus(service).values()) == 0
        go(service, run, folder, n)  # each group is there within the 30 s that AReaL waits: Ray had the room
    time.sleep(1.0)
    assert service.client().task(greedy)["state"] == "QUEUED"
    assert sum(free_gpus(service).values()) == 0
    service.client("submit").cancel(two)
    wait_state(service, greedy, "SUCCEEDED")
    until(lambda: sum(free_gpus(service).values()) == 2)  # not four, not none: the run holds six, once
    service.kill()
    service.start()  # a new process of the head knows it again
    until(lambda: service.sees() == 3, 60)
    assert sum(free_gpus(service).values()) == 2
    service.client("submit").cancel(run)
    wait_state(service, run, "CANCELLED", seconds=60)
    until(lambda: sum(free_gpus(service).values()) == 8, 60)


def test_a_second_run_waits_until_all_of_it_fits(service: Service, cluster: PretendCluster) -> None:
    first, second = cluster.folder / "first", cluster.folder / "second"
    one = start_driver(service, first, "fsdp:d5", "shared:5")
    wait_state(service, one, "RUNNING", seconds=60)
    two = start_driver(service, second, "vllm:d2t2", "separate:2x2")
    assert "GPUs" in service.client().task(two)["reason"]
    go(service, one, first, 1)
    assert service.client().task(two)["state"] == "QUEUED"
    service.client("submit").cancel(one)
    wait_state(service, two, "RUNNING", seconds=60)
    go(service, two, second, 1)
    service.client("submit").cancel(two)
    wait_state(service, two, "CANCELLED", seconds=60)
