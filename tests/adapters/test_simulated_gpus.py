"""Pretend GPUs: their load follows processes that really run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from areal_sky.adapters import proctree
from areal_sky.adapters.simulated_gpus import IDLE_CELSIUS, IDLE_WATTS, SimulatedGpuReader, running_ranks
from areal_sky.core.model import NodeShape
from areal_sky.core.telemetry import Validity

SHAPE = NodeShape(gpus=4, cpus=4, accelerator="L40S", gpu_memory_gib=48)
SPIN = f"exec {sys.executable} -c 'while True: pass'"
SLEEP = "exec sleep 600"

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a shell command as a task would be, and declares it as its runner would."""
    begun: list[subprocess.Popen[bytes]] = []
    (tmp_path / "running").mkdir()

    def run(task_id: str, command: str, gpus: list[int], rank: int = 0, kind: str = "rollout"):
        process = subprocess.Popen(["/bin/sh", "-c", command], start_new_session=True)
        begun.append(process)
        about = {"task_id": task_id, "rank": rank, "gpus": gpus, "pid": process.pid, "kind": kind}
        (tmp_path / "running" / f"{task_id}.{rank}.json").write_text(json.dumps(about))
        return process

    yield run
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def loads_after(reader: SimulatedGpuReader, seconds: float) -> list[float]:
    reader.read(time.time())
    time.sleep(seconds)
    return [s.utilization_frac for s in reader.read(time.time())]


def test_a_node_without_tasks_is_known_to_be_idle(tmp_path):
    samples = SimulatedGpuReader(tmp_path, SHAPE).read(5.0)
    assert [(s.device, s.utilization_frac, s.memory_used_gib, s.validity) for s in samples] == [
        (i, 0.0, 0.0, Validity.KNOWN) for i in range(4)
    ]
    assert {(s.name, s.memory_total_gib) for s in samples} == {("L40S (simulated)", 48)}


def test_load_follows_what_the_tasks_do_on_their_own_gpus(tmp_path, start):
    start("spin", SPIN, gpus=[0, 2])
    start("sleep", SLEEP, gpus=[1])
    time.sleep(0.3)
    loads = loads_after(SimulatedGpuReader(tmp_path, SHAPE), 1.0)
    assert loads[0] == loads[2] > 0.8
    assert loads[1] < 0.2
    assert loads[3] == 0.0


def test_busy_is_busy_even_when_many_share_a_core(tmp_path, start):
    # More spinning tasks than cores: each gets a part of a core, and none of them is idle.
    count = 3 * (os.cpu_count() or 1)
    for i in range(count):
        start(f"t{i}", SPIN, gpus=[i])
    time.sleep(1.0)
    loads = loads_after(SimulatedGpuReader(tmp_path, NodeShape(gpus=count)), 1.5)
    assert min(loads) > 0.8


def test_half_load_is_seen_as_such(tmp_path, start):
    code = "import time\nwhile True:\n  end=time.time()+.05\n  while time.time()<end: pass\n  time.sleep(.05)"
    (tmp_path / "half.py").write_text(code)
    start("half", f"exec {sys.executable} {tmp_path / 'half.py'}", gpus=[0])
    time.sleep(0.3)
    assert 0.3 < loads_after(SimulatedGpuReader(tmp_path, SHAPE), 2.0)[0] < 0.8


def test_children_count_and_so_does_their_memory(tmp_path, start):
    eat = "b = bytearray(200 << 20); import time; end = time.time() + 600\nwhile time.time() < end: pass"
    (tmp_path / "eat.py").write_text(eat)
    start("family", f"{sys.executable} {tmp_path / 'eat.py'} & wait", gpus=[0, 1])
    time.sleep(1.0)
    reader = SimulatedGpuReader(tmp_path, SHAPE)
    assert loads_after(reader, 0.5)[0] > 0.8
    used = [s.memory_used_gib for s in reader.read(time.time())]
    assert 0.09 < used[0] == used[1] < 0.2  # some 210 MiB over two GPUs
    assert used[2] == 0.0


def test_two_fractions_on_one_gpu_add_up_to_one_at_most(tmp_path, start):
    start("a", SPIN, gpus=[0])
    start("b", SPIN, gpus=[0])
    time.sleep(0.3)
    assert loads_after(SimulatedGpuReader(tmp_path, SHAPE), 0.5)[0] == 1.0


def test_a_dead_task_leaves_no_load_though_its_file_stays(tmp_path, start):
    process = start("dies", SPIN, gpus=[0])
    reader = SimulatedGpuReader(tmp_path, SHAPE)
    assert loads_after(reader, 0.5)[0] > 0.5
    os.killpg(process.pid, signal.SIGKILL)
    time.sleep(0.2)  # dead but not waited for: a zombie
    assert reader.read(time.time())[0].utilization_frac == 0.0
    process.wait()
    assert reader.read(time.time())[0].memory_used_gib == 0.0


def test_the_first_read_spans_the_tasks_life(tmp_path, start):
    start("spin", SPIN, gpus=[0])
    time.sleep(1.0)
    assert SimulatedGpuReader(tmp_path, SHAPE).read(time.time())[0].utilization_frac > 0.5


def test_damaged_files_are_passed_over(tmp_path, start):
    start("good", SLEEP, gpus=[1], kind="train")
    for name, text in {"half": '{"task_id": "x"', "list": "[]", "gone": '{"task_id":"x","rank":0,"gpus":[0]}'}.items():
        (tmp_path / "running" / f"{name}.json").write_text(text)
    assert [(r.task_id, r.kind, r.gpus) for r in running_ranks(tmp_path)] == [("good", "train", (1,))]
    assert len(SimulatedGpuReader(tmp_path, SHAPE).read(1.0)) == 4
    assert running_ranks(tmp_path / "nowhere") == ()


def test_temperature_and_power_rise_with_load_and_a_clock_set_back_changes_nothing(tmp_path, start):
    start("spin", SPIN, gpus=[0])
    reader = SimulatedGpuReader(tmp_path, SHAPE)
    reader.read(time.time())
    time.sleep(1.0)
    hot, *_, cold = reader.read(now_s := time.time())
    assert hot.temperature_celsius > IDLE_CELSIUS + 0.5 and hot.power_watts > IDLE_WATTS + 50
    assert (cold.temperature_celsius, cold.power_watts) == (IDLE_CELSIUS, IDLE_WATTS)
    again = reader.read(now_s - 3600)[0]
    assert (again.utilization_frac, again.temperature_celsius) == (hot.utilization_frac, hot.temperature_celsius)


def test_without_scheduler_statistics_cpu_time_tells_the_load(tmp_path, start, monkeypatch):
    monkeypatch.setattr(proctree, "PROC", tmp_path / "no-proc")
    start("family", f"{sys.executable} -c 'while True: pass' & wait", gpus=[0])
    time.sleep(0.5)
    assert loads_after(SimulatedGpuReader(tmp_path, SHAPE), 1.5)[0] > 0.2
