"""One controller per cluster, which those who ask whether there is one must not keep from starting."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from areal_sky.errors import AlreadyExists, ArealSkyError
from areal_sky.home import ClusterHome, locked
from areal_sky.run.supervise import controller_runs, run_controller


@pytest.fixture
def cluster(tmp_path: Path) -> ClusterHome:
    return ClusterHome("c", tmp_path / "c")


def test_a_controller_starts_though_somebody_asks_just_then_whether_one_runs(cluster: ClusterHome) -> None:
    asks = threading.Event()

    def ask() -> None:
        with locked(cluster.dir / "controller.lock"):
            asks.set()
            time.sleep(0.2)

    asker = threading.Thread(target=ask)
    asker.start()
    asks.wait()
    with pytest.raises(ArealSkyError) as refused:
        run_controller(cluster, threading.Event())
    asker.join()
    assert not isinstance(refused.value, AlreadyExists)  # it got as far as its plan, which is not there


def test_a_second_controller_is_refused(cluster: ClusterHome) -> None:
    with locked(cluster.dir / "controller.lock"):
        assert controller_runs(cluster)
        with pytest.raises(AlreadyExists, match="the controller of 'c' already runs"):
            run_controller(cluster, threading.Event())
    assert not controller_runs(cluster)
