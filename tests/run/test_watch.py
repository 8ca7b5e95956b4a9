"""The head's watch: what it is told becomes alerts, these become acts with reasons, and a restart forgets none."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from taskworld import World

from areal_sky.adapters.notices import Notices
from areal_sky.core.alerts import CLEAR_S
from areal_sky.core.heartbeat import read_heartbeat
from areal_sky.core.telemetry import GpuWindow, Validity
from areal_sky.core.windowcodec import to_wire
from areal_sky.errors import InvalidInput, NotFound
from areal_sky.run.alertstore import AlertStore
from areal_sky.run.watch import MANUAL_S, Watch
from areal_sky.spec.load import load_text


class Watched(World):
    """Nodes of four GPUs each, and a watch that has rules; heartbeats come when told."""

    def __init__(self, folder: Path, *rules: str, nodes: int = 2):
        super().__init__(folder, nodes)
        self.rules = load_text("resources: {}\nalerts: " + json.dumps(rules), "x").alerts
        self.watch_again()
        self.tick()

    def watch_again(self, notices: Notices | None = None) -> None:
        """A new process of the head."""
        if hasattr(self, "store"):
            self.store.close()
            self.start()
        self.store = AlertStore(Path(self.env.state_dir) / "alerts.db")
        env = replace(self.env, alerts=self.rules)
        self.watch = Watch(self.service, self.store, env, notices, self.clock.now)

    def beat(self, seconds: int = 1, node: int = 0, task: str = "", use: float = 0.9, **more: Any) -> str | None:
        """Seconds of heartbeats of one node, whose GPUs are all the task's; `more` is of GPU 2."""
        sampling = None
        for _ in range(seconds):
            now_s = self.clock.advance(1.0)
            fine = GpuWindow(0, "H100", now_s - 1, now_s, use, use, use, 40.0, 80.0, 60.0, 300.0, 1.0, Validity.KNOWN)
            windows = [replace(fine, device=g, **(more if g == 2 else {})) for g in range(4)]
            running = [{"task_id": task, "rank": g, "kind": "train", "gpus": [g]} for g in range(4)] if task else []
            beat = {
                "group": "w", "replica": f"c-w-{node}", "index": 0, "t_s": now_s, "running": running,
                "windows": json.loads(json.dumps(to_wire(windows))),
            }  # fmt: skip
            sampling = self.watch.heard(read_heartbeat(beat, now_s), now_s)
            self.service.tick(now_s)
            self.watch.look()
        return sampling

    def active(self) -> list[dict[str, Any]]:
        return self.watch.listed()["active"]

    def told(self) -> list[tuple[str, str, list[str]]]:
        return [(a["kind"], a["place"], a["done"]) for a in self.active()]


def test_a_lost_gpu_takes_its_node_out_of_use_until_it_is_back(tmp_path: Path) -> None:
    world = Watched(tmp_path)
    task = world.submit(gpus=1, bundles=4)
    world.tick(2)
    node = int(world.service.get(task)["where"].split("-")[2].split("/")[0])
    world.beat(2, node, task)
    world.beat(1, node, task, validity=Validity.LOST)
    ((kind, place, done),) = world.told()
    assert (kind, place, done) == ("lost_gpu", f"c-w-{node}/0 GPU 2", [f"node c-w-{node}/0 takes no new work"])
    other = world.submit(gpus=1, bundles=4)
    late = world.submit(gpus=1)
    world.tick(2)
    assert (world.state(other), world.state(late)) == ("RUNNING", "QUEUED")
    assert "is avoided: alert a1: the GPU is lost" in world.story(late)
    assert "alert a1: lost_gpu at " in world.story(task) and "takes no new work" in world.story(task)

    world.watch_again()  # a new head knows both, and that the device is back ends both
    world.tick(2)
    world.beat(int(CLEAR_S) + 2, node, task)
    assert world.told() == []
    (over,) = world.watch.listed()["over"]
    assert over["alert_id"] == "a1"
    assert "alert a1 is over" in world.story(task)
    world.finish(task)
    world.tick(3)
    assert world.state(late) == "RUNNING"


def test_half_of_a_group_is_the_most_unless_the_user_wants_more(tmp_path: Path) -> None:
    world = Watched(tmp_path)
    for node in (0, 1):
        world.beat(1, node, validity=Validity.LOST)
    dones = [done[0] for _, _, done in world.told()]
    assert sorted(d.split(",")[0] for d in dones) == [
        "cordon: node c-w-1/0 is not cordoned", "node c-w-0/0 takes no new work"
    ]  # fmt: skip
    assert world.watch.uncordon("c-w-0", 0) == "node c-w-0/0 takes work again"
    with pytest.raises(NotFound, match="no node c-w-7/0 lives"):
        world.watch.uncordon("c-w-7", 0)
    world.store.close()
    world.journal.close()
    wanted = Watched(tmp_path / "wanted", "gpu_lost == 1 then cordon", "lost_gpu then ignore")
    for node in (0, 1):
        wanted.beat(1, node, validity=Validity.LOST)
    assert [done for _, _, done in wanted.told()] == [[f"node c-w-{n}/0 takes no new work"] for n in (1, 0)]


def test_a_stall_is_queued_again_from_its_checkpoint_but_not_for_ever(tmp_path: Path) -> None:
    world = Watched(tmp_path, "stall then requeue, sample_fast")
    task = world.submit(gpus=1, bundles=4)
    world.tick(2)
    world.beat(60, 0, task)
    world.service.checkpointed(task)
    sampling = world.beat(9, 0, task, use=0.0)
    ((kind, place, done),) = world.told()
    assert (kind, place) == ("stall", task) and sampling == "fast"
    assert done[0].startswith(f"{task} is ended and queued again, ") and "after its checkpoint" in done[0]
    assert done[1] == "c-w-0/0 sampled faster"
    world.tick(3)
    info = world.service.get(task)
    assert (info["state"], info["attempt"], info["retries"]) == ("RUNNING", 2, 0)
    assert "told to leave: alert a1: no progress, and its GPUs are idle" in world.story(task)
    world.beat(30, 0, task)
    assert world.told() == []  # the new attempt is learnt anew
    world.beat(31, 0, task)
    world.beat(9, 0, task, use=0.0)
    assert "is not queued again" in world.told()[0][2][-2]
    assert world.state(task) == "RUNNING"


def test_an_elastic_gang_goes_on_without_its_straggler(tmp_path: Path) -> None:
    world = Watched(tmp_path, "straggler then shrink")
    task = world.submit(gpus=1, bundles=4, min_bundles=2)
    fixed = world.submit(gpus=1, bundles=4)
    world.tick(2)
    world.beat(1, 0, task)
    for _ in range(40):
        for t in (task, fixed):
            for rank in range(4):
                world.service.track_metrics(t, {"step_time_s": 4.0 if rank == 2 else 1.0}, rank)
        world.beat(1, 0, task)
    by_task = {place.split()[0]: done for _, place, done in world.told()}
    assert by_task[task] == [f"{task} goes on without rank 2"]
    assert by_task[fixed] == [f"shrink: {fixed} cannot run with fewer ranks (see its `min_bundles`)"]
    world.tick(3)
    assert world.service.get(task)["gone_ranks"] == [2] and world.state(task) == "RUNNING"


def test_nan_is_an_alert_of_the_next_look_and_over_with_the_next_number(tmp_path: Path) -> None:
    world = Watched(tmp_path)
    task = world.submit()
    world.tick(2)
    world.beat(1)
    world.service.track_metrics(task, {"reward": float("nan")}, rank=0)
    world.watch.look()
    ((kind, place, _),) = world.told()
    assert (kind, place, world.active()[0]["what"]) == ("not_a_number", task, "reward is NaN")
    json.dumps(world.watch.listed(), allow_nan=False)
    world.service.track_metrics(task, {"reward": 0.5})
    world.beat(int(CLEAR_S) + 1)
    assert world.told() == []


def test_alerts_of_programs_last_as_long_as_they_are_raised(tmp_path: Path) -> None:
    world = Watched(tmp_path)
    first = world.watch.trigger("KL  is\nlarge", {"kl": 12.5, "x": float("nan")}, "t1")
    again = world.watch.trigger("KL is large", {"kl": 13.0}, "t1")
    other = world.watch.trigger("KL is large", {})
    assert (first, again, other) == (
        {"alert_id": "a1", "new": True}, {"alert_id": "a1", "new": False}, {"alert_id": "a2", "new": True}
    )  # fmt: skip
    assert [(a["place"], a["evidence"]) for a in world.active()] == [
        ("t1", "kl 13"), ("the cluster", "told by a program")
    ]  # fmt: skip
    json.dumps(world.watch.listed(), allow_nan=False)
    world.beat(int(MANUAL_S + CLEAR_S) + 2)
    assert world.active() == []
    with pytest.raises(InvalidInput, match="expected some words"):
        world.watch.trigger(" \n", {})


# ---------------------------------------------------------------- who is told


class Hook:
    """A web server that takes notices; `status` is what it answers, one after the other."""

    def __init__(self, status: list[int]):
        self.got: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(status[min(len(outer.got), len(status)) - 1])
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/secret-part"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook([200])
    yield made
    made.server.shutdown()
    made.server.server_close()


def send(notices: Notices, *texts: str) -> list[str]:
    """What the notices say was done, once all of it was."""
    done: list[str] = []
    ended = threading.Event()

    def told(number: int, words: str) -> None:
        done.append(f"{number}: {words}")
        ended.set()

    notices.told = told
    for number, text in enumerate(texts, 1):
        notices.send(number, text, {"kind": "stall"})
    assert ended.wait(30)
    return done


def test_the_webhook_and_the_command_are_told_and_that_is_recorded(tmp_path: Path, hook: Hook) -> None:
    notices = Notices("$HOOK", f"cat > {tmp_path}/told; false", {"HOOK": hook.url})
    world = Watched(tmp_path / "head")
    world.watch_again(notices)
    ended = threading.Event()
    told, words = world.watch.told, list[str]()

    def noting(number: int, text: str) -> None:
        told(number, text)
        words.append(text)
        if len(words) == 2:
            ended.set()

    notices.told = noting
    world.watch.trigger("KL is large", {"kl": 12.5})
    assert ended.wait(30)
    notices.stop()
    assert world.active()[0]["done"] == ["told the webhook at 127.0.0.1", "the command failed with exit code 1"]
    assert hook.got[0]["text"] == "manual at the cluster: KL is large (kl 12.5)"
    assert json.loads((tmp_path / "told").read_text())["alert"]["metrics"] == {"kl": 12.5}
    assert "secret-part" not in json.dumps(world.watch.listed())


def test_who_cannot_be_told_is_said(hook: Hook) -> None:
    assert send(Notices("$NOWHERE", None, {}), "x") == ["1: the webhook is not told: $NOWHERE is not set on the head"]
    hook.server.shutdown()
    hook.server.server_close()
    refusing = Hook([404])
    assert send(Notices(refusing.url, None, {}), "x") == ["1: could not tell the webhook at 127.0.0.1: HTTP 404"]
    refusing.server.shutdown()
    refusing.server.server_close()


def test_many_alerts_do_not_flood_people(tmp_path: Path) -> None:
    world = Watched(tmp_path)
    sent: list[str] = []

    class Counting(Notices):
        def send(self, number: int, text: str, body: Any) -> None:
            sent.append(text)

    world.watch_again(Counting(None, None, {}))
    for n in range(100):
        world.watch.trigger(f"thing {n}", {})
    assert len(sent) == 30 and len(world.active()) == 100
