"""GET /metrics against promtool's lint and a real Prometheus, which scrapes it with the shipped configuration."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import yaml

from areal_sky.adapters.fake_ray import FakeRayCluster
from areal_sky.adapters.gateway_client import GatewayClient
from areal_sky.adapters.headpost import HeadPost
from areal_sky.core.model import Bundle, NodeShape
from areal_sky.core.nodeenv import GroupShape, HeadEnv
from areal_sky.core.taskmodel import TaskSpec
from areal_sky.core.telemetry import GpuWindow, Validity
from areal_sky.run.alertstore import AlertStore
from areal_sky.run.clock import SystemClock
from areal_sky.run.hub import TelemetryHub
from areal_sky.run.journal import Journal
from areal_sky.run.tasks import TaskService
from areal_sky.run.watch import Watch
from areal_sky.ui import exposition
from areal_sky.ui.gateway import create_app

MONITORING = Path(__file__).parent.parent.parent / "examples/monitoring"
TOKENS = {right: f"{right}-" * 8 for right in ("read", "submit", "operate", "node")}
needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (apt install prometheus)")
needs_prometheus = pytest.mark.skipif(not shutil.which("prometheus"), reason="needs prometheus (apt)")


class Head:
    """A head with a node of two GPUs, of which one is lost, a task that runs on it, and its gateway on a real port."""

    def __init__(self, folder: Path, port: int):
        self.url = f"http://127.0.0.1:{port}"
        ray = FakeRayCluster()
        ray.add_node("w", "c-w-0", NodeShape(gpus=2, cpus=8, memory_gib=64))
        env = HeadEnv("c", "c-head-0", str(folder), groups=(GroupShape("w", NodeShape(gpus=2), 1, 1, 2),))
        self.hub = TelemetryHub(env.groups)
        self.service = TaskService(ray.connection(), Journal(folder / "journal.db"), SystemClock(), env, self.hub)
        self.watch = Watch(self.service, AlertStore(folder / "alerts.db"), env)
        app = create_app(self.service, self.hub, TOKENS, "c", watch=self.watch)
        self.server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", ws="none"))
        threading.Thread(target=self.server.run, daemon=True).start()
        while not self.server.started:
            time.sleep(0.01)
        self.service.tick(time.time())
        self.task = self.service.submit(TaskSpec("train", command="x", bundle=Bundle(1, 1)))["task_id"]
        for _ in range(3):
            self.service.tick(time.time())
        self.beat()

    def beat(self) -> None:
        """A heartbeat of the node, by the way that heartbeats come."""
        t_s = time.time()
        fine = GpuWindow(
            0, 'H"1\\00', t_s - 1, t_s, 0.5, 0.6, 0.7, 40.0, 80.0, 61.0, 300.0, 1.0, Validity.KNOWN,
            sm_clock_mhz=1980.0, throttle=("hw_thermal",), ecc_uncorrected=2, pcie_rx_mib_s=1.5,
        )  # fmt: skip
        lost = GpuWindow(1, "H100", t_s - 1, t_s, *([None] * 7), 0.0, Validity.LOST, "gone")
        running = [{"task_id": self.task, "rank": 0, "kind": "train", "gpus": [0]}]
        HeadPost("127.0.0.1", int(self.url.rpartition(":")[2]), TOKENS["node"]).heartbeat({
            "cluster": "c", "group": "w", "replica": "c-w-0", "index": 0, "t_s": t_s, "gpus": 2,
            "raylet_alive": True, "running": running, "windows": [asdict(fine), asdict(lost)],
        })  # fmt: skip
        with GatewayClient(self.url, TOKENS["node"]) as node:
            node.track_metrics(self.task, {"reward": 0.25, 'odd"name\\': 1.0})
        self.watch.look()

    def page(self) -> str:
        reply = httpx.get(self.url + "/metrics", headers={"Authorization": f"Bearer {TOKENS['read']}"})
        assert reply.status_code == 200 and reply.headers["content-type"] == exposition.EXPOSITION_TYPE
        return reply.text


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, free_port: Any) -> Iterator[Head]:
    made = Head(tmp_path_factory.mktemp("head"), free_port())
    yield made
    made.server.should_exit = True


def test_values_have_base_units_and_what_is_not_known_is_left_out(head: Head) -> None:
    page = head.page()
    place = 'cluster="c",group="w",replica="c-w-0",node="0"'
    for line in (
        f'areal_sky_gpu_utilization_ratio{{{place},gpu="0"}} 0.5',
        f'areal_sky_gpu_memory_used_bytes{{{place},gpu="0"}} {40 * 2.0**30!r}',
        f'areal_sky_gpu_lost{{{place},gpu="1"}} 1.0',
        f'areal_sky_gpu_known{{{place},gpu="0"}} 1.0',
        f"areal_sky_node_up{{{place}}} 1.0",
        'areal_sky_tasks{cluster="c",state="running"} 1.0',
        'areal_sky_task_reported{cluster="c",task="t1",metric="odd\\"name\\\\"} 1.0',
        'areal_sky_alerts_active{cluster="c",kind="lost_gpu"} 1.0',
    ):
        assert line + "\n" in page
    assert not re.search(r'utilization_ratio\{[^}]*gpu="1"', page)
    assert httpx.get(head.url + "/metrics").status_code == 401


def test_what_tasks_report_is_bounded(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "MAX_TASK_SERIES", 1)
    page = head.page()
    assert page.count("\nareal_sky_task_reported{") == 1
    assert 'areal_sky_task_reported_left_out{cluster="c"} 1.0\n' in page


@needs_promtool
def test_promtool_finds_nothing_to_say(head: Head) -> None:
    done = subprocess.run(["promtool", "check", "metrics"], input=head.page(), capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def shipped_expressions() -> Iterator[str]:
    rules = yaml.safe_load((MONITORING / "rules.yaml").read_text())
    yield from (r["expr"] for g in rules["groups"] for r in g["rules"])
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    yield from (t["expr"] for p in dashboard["panels"] for t in p["targets"])
    yield from (v["query"] for v in dashboard["templating"]["list"])


def test_the_shipped_rules_and_panels_ask_for_what_there_is(head: Head) -> None:
    there = set(re.findall(r"^# TYPE (\S+)", head.page(), re.MULTILINE))
    asked = {name for e in shipped_expressions() for name in re.findall(r"areal_sky_\w+", e)}
    assert len(asked) > 10 and asked <= there


@pytest.mark.e2e
@needs_prometheus
@needs_promtool
def test_a_real_prometheus_scrapes_the_head_with_the_shipped_files(head: Head, tmp_path: Path, free_port: Any) -> None:
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [head.url.removeprefix("http://")]
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
    shutil.copy(MONITORING / "rules.yaml", tmp_path)
    (tmp_path / "read.token").write_text(TOKENS["read"])
    promtool = ["promtool", "check", "config", tmp_path / "prometheus.yaml"]
    check = subprocess.run(promtool, capture_output=True, text=True)
    assert check.returncode == 0, check.stdout + check.stderr
    port = free_port()
    prometheus = subprocess.Popen(
        ["prometheus", f"--config.file={tmp_path}/prometheus.yaml", f"--storage.tsdb.path={tmp_path}/tsdb",
         f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"],
    )  # fmt: skip
    try:
        def ask(expr: str) -> list[dict[str, Any]]:
            reply = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": expr})
            return reply.raise_for_status().json()["data"]["result"]

        until_s = time.monotonic() + 90
        found: list[dict[str, Any]] = []
        while time.monotonic() < until_s and not (found and ask('ALERTS{alertname="ArealSkyGpuLost"}')):
            try:
                head.beat()
                found = ask("areal_sky_gpu_utilization_ratio")
            except httpx.HTTPError:
                assert prometheus.poll() is None
            time.sleep(0.1)
        assert [(r["metric"]["replica"], r["metric"]["gpu"], r["value"][1]) for r in found] == [("c-w-0", "0", "0.5")]
        assert [r["value"][1] for r in ask('up{job="areal_sky"}')] == ["1"]
        assert ask('ALERTS{alertname="ArealSkyGpuLost"}')[0]["metric"]["gpu"] == "1"
        fill = {"$cluster": "c", "$group": ".*", "$metric": ".*"}
        for expr in shipped_expressions():
            for name, value in fill.items():
                expr = expr.replace(name, value)
            if not expr.startswith(("label_values", "prometheus")):
                ask(expr)
    finally:
        prometheus.terminate()
        prometheus.wait(10)
