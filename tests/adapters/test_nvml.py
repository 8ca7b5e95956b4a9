"""The NVML door, with the real pynvml over a C library of our own in the place of NVIDIA's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")

# Runs in a fresh process, since a process loads NVML once and looks up LD_LIBRARY_PATH only when it starts.
SCRIPT = """
import dataclasses, json, os, pathlib, sys
from areal_sky.adapters.nvml import open_reader
reader, reason = open_reader()
reads = []
if reader is not None:
    reads.append(reader.read(5.0))
    lost = os.environ.get("FAKE_NVML_LOST")
    if lost:
        pathlib.Path(lost).touch(); reads.append(reader.read(6.0))
        pathlib.Path(lost).unlink(); reads.append(reader.read(7.0))
    reader.close()
    reader.close()
print(json.dumps({"reason": reason, "reads": [[dataclasses.asdict(s) for s in read] for read in reads]}))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a freshly built libnvidia-ml.so.1."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    target = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(target), str(SOURCE)], check=True)
    return folder


@pytest.fixture
def read(library: Path) -> Callable[..., dict[str, Any]]:
    def run(**env: str) -> dict[str, Any]:
        answer = subprocess.run(
            [sys.executable, "-c", SCRIPT], env={**os.environ, "LD_LIBRARY_PATH": str(library), **env},
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        return json.loads(answer.stdout)

    return run


def test_values_of_a_working_gpu(read):
    answer = read(FAKE_NVML_GPUS="1")
    assert answer == {
        "reason": "",
        "reads": [[{
            "device": 0, "t_s": 5.0, "name": "NVIDIA H100 80GB HBM3", "utilization_frac": 0.73,
            "memory_used_gib": 10.0, "memory_total_gib": 80.0,  # version 2, without the driver's own reserve
            "temperature_celsius": 61.0, "power_watts": 312.5, "validity": "known", "error": "",
        }]],
    }  # fmt: skip


def test_what_a_gpu_does_not_support_is_none_and_unknown_not_zero(read):
    gpu = read()["reads"][0][1]
    assert (gpu["utilization_frac"], gpu["power_watts"], gpu["validity"]) == (None, None, "unknown")
    assert gpu["error"] == "utilization: Not Supported; power: Not Supported"
    assert (gpu["memory_used_gib"], gpu["temperature_celsius"]) == (20.0, 61.0)  # by the old call


def test_a_lost_gpu_is_its_own_state_and_may_come_back(read, tmp_path):
    before, during, after = read(FAKE_NVML_LOST=str(tmp_path / "lost"))["reads"]
    assert [g["validity"] for g in before] == ["known", "unknown", "known"]
    assert [g["validity"] for g in during] == ["known", "unknown", "lost"]
    assert during[:2] == [g | {"t_s": 6.0} for g in before[:2]]  # the neighbours do not notice
    assert during[2]["error"] == "GPU is lost"
    assert during[2]["name"] == "NVIDIA H100 80GB HBM3"
    assert during[2]["utilization_frac"] is during[2]["memory_used_gib"] is None
    assert after[2] == before[2] | {"t_s": 7.0}


def test_a_gpu_that_may_not_be_opened_is_unknown_not_lost(read):
    gpu = read(FAKE_NVML_GPUS="4")["reads"][0][3]
    assert (gpu["validity"], gpu["error"]) == ("unknown", "Insufficient Permissions")


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"FAKE_NVML_GPUS": "0"}, "NVML sees no GPU on this machine"),
        ({"FAKE_NVML_INIT": "9"}, "NVML does not start: Driver Not Loaded"),
        ({"FAKE_NVML_INIT": "18"}, "NVML does not start: RM has detected an NVML/RM version mismatch."),
    ],
)
def test_a_machine_without_working_gpus_says_why(read, env, reason):
    assert read(**env) == {"reason": reason, "reads": []}


def test_a_machine_without_the_library_says_so(tmp_path):
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has NVIDIA's driver")
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    answer = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout) == {"reason": "NVML does not start: NVML Shared Library Not Found", "reads": []}


def test_the_public_call_speaks_of_the_same_gpus(library):
    script = "import json; from areal_sky.telemetry import get_gpu_utilization as g; print(json.dumps(g()))"
    answer = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "LD_LIBRARY_PATH": str(library)},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    gpus = json.loads(answer.stdout)
    assert [g["device"] for g in gpus] == [0, 1, 2]
    assert [g["utilization"] for g in gpus] == [73.0, None, 73.0]
    assert [g["memory_allocated"] for g in gpus] == [None] * 3  # this process has no PyTorch
    assert gpus[0]["memory_used"] == 10.0 and gpus[0]["power"] == 312.5 and gpus[0]["age"] < 5
