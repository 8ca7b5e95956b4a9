"""GET /metrics of a node itself: the same lines as on the head's page, also while no head answers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from areal_sky.core.model import NodeShape
from areal_sky.core.nodeenv import NodeEnv
from areal_sky.core.telemetry import GpuSample, Validity
from areal_sky.errors import Unreachable
from areal_sky.run.agent import Agent
from areal_sky.ui import nodepage

TOKEN = "node-" * 8


def no_head(body: object) -> dict[str, object]:
    raise Unreachable("no answer from the head")


def two_gpus(now_s: float) -> list[GpuSample]:
    lost = GpuSample(1, now_s, "H100", None, None, None, None, None, Validity.LOST, "GPU is lost")
    return [GpuSample(0, now_s, "H100", 0.5, 40.0, 80.0, 61.0, 500.0), lost]


@pytest.fixture
def url(tmp_path: Path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    env = NodeEnv("c", "w", "c-w-0", 1, "127.0.0.1", state_dir=str(tmp_path), shape=NodeShape(gpus=2))
    agent = Agent(env, SimpleNamespace(read=two_gpus, close=lambda: None), no_head)
    monkeypatch.setattr(nodepage.time, "time", lambda: 1002.5)
    for tick in range(250):
        agent.step(1000.0 + tick / 100)
    assert not agent.beat(1002.5)
    port = free_port()
    monkeypatch.setenv(nodepage.PORT, str(port))
    server = nodepage.serve_metrics(agent, TOKEN)
    assert server is not None
    yield f"http://127.0.0.1:{port}"
    server.shutdown()
    server.server_close()


def test_it_tells_what_the_agent_knows_to_who_has_the_token(url: str) -> None:
    page = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).text
    place = 'cluster="c",group="w",replica="c-w-0",node="1"'
    assert f'areal_sky_gpu_utilization_ratio{{{place},gpu="0"}} 0.5\n' in page
    assert f'areal_sky_gpu_lost{{{place},gpu="1"}} 1.0\n' in page
    assert "areal_sky_agent_cpu_seconds_total{" in page
    if shutil.which("promtool"):
        done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_nobody_else_is_told_anything(url: str) -> None:
    assert httpx.get(f"{url}/metrics").status_code == 401
    assert httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer other"}).status_code == 401
    assert httpx.get(f"{url}/", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 404


@pytest.mark.parametrize("port", ["", "http", "70000"])
def test_without_a_usable_port_there_is_no_page(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nodepage.PORT, port)
    assert nodepage.serve_metrics(SimpleNamespace(), TOKEN) is None  # type: ignore[arg-type]
