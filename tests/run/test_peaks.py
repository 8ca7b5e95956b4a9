"""What GPUs were seen to hold becomes a metric of the task, and corrects what is predicted for the next one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from taskworld import World

from areal_sky.core.heartbeat import read_heartbeat
from areal_sky.core.memory_terms import ModelNeed
from areal_sky.run.hub import TelemetryHub
from areal_sky.run.peaks import METRIC


def beat(hub: TelemetryHub, gib: float | None, *running: dict[str, Any], t_s: float = 100.0, device: int = 0) -> None:
    window = {
        "device": device, "name": "H100", "start_s": t_s - 1, "end_s": t_s, "utilization_mean": 0.5,
        "utilization_p95": 0.6, "utilization_max": 0.7, "memory_used_gib": gib, "memory_total_gib": 80.0,
        "temperature_celsius": 50.0, "power_watts": 300.0, "valid_frac": 1.0, "validity": "known",
    }  # fmt: skip
    body = {"replica": "c-w-0", "index": 0, "group": "w", "t_s": t_s, "gpus": 4, "windows": [window]}
    hub.ingest(read_heartbeat({**body, "running": list(running)}, t_s), t_s)


def rank(task_id: str, *gpus: int) -> dict[str, Any]:
    return {"task_id": task_id, "rank": 0, "kind": "train", "gpus": list(gpus)}


def test_the_hub_remembers_the_fullest_gpu_of_a_task() -> None:
    hub = TelemetryHub()
    for t_s, gib, device in ((100, 30.0, 0), (101, 50.0, 1), (102, 40.0, 0), (103, None, 0), (104, 70.0, 2)):
        beat(hub, gib, rank("t1", 0, 1), t_s=t_s, device=device)
    assert hub.peak_memory_gib("t1", 0.0) == 50.0  # GPU 2 is nobody's
    assert hub.peak_memory_gib("t1", 0.0) is None  # told once


def test_memory_of_a_shared_gpu_is_nobodys() -> None:
    hub = TelemetryHub()
    beat(hub, 30.0, rank("t1", 0), rank("t2", 0))
    assert hub.peak_memory_gib("t1", 0.0) is None


def test_an_earlier_run_does_not_count() -> None:
    hub = TelemetryHub()
    beat(hub, 30.0, rank("t1", 0))
    assert hub.peak_memory_gib("t1", 200.0) is None


class Hub:
    def __init__(self) -> None:
        self.peak: float | None = None

    def replica_loads(self, now_s: float) -> dict[str, Any]:
        return {}

    def peak_memory_gib(self, task_id: str, since_s: float) -> float | None:
        return self.peak


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    made.env = replace(made.env, needs=(ModelNeed("m", "train", "fsdp:d1", 1, 1, 60.0, 20.0, 6.0),))
    made.start()
    made.service._peaks._hub = Hub()
    made.tick()
    return made


def run(world: World, peak: float | None) -> dict[str, Any]:
    world.service._peaks._hub.peak = peak  # type: ignore[union-attr]
    answer = world.service.submit(world.spec(1, 1, model="m"))
    world.tick(2)
    world.finish(answer["task_id"])
    world.tick(2)
    return answer


def test_a_run_above_the_prediction_warns_the_next(world: World) -> None:
    assert run(world, 78.0)["warnings"] == []  # 60 GiB of 79: fits
    assert world.service.get("t1")["metrics"] == {METRIC: 78.0}
    assert run(world, 78.0)["warnings"] == ["m is tight: 78 GiB a GPU (20 at the least) of 79 on H100"]


def test_without_a_reading_nothing_is_learnt(world: World) -> None:
    run(world, None)
    assert world.service.get("t1")["metrics"] == {} and not world.service._peaks.corrections()
