"""What the node's agent costs with 8 GPUs at 10 Hz, beside nvitop and gpustat over the same library.

The library is the tests' stand-in for NVIDIA's (tests/adapters/fake_nvml.c) under the real pynvml: each call waits for
0.05 to 1 ms, small waits as likely as large ones, and utilization is measured anew each 167 ms as by a real driver.
The agent is the one that `areal-sky node` runs: windows, heartbeats over HTTP, everything. A training task is on the
node, so it samples each 100 ms.

The peers read what they have of a sample's fields (utilization, memory, temperature, power, clocks, ECC; not the
processes, which are dear) each 100 ms. We ask for memory each time, and once a second for the rest (every two for
traffic, which they do not read), the driver's measurements of utilization among it: all of them come, with their times.
`ratio_vs_nvitop_same_calls` lets nvitop keep to these times too. Ratios are of CPU time per round of samples, since a
peer may not keep up with the rate.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from areal_sky.adapters.processes import rss_mib
from areal_sky.core.model import NodeShape
from areal_sky.core.nodeenv import NodeEnv
from areal_sky.core.telemetry import GpuSample
from tests.adapters.fakenvml import build, compiler

GPUS = 8
RATE_HZ = 10
WARM_S, MEASURED_S = 3.0, 20.0


def why_not() -> str | None:
    return None if compiler() else "it needs a C compiler for the stand-in of NVIDIA's library"


def measure() -> dict[str, float | None]:
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        env = {
            **os.environ, "LD_LIBRARY_PATH": str(library), "FAKE_NVML_GPUS": str(GPUS),
            "FAKE_NVML_CALL_US": "50:1000", "FAKE_NVML_WINDOW_MS": "167",
        }  # fmt: skip
        head = HTTPServer(("127.0.0.1", 0), _Head)
        threading.Thread(target=head.serve_forever, daemon=True).start()
        ours = _child(env, "agent", folder, str(head.server_port))
        head.shutdown()
        nvitop = _child(env, "nvitop") if importlib.util.find_spec("nvitop") else None
        nvitop_same = _child(env, "nvitop_same_calls") if nvitop else None
        gpustat = _child(env, "gpustat") if importlib.util.find_spec("gpustat") else None
    return {
        "cpu_frac_of_core": ours["cpu_frac"],
        "rss_mib": ours["rss_mib"],
        "p99_late_ms": ours["p99_late_ms"],
        "ratio_vs_nvitop": _ratio(ours, nvitop),
        "ratio_vs_gpustat": _ratio(ours, gpustat),
        "ratio_vs_nvitop_same_calls": _ratio(ours, nvitop_same),
        "samples_per_s": ours["samples_per_s"],
    }


def _ratio(ours: dict[str, float], peer: dict[str, float] | None) -> float | None:
    return None if peer is None else ours["cpu_ms_per_round"] / peer["cpu_ms_per_round"]


def _child(env: dict[str, str], *arguments: str) -> dict[str, float]:
    answer = subprocess.run(
        [sys.executable, "-m", "benchmarks.telemetry_overhead", *arguments], env=env, stdout=subprocess.PIPE, text=True,
        check=True, timeout=120,
    )  # fmt: skip
    return json.loads(answer.stdout.splitlines()[-1])


class _Head(BaseHTTPRequestHandler):
    """Takes every heartbeat."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        answer = b'{"lease_s": 600, "beat_s": 1.0}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


# ------------------------------------------------------------ in the children


class _Timed:
    """A reader that notes how late each sample was against the agent's schedule."""

    def __init__(self, reader: Any):
        self._reader = reader
        self.agent: Any = None
        self.late_s: list[float] = []

    def read(self, now_s: float) -> Sequence[GpuSample]:
        due_s = self.agent.next_s
        samples = self._reader.read(now_s)
        self.late_s += [s.t_s - due_s for s in samples]
        return samples

    def relieve(self) -> bool:
        return self._reader.relieve()

    def close(self) -> None:
        self._reader.close()


def agent(folder: str, port: str) -> dict[str, float]:
    import areal_sky.run.node  # the process that the agent lives in has loaded these
    import areal_sky.ui.cli.processes  # noqa: F401
    from areal_sky.run.agent import connect

    running = Path(folder) / "running"
    running.mkdir()
    about = {"task_id": "t", "rank": 0, "gpus": list(range(GPUS)), "pid": os.getpid(), "kind": "train"}
    (running / "t.0.json").write_text(json.dumps(about))
    env = NodeEnv(
        "c", "g", "c-g-0", 0, "127.0.0.1", gateway_port=int(port), state_dir=folder, shape=NodeShape(gpus=GPUS)
    )
    made = connect(env, "token")
    timed = _Timed(made._reader)
    timed.agent, made._reader = made, timed
    stop = threading.Event()
    thread = threading.Thread(target=made.run, args=(stop,))
    thread.start()
    time.sleep(WARM_S)
    timed.late_s.clear()
    cpu_s, started_s = time.process_time(), time.monotonic()
    time.sleep(MEASURED_S)
    cpu_s, elapsed_s = time.process_time() - cpu_s, time.monotonic() - started_s
    late_s = sorted(timed.late_s)
    rss = rss_mib(os.getpid())
    stop.set()
    thread.join()
    return {
        "cpu_frac": cpu_s / elapsed_s,
        "rss_mib": rss,
        "p99_late_ms": late_s[int(0.99 * len(late_s))] * 1000,
        "samples_per_s": len(late_s) / elapsed_s,
        "cpu_ms_per_round": cpu_s * 1000 / (len(late_s) / GPUS),
    }


def nvitop() -> dict[str, float]:
    from nvitop import Device

    devices = Device.all()

    def sample(_: int) -> None:
        for d in devices:
            d.utilization_rates(), d.memory_info()
            _slow_fields(d)

    return _paced(sample)


def nvitop_same_calls() -> dict[str, float]:
    from nvitop import Device

    devices = Device.all()

    def sample(turn: int) -> None:
        for i, d in enumerate(devices):
            d.memory_info()
            if turn % RATE_HZ == i:
                d.utilization_rates()
                _slow_fields(d)

    return _paced(sample)


def _slow_fields(d: Any) -> None:
    d.temperature(), d.power_usage(), d.sm_clock(), d.memory_clock(), d.total_volatile_uncorrected_ecc_errors()


def gpustat() -> dict[str, float]:
    import gpustat as module

    return _paced(lambda _: module.new_query())


def _paced(sample: Callable[[int], None]) -> dict[str, float]:
    def rounds(seconds: float) -> int:
        started_s, turns = time.monotonic(), 0
        while time.monotonic() - started_s < seconds:
            sample(turns)
            turns += 1
            time.sleep(max(0.0, started_s + turns / RATE_HZ - time.monotonic()))
        return turns

    rounds(WARM_S)
    cpu_s = time.process_time()
    turns = rounds(MEASURED_S)
    return {"cpu_ms_per_round": (time.process_time() - cpu_s) * 1000 / turns, "rounds_per_s": turns / MEASURED_S}


if __name__ == "__main__":
    kinds: dict[str, Callable[..., dict[str, float]]] = {
        "agent": agent, "nvitop": nvitop, "nvitop_same_calls": nvitop_same_calls, "gpustat": gpustat,
    }  # fmt: skip
    print(json.dumps(kinds[sys.argv[1]](*sys.argv[2:])))
