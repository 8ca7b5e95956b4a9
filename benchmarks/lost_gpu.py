"""From a GPU that is lost to the alert, through all that lies between: an agent, its heartbeats over HTTP, the
head's gateway, hub and watch. In real time; the device and Ray are stand-ins.
"""

from __future__ import annotations

import random
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from areal_sky.adapters.fake_ray import FakeRayCluster
from areal_sky.adapters.headpost import HeadPost
from areal_sky.core.model import NodeShape
from areal_sky.core.nodeenv import GroupShape, HeadEnv, NodeEnv
from areal_sky.core.telemetry import GpuSample, Validity
from areal_sky.run.agent import Agent
from areal_sky.run.alertstore import AlertStore
from areal_sky.run.clock import SystemClock
from areal_sky.run.hub import TelemetryHub
from areal_sky.run.journal import Journal
from areal_sky.run.tasks import TaskService
from areal_sky.run.watch import Watch
from areal_sky.ui.gateway import create_app

GPUS = 8
TOKENS = {"node": "node-" * 8, "operate": "operate-" * 8}
PATIENCE_S = 30.0


class Reader:
    """Eight healthy devices, of which one can be lost and found again."""

    def __init__(self) -> None:
        self.lost = False

    def read(self, now_s: float) -> Sequence[GpuSample]:
        return [self._sample(device, now_s) for device in range(GPUS)]

    def relieve(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def _sample(self, device: int, now_s: float) -> GpuSample:
        if self.lost and device == 3:
            return GpuSample(device, now_s, "H100", *([None] * 5), validity=Validity.LOST, error="GPU is lost")
        return GpuSample(device, now_s, "H100", 0.9, 40.0, 80.0, 60.0, 400.0)


def seconds(interval_s: float, times: int, seed: int = 0) -> list[float]:
    """Seconds from each loss to its alert; the device is read every `interval_s`."""
    draw = random.Random(seed)
    found: list[float] = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder, _head(Path(folder)) as (watch, port):
            reader, stop = Reader(), threading.Event()
            env = NodeEnv(
                "c", "w", "c-w-0", 0, "127.0.0.1", gateway_port=port, state_dir=folder, shape=NodeShape(gpus=GPUS),
                critical_interval_s=interval_s, normal_interval_s=interval_s,
            )  # fmt: skip
            agent = Agent(env, reader, HeadPost("127.0.0.1", port, TOKENS["node"]).heartbeat)
            thread = threading.Thread(target=agent.run, args=(stop,))
            thread.start()
            time.sleep(2.5 + draw.random())
            lost_s, reader.lost = time.time(), True
            until_s = time.monotonic() + PATIENCE_S
            while not (active := watch.listed()["active"]) and time.monotonic() < until_s:
                time.sleep(0.01)
            stop.set()
            thread.join()
            found.append(active[0]["raised_s"] - lost_s if active else PATIENCE_S)
    return found


@contextmanager
def _head(folder: Path) -> Iterator[tuple[Watch, int]]:
    """The head's services on a port of their own."""
    ray = FakeRayCluster()
    ray.add_node("w", "c-w-0", NodeShape(gpus=GPUS))
    env = HeadEnv("c", "c-head-0", str(folder), groups=(GroupShape("w", NodeShape(gpus=GPUS), 1, 1, 1),))
    hub = TelemetryHub(env.groups)
    service = TaskService(ray.connection(), Journal(folder / "journal.db"), SystemClock(), env, hub)
    service.tick(time.time())
    store, stop = AlertStore(folder / "alerts.db"), threading.Event()
    watch = Watch(service, store, env)
    looking = threading.Thread(target=watch.run, args=(stop,))
    looking.start()
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(create_app(service, hub, TOKENS, "c", watch=watch), log_level="error", ws="none")
    )
    serving = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    serving.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield watch, listening.getsockname()[1]
    finally:
        stop.set()
        server.should_exit = True
        serving.join()
        looking.join()
        store.close()
