"""Others in our Ray cluster: placement groups, actors and tasks that we did not make are seen and respected."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_raycluster import TOKENS, PretendCluster, Service, submit, until, wait_state

PROGRAM = Path(__file__).with_name("areal_like.py")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster(free_port: Callable[[], int]) -> Iterator[PretendCluster]:
    folder = Path(tempfile.mkdtemp(prefix="as-ten-", dir="/tmp"))
    made = PretendCluster(folder, free_port(), free_port())
    try:
        made.add_node("w-0")
        made.add_node("w-1")
        yield made
    finally:
        made.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def service(cluster: PretendCluster) -> Iterator[Service]:
    made = Service(cluster, cluster.folder / "state")
    try:
        until(lambda: made.sees() == 3, 60)
        yield made
    finally:
        made.kill()


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
        assert "1 of 2 fit now" in service.client().task(waits)["reason"]
        fits = submit(service, "true", bundles=4, gpus=1)
        wait_state(service, fits, "SUCCEEDED")
        assert service.client().task(waits)["state"] == "QUEUED"
    finally:
        stranger.end()
    wait_state(service, waits, "SUCCEEDED", seconds=60)  # Ray ends what a dead program held
    assert sum(free_gpus(service).values()) == 8
