"""`get_gpu_utilization` on a pretend node and without any GPU; over NVML it is tested beside that door."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from areal_sky import telemetry
from areal_sky.adapters import nvml
from areal_sky.adapters.simulated_gpus import marks
from areal_sky.core.model import NodeShape
from areal_sky.core.nodeenv import NodeEnv
from areal_sky.errors import InvalidInput


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Each test opens a reader of its own."""
    monkeypatch.setattr(telemetry, "_reader", None)


def test_on_a_pretend_node_it_tells_of_the_pretend_gpus(tmp_path, monkeypatch):
    env = NodeEnv("c", "g", "c-g-0", 0, "h", shape=NodeShape(gpus=2, accelerator="V100"), simulated_gpus=True)
    for key, value in env.to_env().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("AREAL_SKY_NODE_DIR", str(tmp_path))
    (tmp_path / "running").mkdir()
    spin = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        about = {"task_id": "t", "rank": 0, "gpus": [1], "pid": spin.pid, "kind": "train"}
        (tmp_path / "running" / "t.0.json").write_text(json.dumps(about))
        gpus = telemetry.get_gpu_utilization()
    finally:
        spin.kill()
        spin.wait()
    assert [(g["device"], g["name"], g["validity"]) for g in gpus] == [
        (0, "V100 (simulated)", "known"), (1, "V100 (simulated)", "known"),
    ]  # fmt: skip
    assert gpus[0]["utilization"] == 0.0
    assert 50 < gpus[1]["utilization"] <= 100
    assert {"memory_allocated", "memory_cached"} <= set(gpus[0])


def test_a_task_may_ask_to_be_watched_closely(tmp_path, monkeypatch):
    monkeypatch.delenv("AREAL_SKY_TASK_ID", raising=False)
    monkeypatch.setenv("AREAL_SKY_NODE_DIR", str(tmp_path))
    with pytest.raises(InvalidInput, match="no task of areal_sky"):
        telemetry.watch_closely()
    monkeypatch.setenv("AREAL_SKY_TASK_ID", "t1")
    telemetry.watch_closely()
    assert marks(tmp_path) == {"t1"}
    telemetry.watch_closely(False)
    telemetry.watch_closely(False)
    assert marks(tmp_path) == frozenset()


def test_without_nvidia_there_are_no_gpus(monkeypatch):
    monkeypatch.delenv("AREAL_SKY_NODE_DIR", raising=False)
    monkeypatch.setattr(nvml, "open_reader", lambda: (None, "NVML does not start"))
    assert telemetry.get_gpu_utilization() == []


def test_a_real_node_does_not_pretend(tmp_path, monkeypatch):
    for key, value in NodeEnv("c", "g", "c-g-0", 0, "h", shape=NodeShape(gpus=2)).to_env().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("AREAL_SKY_NODE_DIR", str(tmp_path))
    monkeypatch.setattr(nvml, "open_reader", lambda: (None, ""))
    assert telemetry.get_gpu_utilization() == []
