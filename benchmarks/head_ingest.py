"""What the head spends on the windows of 1,000 nodes with 8 GPUs each: gateway, hub, history on disk, and the watch
that looks for anomalies, with a task on every node.

The head process serves the real gateway (uvicorn, as `areal-sky head` starts it, without Ray); another process plays
the agents: each node posts its 1 s windows in batches, as often as the head's answers ask for, over connections that
are kept. Memory is read with all in place that the head keeps at hand (two minutes; the hour is on disk).
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from areal_sky.adapters.processes import settle
from areal_sky.adapters.windowstore import WindowStore
from areal_sky.core.anomaly import Run
from areal_sky.core.heartbeat import read_heartbeat
from areal_sky.core.sampling import beat_every_s
from areal_sky.core.telemetry import GpuWindow, Validity
from areal_sky.core.windowcodec import to_wire
from areal_sky.run.alertstore import AlertStore
from areal_sky.run.hub import TelemetryHub
from areal_sky.run.tending import Running
from areal_sky.run.watch import Watch

NODES = 1000
GPUS = 8
WARM_S, MEASURED_S = 12.0, 20.0
PAST_S, PAST_STEP_S = 150, 15  # taken in beforehand, so that what is kept at hand is full
CONNECTIONS = 200
TOKEN = "node-token"


def measure() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        head = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.head_ingest", "head", folder], stdout=subprocess.PIPE, text=True
        )
        assert head.stdout is not None
        try:
            port = int(head.stdout.readline())
            nodes = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.head_ingest", "nodes", str(port)], stdout=subprocess.PIPE, text=True
            )
            process = psutil.Process(head.pid)
            time.sleep(WARM_S)
            before, started_s = process.cpu_times(), time.monotonic()
            time.sleep(MEASURED_S)
            after, elapsed_s = process.cpu_times(), time.monotonic() - started_s
            rss = process.memory_info().rss / 2**20
            told = json.loads(nodes.communicate(timeout=60)[0])
        finally:
            head.terminate()
            head.wait()
        disk = sum(p.stat().st_size for p in Path(folder).glob("windows.db*"))
    return {
        "cpu_frac_of_core": (after.user + after.system - before.user - before.system) / elapsed_s,
        "rss_mib": rss,
        "windows_per_s": told["windows_per_s"],
        "posts_per_s": told["posts_per_s"],
        "p99_answer_ms": told["p99_answer_ms"],
        "disk_mib": disk / 2**20,
    }


# ------------------------------------------------------------ the head


class _Service:
    """Stands in for the task service, of which the watch asks what runs."""

    class head_env:
        lease_s = 600.0
        alerts = ()

    def __init__(self) -> None:
        self._running = [Running(Run(f"t{n}", 1), {}) for n in range(NODES)]

    def running(self) -> list[Running]:
        return self._running


def head(folder: str) -> None:
    import uvicorn

    from areal_sky.ui.gateway import create_app

    hub = TelemetryHub(store=WindowStore(Path(folder) / "windows.db"))
    now_s = time.time()
    for second in range(0, PAST_S, PAST_STEP_S):
        t_s = now_s - PAST_S + second
        for node in range(NODES):
            hub.ingest(read_heartbeat(_body(node, t_s, PAST_STEP_S), t_s), t_s)
    service: Any = _Service()
    watch = Watch(service, AlertStore(Path(folder) / "alerts.db"), service.head_env)
    threading.Thread(target=watch.run, args=(threading.Event(),), daemon=True).start()
    app = create_app(service, hub, {"node": TOKEN}, "c", watch=watch)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(256)
    server = uvicorn.Server(uvicorn.Config(app, ws="none", log_level="warning", access_log=False))
    settle()
    print(listening.getsockname()[1], flush=True)
    server.run(sockets=[listening])


_WINDOW = GpuWindow(
    0, "NVIDIA H100 80GB HBM3", 0.0, 1.0, 0.5, 0.9, 1.0, 40.0, 80.0, 61.0, 512.3, 1.0, Validity.KNOWN, "",
    "GPU-5f3a1c2e-0000-0000-0000-000000000000", 1980.0, 2619.0, (), 0, 0, 431.2, 12.5, 0.0, None, ((4242, 40.0),),
)  # fmt: skip


@cache
def _wire(seconds: int) -> dict[str, dict[str, Any]]:
    """Windows in which all differs that would; clocks and processes are read each 5 s only."""
    draw = random.Random(0).uniform
    windows = [
        replace(
            _WINDOW, device=device, start_s=second, end_s=second + 1, utilization_mean=draw(0.5, 1),
            utilization_p95=draw(0.9, 1), memory_used_gib=draw(10, 70), temperature_celsius=draw(50, 75),
            power_watts=draw(300, 700), uuid=f"GPU-5f3a1c2e-0000-0000-0000-{device:012}",
            sm_clock_mhz=1980.0 - 15 * (device % 3), pcie_rx_mib_s=draw(0, 900), pcie_tx_mib_s=draw(0, 900),
            nvlink_mib_s=draw(0, 9000), processes=((4242 + device, 40.0 + device),),
        )
        for second in range(seconds)
        for device in range(GPUS)
    ]  # fmt: skip
    return to_wire(windows)


def _body(node: int, t_s: float, seconds: int) -> dict[str, Any]:
    wire, ends = _wire(seconds), [round(t_s - age, 3) for age in range(seconds - 1, -1, -1)]
    spans = {"utilization_mean": (0.5, 1.0), "memory_used_gib": (10.0, 70.0)}
    fresh = {f: [round(random.uniform(*span), 4) for _ in range(seconds * GPUS)] for f, span in spans.items()}
    return {
        "cluster": "c", "group": "g", "replica": f"c-g-{node}", "index": 0, "t_s": t_s, "pid": 1, "raylet_alive": True,
        "gpus": GPUS, "interval_s": 0.1, "telemetry_error": "", "leaving": False, "dropped": 0,
        "running": [{"task_id": f"t{node}", "rank": 0, "kind": "train", "gpus": list(range(GPUS))}],
        "windows": {**wire, "in_turn": {"start_s": [e - 1 for e in ends], "end_s": ends}, "each": wire["each"] | fresh},
    }  # fmt: skip


# ------------------------------------------------------------ the nodes


def nodes(port: str) -> dict[str, float]:
    """Plays the agents until the measurement is over; made before it is sent, so that making it is not waited for."""
    beat_s = beat_every_s(NODES)
    turns = int((WARM_S + MEASURED_S) / beat_s) + 2
    return asyncio.run(_play(int(port), beat_s, turns))


async def _play(port: int, beat_s: float, turns: int) -> dict[str, float]:
    queue: asyncio.Queue[bytes] = asyncio.Queue(maxsize=2 * CONNECTIONS)
    answers_s: list[float] = []
    workers = [asyncio.create_task(_connection(port, queue, answers_s)) for _ in range(CONNECTIONS)]
    started_s = time.monotonic()
    for turn in range(turns):
        for node in range(NODES):
            body = json.dumps(_body(node, time.time(), round(beat_s)), separators=(",", ":")).encode()
            due_s = started_s + (turn + node / NODES) * beat_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            await queue.put(body)
    await queue.join()
    elapsed_s = time.monotonic() - started_s
    for worker in workers:
        worker.cancel()
    answers_s.sort()
    return {
        "windows_per_s": len(answers_s) * round(beat_s) * GPUS / elapsed_s,
        "posts_per_s": len(answers_s) / elapsed_s,
        "p99_answer_ms": answers_s[int(0.99 * len(answers_s))] * 1000,
    }


async def _connection(port: int, queue: asyncio.Queue[bytes], answers_s: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        body = await queue.get()
        started_s = time.monotonic()
        lines = ["POST /v1/nodes/heartbeat HTTP/1.1", "Host: head", f"Authorization: Bearer {TOKEN}"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
        writer.write("\r\n".join(lines).encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.split(b":")[1]))
        answers_s.append(time.monotonic() - started_s)
        queue.task_done()


if __name__ == "__main__":
    if sys.argv[1] == "head":
        head(*sys.argv[2:])
    else:
        print(json.dumps(nodes(*sys.argv[2:])))
