"""`areal-sky alerts` and AlertManager, through a real gateway."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from click.testing import CliRunner, Result

from areal_sky import AlertManager
from areal_sky.adapters.fake_ray import FakeRayCluster
from areal_sky.adapters.fakes import FakeClock
from areal_sky.adapters.gateway_client import GatewayClient
from areal_sky.core.events import LaunchIntended, Record
from areal_sky.core.heartbeat import read_heartbeat
from areal_sky.core.model import NodeShape
from areal_sky.core.nodeenv import GroupShape, HeadEnv
from areal_sky.errors import InvalidInput, NotFound
from areal_sky.run.alertstore import AlertStore
from areal_sky.run.journal import Journal
from areal_sky.run.report import why
from areal_sky.run.tasks import TaskService
from areal_sky.run.watch import MANUAL_S, Watch
from areal_sky.ui.cli.main import cli
from areal_sky.ui.gateway import create_app

TOKENS = {right: f"{right}-" * 4 for right in ("read", "submit", "operate", "node")}


class Head:
    def __init__(self, folder: Path, port: int):
        self.url = f"http://127.0.0.1:{port}"
        self.clock = FakeClock()
        ray = FakeRayCluster()
        ray.add_node("w", "c-w-0", NodeShape(gpus=2))
        env = HeadEnv("c", "c-head-0", str(folder), groups=(GroupShape("w", NodeShape(gpus=2), 1, 1, 1),))
        self.service = TaskService(ray.connection(), Journal(folder / "journal.db"), self.clock, env)
        self.watch = Watch(self.service, AlertStore(folder / "alerts.db"), env, clock=self.clock.now)
        app = create_app(self.service, None, TOKENS, "c", watch=self.watch)
        self.server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", ws="none"))
        threading.Thread(target=self.server.run, daemon=True).start()
        while not self.server.started:
            time.sleep(0.01)
        self.service.tick(self.clock.advance(1.0))

    def gateway(self, right: str = "read") -> GatewayClient:
        return GatewayClient(self.url, TOKENS[right])

    def run(self, *words: str) -> Result:
        return CliRunner().invoke(cli, ["alerts", *words])


@pytest.fixture
def head(tmp_path: Path, free_port: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    made = Head(tmp_path, free_port())
    monkeypatch.setattr("areal_sky.home.choose_cluster", lambda name: made)
    yield made
    made.server.should_exit = True


def test_an_alert_from_a_task_to_the_terminal(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    assert head.run().output == "nothing is wrong\n"
    for name, value in {"GATEWAY": head.url, "TOKEN": TOKENS["submit"], "TASK_ID": "t7"}.items():
        monkeypatch.setenv(f"AREAL_SKY_{name}", value)
    manager = AlertManager()
    assert manager.trigger_alert("KL is large", {"kl": 12.5, "worst": float("inf")})
    assert [a["place"] for a in manager.active()] == ["t7"]
    with pytest.raises(InvalidInput, match="message"):
        manager.trigger_alert("")
    lines = head.run().output.splitlines()
    assert lines[0].endswith("a1    manual at t7: KL is large (0s)")
    assert lines[1].strip() == "because kl 12.5, worst inf"
    told = json.loads(head.run("--json").output)
    assert (told["active"][0]["metrics"], told["over"]) == ({"kl": 12.5}, [])
    for _ in range(3):
        head.clock.advance(MANUAL_S)
        head.watch.look()
    assert head.run().output.splitlines()[:2][0] == "nothing is wrong"
    assert "manual at t7: KL is large" in head.run().output
    monkeypatch.setenv("AREAL_SKY_GATEWAY", "http://127.0.0.1:9")
    assert not manager.trigger_alert("nobody hears this")


def test_a_replicas_story_has_its_alerts(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    window = {
        "device": 0, "name": "H100", "start_s": 0.0, "end_s": 1.0, "utilization_mean": None, "valid_frac": 0.0,
        "validity": "lost", "error": "gone",
    }  # fmt: skip
    launched = Record(1, 5.0, LaunchIntended("c-w-0", "w", 0, 1, "on_demand", None, "wanted"))
    monkeypatch.setattr(head, "records", lambda: [launched], raising=False)
    monkeypatch.setattr(head, "name", "c", raising=False)
    for replica in ("c-w-0", "c-w-1"):
        now_s = head.clock.now()
        beat = {"group": "w", "replica": replica, "index": 0, "t_s": 1.0, "windows": [window]}
        head.watch.heard(read_heartbeat(beat, now_s), now_s)
    head.watch.look()
    first, second = why(head, "c-w-0")  # type: ignore[arg-type]
    assert first[1].startswith("c-w-0: will be launched")
    assert second[1].startswith("alert a1: lost_gpu at c-w-0/0 GPU 0: the GPU is lost (H100) (gone); cordon: ")
    head.server.should_exit = True
    monkeypatch.setattr(head, "url", "http://127.0.0.1:9")
    assert why(head, "c-w-0") == [first]  # type: ignore[arg-type]


def test_a_person_lifts_a_cordon(head: Head) -> None:
    head.service.cordon("c-w-0", 0, "for this test", wanted=True)
    assert head.run("--uncordon", "c-w-0/0").output == "node c-w-0/0 takes work again\n"
    assert isinstance(head.run("--uncordon", "c-w-9/0").exception, NotFound)
    assert isinstance(head.run("--uncordon", "c-w-0").exception, InvalidInput)
