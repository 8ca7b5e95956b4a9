"""The NVML door, with the real pynvml over a C library of our own in the place of NVIDIA's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Runs in a fresh process, since a process loads NVML once and looks up LD_LIBRARY_PATH only when it starts.
# Each line of standard input is a script for the library; each is answered with one read.
SCRIPT = """
import json, os, pathlib, sys
from areal_sky.adapters import nvml, nvmldevice
from areal_sky.adapters.lanes import in_relays
from areal_sky.adapters.nvml import open_reader
nvmldevice.SLOW_S = nvmldevice.RARE_S = nvml.XIDS_S = nvml.MIG_S = 0.0  # all, each time
nvmldevice.TRAFFIC_S = float(os.environ.get("TRAFFIC_S", "0"))
reader, reason = open_reader()
print(json.dumps(reason), flush=True)
for i, line in enumerate(sys.stdin if reader else ()):
    pathlib.Path(os.environ["FAKE_NVML_SCRIPT"]).write_text(json.loads(line))
    print(json.dumps([s._asdict() for s in in_relays(lambda: reader.read(5.0 + i), reader.relieve)]), flush=True)
if reader:
    reader.close()
    reader.close()
"""
H100 = {
    "device": 0, "t_s": 5.0, "name": "NVIDIA H100 80GB HBM3", "utilization_frac": 0.73,
    "memory_used_gib": 10.0, "memory_total_gib": 80.0,  # version 2, without the driver's own reserve
    "temperature_celsius": 61.0, "power_watts": 312.5, "validity": "known", "error": "",
    "uuid": "GPU-00000000-0000-0000-0000-000000000000", "sm_clock_mhz": 1980.0, "memory_clock_mhz": 2619.0,
    "throttle": [], "ecc_uncorrected": 0, "ecc_corrected": 0, "pcie_rx_mib_s": None, "pcie_tx_mib_s": None,
    "nvlink_mib_s": None, "xid": None, "processes": [], "measured": [],
}  # fmt: skip


class Machine:
    """A process with the real pynvml over the stand-in library."""

    def __init__(self, library: Path, folder: Path, **env: str):
        script = folder / "script"
        env = {**os.environ, "LD_LIBRARY_PATH": str(library), "FAKE_NVML_SCRIPT": str(script), **env}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.reason = json.loads(self.process.stdout.readline())

    def read(self, *script: str) -> list[dict[str, Any]]:
        self.process.stdin.write(json.dumps("\n".join(script)) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate(timeout=60)
        assert self.process.returncode == 0


@pytest.fixture
def machine(fake_nvml: Path, tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    made: list[Machine] = []

    def make(**env: str) -> Machine:
        made.append(Machine(fake_nvml, tmp_path, **env))
        return made[-1]

    yield make
    for m in made:
        m.close()


def test_values_of_a_working_gpu(machine):
    (gpu,) = machine(FAKE_NVML_GPUS="1").read()
    assert gpu == H100 | {"t_s": pytest.approx(5.0, abs=1.0)}


def test_what_a_gpu_does_not_support_is_none_and_unknown_not_zero(machine):
    m = machine(FAKE_NVML_GPUS="2")
    names = (
        "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage", "power_average", "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetCurrentClocksThrottleReasons", "ecc_corrected", "ecc_uncorrected",
        "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlEventSetWait_v2", "nvmlDeviceGetMigMode",
    )  # fmt: skip
    first, second = m.read("1 nvmlDeviceGetMemoryInfo_v2 error 13", *(f"1 {name} error 3" for name in names))
    assert (second["utilization_frac"], second["power_watts"], second["validity"]) == (None, None, "unknown")
    assert second["error"] == "utilization: Not Supported; power: Not Supported"
    assert (second["memory_used_gib"], second["temperature_celsius"]) == (11.0, 61.0)  # by the old call
    told = ("sm_clock_mhz", "memory_clock_mhz", "throttle", "ecc_corrected", "ecc_uncorrected", "xid")
    assert [second[f] for f in told] == [None] * 6
    assert first["validity"] == "known" and first["power_watts"] == 312.5


def test_a_lost_gpu_is_its_own_state_and_may_come_back(machine):
    m = machine()
    before, during, after = m.read(), m.read("2 * error 15"), m.read()
    assert [g["validity"] for g in before + during + after] == ["known"] * 5 + ["lost"] + ["known"] * 3
    assert [during[2][f] for f in ("error", "name", "uuid")] == ["GPU is lost", H100["name"], before[2]["uuid"]]
    assert all(during[2][f] is None for f in ("utilization_frac", "memory_used_gib", "sm_clock_mhz", "ecc_corrected"))
    assert during[0]["utilization_frac"] == 0.73  # the neighbours do not notice
    assert after[2]["utilization_frac"] == 0.73


@pytest.mark.parametrize(
    ("code", "validity", "words"),
    [
        (9, "lost", "Driver Not Loaded"), (16, "lost", "requires restart"), (18, "lost", "version mismatch"),
        (4, "unknown", "Insufficient Permissions"), (999, "unknown", "Unknown Error"),
    ],
)  # fmt: skip
def test_each_failure_of_a_device_says_what_it_is(machine, code, validity, words):
    m = machine(FAKE_NVML_GPUS="2")
    first, second = m.read(f"1 * error {code}")
    assert (first["validity"], second["validity"]) == ("known", validity)
    assert words.lower() in second["error"].lower()


def test_a_call_that_hangs_is_stale_and_the_others_go_on(machine):
    m = machine(FAKE_NVML_GPUS="3")
    m.read()
    hung = [m.read("1 nvmlDeviceGetTemperature delay_ms 1500") for _ in range(3)]
    assert [g["validity"] for g in hung[2]] == ["known", "stale", "known"]
    assert "has not answered for" in hung[2][1]["error"] and hung[2][1]["utilization_frac"] is None
    assert [g["t_s"] for g in hung[2]][::2] == pytest.approx([8.0, 8.0], abs=0.9)
    until = time.monotonic() + 10
    while m.read()[1]["validity"] != "known":  # and it comes back when its call does
        assert time.monotonic() < until


def test_the_drivers_own_measurements_are_all_taken_and_counted_once(machine):
    m = machine(FAKE_NVML_GPUS="1")
    now_us = int(time.time() * 1e6)
    lines = [f"0 {now_us + k} sample {10 * k}" for k in range(1, 6)]
    assert m.read(*lines[:1])[0]["utilization_frac"] == 0.1
    (gpu,) = m.read(*lines[:4])
    assert [load for _, load in gpu["measured"]] == [0.2, 0.3, 0.4] and gpu["utilization_frac"] == 0.4
    (gpu,) = m.read(*lines[:4])
    assert (gpu["measured"], gpu["utilization_frac"], gpu["validity"]) == ([], 0.4, "known")
    assert [load for _, load in m.read(*lines)[0]["measured"]] == [0.5]


def test_throttling_ecc_traffic_xids_and_processes(machine):
    m = machine(FAKE_NVML_GPUS="2")
    m.read("1 field_us value 1000000", "1 pcie_rx_bytes value 1048576", "1 nvlink_tx_kib value 0")
    _, gpu = m.read(
        "1 field_us value 3000000", "1 pcie_rx_bytes value 22020096", "1 nvlink_tx_kib value 4096",
        "1 throttle value 69", "1 ecc_uncorrected value 7", "1 - xid 79", "1 4242 pid_mib 2048",
    )  # fmt: skip
    assert (gpu["pcie_rx_mib_s"], gpu["pcie_tx_mib_s"], gpu["nvlink_mib_s"]) == (10.0, 0.0, 2.0)
    assert gpu["throttle"] == ["sw_power_cap", "hw_thermal"]  # idle (1) is no throttling
    assert (gpu["ecc_uncorrected"], gpu["xid"], gpu["processes"]) == (7, 79, [[4242, 2.0]])
    _, gpu = m.read("1 field_us value 4000000", "1 pcie_rx_bytes value 0", "1 - xid 79")
    assert (gpu["pcie_rx_mib_s"], gpu["xid"]) == (None, None)  # a counter that starts anew; an XID is told once


def test_traffic_is_read_less_often_and_repeated_meanwhile(machine):
    m = machine(FAKE_NVML_GPUS="1", TRAFFIC_S="3600")
    (gpu,) = m.read("0 field_us value 1000000", "0 pcie_rx_bytes value 0")
    (gpu,) = m.read("0 field_us value 2000000", "0 pcie_rx_bytes value 1048576", "0 ecc_uncorrected value 7")
    assert (gpu["pcie_rx_mib_s"], gpu["ecc_uncorrected"], gpu["power_watts"]) == (None, 7, 312.5)  # it is not due
    m = machine(FAKE_NVML_GPUS="1", TRAFFIC_S="0.3")
    m.read("0 field_us value 1000000", "0 pcie_rx_bytes value 0")
    later = ("0 field_us value 2000000", "0 pcie_rx_bytes value 1048576")
    until = time.monotonic() + 10
    while (m.read(*later)[0]["pcie_rx_mib_s"]) != 1.0:
        assert time.monotonic() < until
    assert m.read("0 field_us value 3000000", "0 pcie_rx_bytes value 9948576")[0]["pcie_rx_mib_s"] == 1.0


def test_mig_instances_are_devices_that_come_and_go(machine):
    m = machine(FAKE_NVML_GPUS="2")
    m.read("1 - mig 2")
    gpus = m.read("1 - mig 2", "200 used_mib value 2048", "200 - pid_mib 0")
    assert [g["device"] for g in gpus] == [0, 1, 72, 73]
    assert gpus[2]["name"].endswith("MIG 1g.10gb") and gpus[2]["uuid"].startswith("MIG-")
    assert (gpus[2]["memory_used_gib"], gpus[3]["memory_used_gib"]) == (2.0, 10.0)
    assert (gpus[2]["validity"], gpus[2]["utilization_frac"]) == ("unknown", None)  # never 0
    m.read()
    assert [g["device"] for g in m.read()] == [0, 1]


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"FAKE_NVML_GPUS": "0"}, "NVML sees no GPU on this machine"),
        ({"FAKE_NVML_INIT": "9"}, "NVML does not start: Driver Not Loaded"),
        ({"FAKE_NVML_INIT": "18"}, "NVML does not start: RM has detected an NVML/RM version mismatch."),
    ],
)
def test_a_machine_without_working_gpus_says_why(machine, env, reason):
    assert machine(**env).reason == reason


def test_a_machine_without_the_library_says_so(tmp_path):
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has NVIDIA's driver")
    assert Machine(tmp_path, tmp_path).reason == "NVML does not start: NVML Shared Library Not Found"


def test_the_public_call_speaks_of_the_same_gpus(fake_nvml, tmp_path):
    (tmp_path / "script").write_text("1 nvmlDeviceGetUtilizationRates error 3")
    env = {**os.environ, "LD_LIBRARY_PATH": str(fake_nvml), "FAKE_NVML_SCRIPT": str(tmp_path / "script")}
    script = "import json; from areal_sky.telemetry import get_gpu_utilization as g; print(json.dumps(g()))"
    answer = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True, timeout=60
    )
    gpus = json.loads(answer.stdout)
    assert [g["device"] for g in gpus] == [0, 1, 2]
    assert [g["utilization"] for g in gpus] == [73.0, None, 73.0]
    assert [g["memory_allocated"] for g in gpus] == [None] * 3  # this process has no PyTorch
    assert gpus[0]["memory_used"] == 10.0 and gpus[0]["power"] == 312.5 and gpus[0]["age"] < 5
