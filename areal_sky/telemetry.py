"""GPU telemetry of this machine, as public Python API."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from areal_sky.adapters.lanes import in_relays
from areal_sky.adapters.ports import GpuReader
from areal_sky.core.nodeenv import NodeEnv
from areal_sky.core.telemetry import GpuSample
from areal_sky.errors import ArealSkyError, InvalidInput

__all__ = ["get_gpu_utilization", "watch_closely"]

# A pretend GPU's load is measured between two reads; the first call makes both, this far apart.
FIRST_READ_S = 0.1

_lock = threading.Lock()
_reader: GpuReader | None = None


def get_gpu_utilization() -> list[dict[str, Any]]:
    """Every GPU of this machine as a dict; an empty list where there is none (or no NVIDIA driver). Never raises.

    A value is None where it is not known: N/A is not 0.

    - `device`: the machine's number of the GPU, as nvidia-smi counts
    - `utilization`: percent, 0..100: the share of the driver's last 1/6 to 1 s in which a kernel ran
    - `memory_allocated`, `memory_cached`: GiB that the PyTorch of this process has in tensors, and has reserved in all;
      None unless this process uses the GPU through PyTorch
    - `memory_used`, `memory_total`: GiB in use by all processes, and built in
    - `name`, `uuid`, `temperature` (Celsius), `power` (watts), `sm_clock`, `memory_clock` (MHz), `throttle` (names of
      what holds the clocks down), `ecc_uncorrected`, `ecc_corrected` (counts since the driver was loaded), `pcie_rx`,
      `pcie_tx`, `nvlink` (MiB/s), `xid` (the driver's error number, once), `processes` (pid -> GiB)
    - `validity`: `known`; `unknown` (no utilization is told); `stale` (the driver does not answer); `lost` (the GPU is
      gone, or its driver); `error` says why
    - `age`: seconds since it was read

    On a node of `infra: local` these are the node's pretend GPUs.
    """
    from areal_sky.adapters.torch_memory import torch_memory

    with _lock:
        samples = _read()
    torch = torch_memory()
    now_s = time.time()
    return [
        {
            "device": s.device,
            "utilization": None if s.utilization_frac is None else round(s.utilization_frac * 100, 1),
            "memory_allocated": torch[s.device].allocated_gib if s.device in torch else None,
            "memory_cached": torch[s.device].reserved_gib if s.device in torch else None,
            "name": s.name,
            "memory_used": s.memory_used_gib,
            "memory_total": s.memory_total_gib,
            "temperature": s.temperature_celsius,
            "power": s.power_watts,
            "validity": s.validity.value,
            "error": s.error,
            "uuid": s.uuid,
            "sm_clock": s.sm_clock_mhz,
            "memory_clock": s.memory_clock_mhz,
            "throttle": None if s.throttle is None else list(s.throttle),
            "ecc_uncorrected": s.ecc_uncorrected,
            "ecc_corrected": s.ecc_corrected,
            "pcie_rx": s.pcie_rx_mib_s,
            "pcie_tx": s.pcie_tx_mib_s,
            "nvlink": s.nvlink_mib_s,
            "xid": s.xid,
            "processes": dict(s.processes),
            "age": max(0.0, now_s - s.t_s),
        }
        for s in samples
    ]


def watch_closely(on: bool = True) -> None:
    """From inside a task: let its node read the GPUs as often as for a training task, or no longer.

    Raises InvalidInput outside of a task.
    """
    node_dir, task_id = os.environ.get("AREAL_SKY_NODE_DIR"), os.environ.get("AREAL_SKY_TASK_ID")
    if not node_dir or not task_id:
        raise InvalidInput("watch_closely: this process is no task of areal_sky")
    mark = Path(node_dir) / "watched" / task_id
    if on:
        mark.parent.mkdir(mode=0o700, exist_ok=True)
        mark.touch()
    else:
        mark.unlink(missing_ok=True)


def _read() -> list[GpuSample]:
    global _reader
    if _reader is None:
        _reader, pretend = _open()
        if _reader is not None and pretend:
            _reader.read(time.time())
            time.sleep(FIRST_READ_S)
    reader = _reader
    return [] if reader is None else in_relays(lambda: list(reader.read(time.time())), reader.relieve)


def _open() -> tuple[GpuReader | None, bool]:
    """This machine's reader, and whether its GPUs are pretend ones."""
    node_dir = os.environ.get("AREAL_SKY_NODE_DIR")
    if node_dir:
        try:
            env = NodeEnv.from_env(os.environ)
        except ArealSkyError:
            env = None
        if env is not None and env.simulated_gpus and env.shape is not None:
            from areal_sky.adapters.simulated_gpus import SimulatedGpuReader

            return SimulatedGpuReader(node_dir, env.shape), True
    from areal_sky.adapters import nvml

    return nvml.open_reader()[0], False
