"""The HTTP gateway: rights, routes, wrong input; through the client that everybody uses."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import httpx
import pytest
import uvicorn

from areal_sky.adapters.fake_ray import FakeRayCluster
from areal_sky.adapters.fakes import FakeClock
from areal_sky.adapters.gateway_client import GatewayClient
from areal_sky.adapters.headpost import HeadPost
from areal_sky.core.heartbeat import Heartbeat
from areal_sky.core.model import Bundle, NodeShape
from areal_sky.core.nodeenv import GroupShape, HeadEnv
from areal_sky.core.taskmodel import TaskSpec
from areal_sky.errors import ArealSkyError, InvalidInput, NotFound, Refused, StateError, Unauthorized, Unreachable
from areal_sky.run.alertstore import AlertStore
from areal_sky.run.journal import Journal
from areal_sky.run.tasks import TaskService
from areal_sky.run.watch import Watch
from areal_sky.ui.gateway import create_app

TOKENS = {right: f"{right}-" * 8 for right in ("read", "submit", "operate", "node", "ray")}
GPU4 = NodeShape(4, 16, 64, "H100")


class Hub:
    def __init__(self) -> None:
        self.beats: list[Heartbeat] = []

    def ingest(self, heartbeat: Heartbeat, now_s: float) -> dict[str, Any]:
        self.beats.append(heartbeat)
        return {"beat_s": 2.0}

    def gpus(self, seconds: float, now_s: float) -> dict[str, Any]:
        return {"seconds": seconds, "nodes": []}

    def replica_loads(self, now_s: float) -> dict[str, Any]:
        return {}

    def peak_memory_gib(self, task_id: str, since_s: float) -> float | None:
        return None


class Head:
    def __init__(self, folder: Path, url: str):
        self.url = url
        self.ray = FakeRayCluster()
        self.ray.add_node("w", "c-w-0", GPU4)
        self.hub = Hub()
        self.controller: list[float] = []
        env = HeadEnv("c", "c-head-0", str(folder), groups=(GroupShape("w", GPU4, 1, 1, 2),), lease_s=77.0)
        self.journal = Journal(folder / "journal.db")
        self.service = TaskService(self.ray.connection(), self.journal, FakeClock(), env, self.hub)
        self.watch = Watch(self.service, AlertStore(folder / "alerts.db"), env)
        self.app = create_app(self.service, self.hub, TOKENS, "c", self.controller.append, watch=self.watch)
        self.service.tick(1_700_000_000.0)

    def client(self, right: str) -> GatewayClient:
        return GatewayClient(self.url, TOKENS.get(right, right))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, free_port: Any) -> Iterator[Head]:
    port = free_port()
    made = Head(tmp_path_factory.mktemp("head"), f"http://127.0.0.1:{port}")
    server = uvicorn.Server(uvicorn.Config(made.app, port=port, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield made
    server.should_exit = True
    thread.join(5)


SPEC = TaskSpec("train", command="python train.py", bundle=Bundle(1, 1))

ROUTES = [
    ("GET", "/v1/tasks", "read"), ("GET", "/v1/tasks/t1", "read"), ("GET", "/v1/tasks/t1/story", "read"),
    ("GET", "/v1/tasks/t1/logs", "read"), ("GET", "/v1/view", "read"), ("GET", "/v1/gpus", "read"),
    ("GET", "/v1/usage", "read"), ("GET", "/metrics", "read"), ("GET", "/v1/alerts", "read"),
    ("GET", "/v1/tasks/t1/metrics", "read"), ("POST", "/v1/alerts", "submit node"),
    ("POST", "/v1/nodes/r/0/uncordon", "operate"),
    ("POST", "/v1/tasks", "submit"), ("POST", "/v1/tasks/t1/cancel", "submit"),
    ("POST", "/v1/tasks/t1/metrics", "submit node"), ("POST", "/v1/replicas/r/drain", "operate"),
    ("POST", "/v1/replicas/r/evict", "operate"), ("POST", "/v1/controller/heartbeat", "operate"),
    ("POST", "/v1/nodes/heartbeat", "node"), ("POST", "/v1/runner/logs", "node"),
]  # fmt: skip
COVERS = {"read": {"read"}, "submit": {"read", "submit"}, "operate": {"read", "submit", "operate"}, "node": {"node"}}


def test_a_batch_comes_back_in_order(head: Head) -> None:
    submit, read = head.client("submit"), head.client("read")
    chain = [TaskSpec("train", command="x", name="first", array=3), TaskSpec("eval", command="x", after=("first",))]
    answer = submit.submit_many(chain)
    first, second = answer["tasks"]
    assert (answer["warnings"], second["status"]) == ([], "QUEUED")
    assert read.task(second["task_id"])["after"] == [first["task_ids"]]
    assert [t["terms"] for t in read.tasks("queued", explain=True)] == [""]  # it waits for no room
    assert len(read.tasks("active", limit=2)) == 2
    for task in read.tasks("active"):
        submit.cancel(task["task_id"])


@pytest.mark.parametrize(("method", "path", "needs"), ROUTES)
def test_every_route_asks_for_its_right(head: Head, method: str, path: str, needs: str) -> None:
    assert httpx.request(method, head.url + path, json={}).status_code == 401
    operate, ray = TOKENS["operate"], TOKENS["ray"]
    for wrong in ("Bearer nope", f"Basic {operate}", f"Bearer {ray}", f"Bearer {operate}x", "Bearer", "Bearer ü"):
        reply = httpx.request(method, head.url + path, json={}, headers={b"Authorization": wrong.encode()})
        assert reply.status_code == 401
        assert reply.json()["error"] == "Unauthorized"
    for right, covered in COVERS.items():
        reply = httpx.request(method, head.url + path, json={}, headers={"Authorization": f"Bearer {TOKENS[right]}"})
        assert (reply.status_code == 403) == (not covered & set(needs.split())), (right, reply.text)


def test_no_answer_shows_a_token(head: Head) -> None:
    reply = httpx.post(head.url + "/v1/tasks", headers={"Authorization": f"Bearer {TOKENS['read']}"}, json={})
    assert reply.status_code == 403
    assert not any(t in reply.text for t in TOKENS.values())


def test_who_held_what(head: Head) -> None:
    submit = head.client("submit")
    task_id = submit.submit(SPEC)["task_id"]
    running = submit.usage()
    (held,) = [h for h in running.holds if h.task_id == task_id]
    assert (held.kind, held.gpus, held.until_s) == ("train", 1, None) and held.node_gpus >= 1
    submit.cancel(task_id)
    with pytest.raises(InvalidInput, match="since_s"):
        submit.usage(float("nan"))


def test_health_needs_no_token(head: Head) -> None:
    assert httpx.get(head.url + "/healthz").json() == {"ok": True, "cluster": "c"}


def test_a_task_from_submit_to_story(head: Head) -> None:
    submit, read = head.client("submit"), head.client("read")
    answer = submit.submit(SPEC)
    assert answer["status"] == "SCHEDULED"
    task_id = answer["task_id"]
    assert read.task(task_id)["command"] == "python train.py"
    assert task_id in [t["task_id"] for t in read.tasks()]
    assert task_id not in [t["task_id"] for t in read.tasks("failed")]
    assert read.story(task_id)[0]["text"].startswith("submitted")
    node = head.client("node")
    raw = "ü\n".encode() + b"\xff"
    assert node.push_log(task_id, 1, 0, "out", 0, raw.decode("utf-8", "surrogateescape")) == 4
    page = read.logs(task_id)
    assert (page["text"], page["next_offset"]) == ("ü\n\ufffd", 4)
    node.track_metrics(task_id, {"loss": 1.5})
    assert read.task(task_id)["metrics"] == {"loss": 1.5}
    submit.cancel(task_id)
    assert read.task(task_id)["state"] == "CANCELLED"


def test_errors_come_back_as_themselves(head: Head) -> None:
    submit, read = head.client("submit"), head.client("read")
    with pytest.raises(Refused, match="can never fit"):
        submit.submit(TaskSpec("train", command="x", bundles=3, bundle=Bundle(4, 1)))
    with pytest.raises(InvalidInput) as e:
        submit.submit(TaskSpec("tran", command="", bundles=0, priority=101, bundle=Bundle(1.5, -1)))
    told = str(e.value)
    for words in ("did you mean 'train'?", "command:", "bundles: 0", "priority: 101", "gpus: 1.5", "cpus: -1"):
        assert words in told
    many = [TaskSpec("train", command="x"), TaskSpec("tran", command="x"), TaskSpec("eval", command="", array=0)]
    with pytest.raises(InvalidInput) as e:
        submit.submit_many(many)
    lines = str(e.value).splitlines()
    assert [line.partition(".")[0] for line in lines] == ["tasks[1]", "tasks[2]", "tasks[2]"]
    with pytest.raises(InvalidInput, match="expected a list of tasks"):
        submit.submit_many([])
    with pytest.raises(Unauthorized):
        read.submit_many([SPEC])
    with pytest.raises(Unauthorized):
        read.checkpointed("t1")
    with pytest.raises(InvalidInput, match="KEY=VALUE"):
        read._call("GET", "/v1/tasks", params={"label": "x"})
    with pytest.raises(InvalidInput, match="low: expected"):
        submit._call("POST", "/v1/tasks/t1/phase", {"phase": "x", "low": "yes"})
    with pytest.raises(NotFound, match="no task 'nope'"):
        read.task("nope")
    with pytest.raises(NotFound):
        read.logs("../../etc/passwd")
    with pytest.raises(InvalidInput, match="state 'odd'"):
        read.tasks("odd")
    with pytest.raises(Unauthorized, match="right to read, not to submit"):
        read.submit(SPEC)
    with pytest.raises(Unauthorized, match="missing or unknown"):
        head.client("wrong").tasks()


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        ("/v1/tasks", b"{", "not JSON"),
        ("/v1/tasks", b"[1]", "must be a JSON object"),
        ("/v1/tasks", b"[" * 100_000, "not JSON"),
        ("/v1/tasks", b'{"kind": "train", "command": "x", "bundels": 2}', "did you mean 'bundles'?"),
        ("/v1/tasks", b'{"kind": "train", "command": "x", "bundle": {"gpus": NaN}}', "bundle.gpus: expected a number"),
        ("/v1/tasks", b'{"kind": "train", "command": "x", "envs": {"RANK": "1"}}', "set by areal_sky"),
        ("/v1/tasks", b'{"kind": "train", "command": "x", "group": "typo"}', "no group 'typo' (known: w)"),
        ("/v1/tasks/t1/metrics", b'{"metrics": [1]}', "expected an object"),
        ("/v1/tasks/t1/metrics", b'{"metrics": {"a": "b"}}', "'a' is not a number"),
        ("/v1/replicas/r/drain", b"{}", "deadline_s: expected a number"),
        ("/v1/alerts", b"{}", "message: expected a text"),
        ("/v1/alerts", b'{"message": "x", "metrics": {"a": "b"}}', "metrics.a: expected a number"),
    ],
)
def test_wrong_bodies_get_words_not_dumps(head: Head, path: str, content: bytes, words: str) -> None:
    reply = httpx.post(head.url + path, content=content, headers={"Authorization": f"Bearer {TOKENS['operate']}"})
    assert reply.status_code == 422
    assert reply.json()["error"] == "InvalidInput"
    assert words in reply.json()["message"]


def test_a_body_that_is_too_large_is_cut_off(head: Head) -> None:
    body = json.dumps({"metrics": {"x": "y" * 3 * 2**20}})
    reply = httpx.post(
        head.url + "/v1/tasks/t1/metrics", content=body, headers={"Authorization": f"Bearer {TOKENS['operate']}"}
    )
    assert reply.status_code == 413
    assert "larger than 2 MiB" in reply.json()["message"]


def test_the_view_arrives_as_it_was(head: Head) -> None:
    assert head.client("read").view() == head.service.view()


def test_drain_evict_and_heartbeats(head: Head) -> None:
    operate, port = head.client("operate"), int(head.url.rpartition(":")[2])
    assert operate.drain("c-w-0", "idle", time.time() + 60) == {"nodes": 1}
    assert operate.drain("unknown", "idle", time.time() + 60) == {"nodes": 0}
    assert operate.evict("c-w-0", "reclaimed") == {"nodes": 1}
    assert head.service.view().nodes[0].draining
    post = HeadPost("127.0.0.1", port, TOKENS["node"])  # as the agent does
    beat = {"cluster": "c", "group": "w", "replica": "c-w-0", "index": 0, "t_s": 1.0}
    assert post.heartbeat(beat)["lease_s"] == 77.0
    assert (head.hub.beats[-1].replica, head.hub.beats[-1].sent_s) == ("c-w-0", 1.0)
    with pytest.raises(InvalidInput, match="heartbeat is damaged: KeyError: 'index'"):
        post.heartbeat({k: v for k, v in beat.items() if k != "index"})
    with pytest.raises(InvalidInput, match="damaged: ValueError: -1 is no amount"):
        post.heartbeat(beat | {"memory": [-1, 64]})
    assert post.heartbeat(beat | {"replica": "c-w-1"}) == {"lease_s": 77.0, "t_s": ANY, "beat_s": 2.0}
    with pytest.raises(Refused, match="not of other"):
        post.heartbeat({"cluster": "other"})
    with pytest.raises(InvalidInput, match="larger than 2 MiB"):
        post.heartbeat({"x": "x" * 3 * 2**20})
    with pytest.raises(Unauthorized):
        HeadPost("127.0.0.1", port, TOKENS["read"]).heartbeat({})
    operate.controller_heartbeat(30.0)
    assert head.controller[-1] == 30.0
    assert head.client("read").gpus(5) == {"seconds": 5.0, "nodes": []}


def test_state_that_cannot_be_written_is_told(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(events: object) -> None:
        raise StateError("the disk is full")

    monkeypatch.setattr(head.journal, "append", full)
    with pytest.raises(StateError, match="the disk is full"):
        head.client("submit").submit(SPEC)


def test_what_breaks_inside_shows_no_traceback(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head.service, "get", lambda task_id: 1 / 0)
    with pytest.raises(ArealSkyError, match="its log says why"):
        head.client("read").task("t1")


@pytest.mark.parametrize("token", ["", "abc\ndef", "ü"])
def test_a_damaged_token_is_refused_without_showing_it(token: str) -> None:
    with pytest.raises(Unauthorized) as e:
        GatewayClient("http://127.0.0.1:9", token)
    assert not token or token not in str(e.value)


def test_a_head_that_is_not_there(free_port: Any) -> None:
    with pytest.raises(Unreachable, match="no head answers at"):
        GatewayClient(f"http://127.0.0.1:{free_port()}", "x").tasks()


def test_something_else_that_listens_there(free_port: Any) -> None:
    async def other(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"<html>"})

    port = free_port()
    server = uvicorn.Server(uvicorn.Config(other, port=port, log_level="critical", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    with pytest.raises(Unreachable, match="not an areal_sky head"):
        GatewayClient(f"http://127.0.0.1:{port}", "x").healthz()
    server.should_exit = True
    thread.join(5)
