"""The node's agent: sampling on schedule, windows, shipping, the lease."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from areal_sky.adapters.hostmemory import MemoryUse
from areal_sky.adapters.lanes import Lanes, Relieved
from areal_sky.core.heartbeat import read_heartbeat
from areal_sky.core.model import NodeShape
from areal_sky.core.nodeenv import NodeEnv
from areal_sky.core.telemetry import GpuSample, Validity
from areal_sky.core.windowcodec import read_windows
from areal_sky.errors import Unreachable
from areal_sky.run import agent as agent_module
from areal_sky.run.agent import Agent, open_node_reader

START_S = 1000.0


class Reader:
    """One GPU whose load is what the test last said; notes when it was read."""

    def __init__(self, gpus: int = 1):
        self.gpus, self.load, self.times, self.error, self.lost, self.xid = gpus, 0.5, [], None, set(), None

    def read(self, now_s):
        self.times.append(now_s)
        if self.error:
            raise self.error
        return [
            GpuSample(i, now_s, "H100", None, None, None, None, None, Validity.LOST, "GPU is lost")
            if i in self.lost
            else GpuSample(i, now_s, "H100", self.load, 1.0, 80.0, 50.0, 100.0, xid=self.xid)
            for i in range(self.gpus)
        ]

    def relieve(self):
        return False

    def close(self):
        pass


class Head:
    """Takes heartbeats, or does not answer."""

    def __init__(self):
        self.up, self.bodies, self.lease_s, self.orders = True, [], 600.0, {}

    def __call__(self, body):
        if not self.up:
            raise Unreachable("no answer from the head")
        self.bodies.append(json.loads(json.dumps(body)))  # what is sent must be JSON
        return {"lease_s": self.lease_s, "t_s": 0.0} | self.orders

    def windows(self):
        return [asdict(w) for b in self.bodies for w in read_windows(b["windows"], 0.0).windows()]


class Ticks:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def env(tmp_path: Path) -> NodeEnv:
    return NodeEnv("c", "rollout", "c-rollout-0", 1, "127.0.0.1", state_dir=str(tmp_path), shape=NodeShape(gpus=1))


def drive(agent: Agent, seconds: float, start_s: float = START_S, tick_s: float = 0.01) -> list:
    """Calls step at each tick, as a loop does."""
    ready = []
    for i in range(round(seconds / tick_s) + 1):
        ready += agent.step(start_s + i * tick_s)
    return ready


def train(node_dir: Path, kind: str = "train") -> Path:
    path = node_dir / "running" / "t1.0.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"task_id": "t1", "rank": 0, "gpus": [0], "pid": os.getpid(), "kind": kind}))
    return path


def test_normal_sampling_is_one_read_and_one_window_a_second(env):
    reader = Reader()
    ready = drive(Agent(env, reader, Head()), 5)
    assert [t - START_S for t in reader.times] == pytest.approx([1, 2, 3, 4, 5], abs=0.011)
    assert [(w.start_s, w.end_s) for w in ready] == [(START_S + i, START_S + i + 1) for i in range(5)]
    assert all((w.utilization_mean, w.valid_frac, w.validity) == (0.5, 1.0, Validity.KNOWN) for w in ready)


def test_a_training_task_is_sampled_ten_times_as_often(env, tmp_path):
    train(tmp_path)
    reader = Reader()
    ready = drive(Agent(env, reader, Head()), 3)
    assert len(reader.times) == 30
    assert [(w.end_s - w.start_s, w.valid_frac) for w in ready] == [(pytest.approx(1.0), 1.0)] * 3


def test_the_rate_follows_the_tasks_at_the_next_window(env, tmp_path):
    reader = Reader()
    agent = Agent(env, reader, Head())
    drive(agent, 1)
    assert (agent.interval_s, len(reader.times)) == (1.0, 1)
    path = train(tmp_path)
    drive(agent, 2, START_S + 1.01)
    assert (agent.interval_s, len(reader.times)) == (0.1, 12)
    path.unlink()
    train(tmp_path, kind="rollout")
    drive(agent, 2, START_S + 3.02)
    assert agent.interval_s == 1.0


def test_a_task_that_asks_is_watched_closely_and_the_heads_wish_goes_first(env, tmp_path):
    head, reader = Head(), Reader()
    agent = Agent(env, reader, head)
    train(tmp_path, kind="eval")
    (tmp_path / "watched").mkdir()
    (tmp_path / "watched" / "t1").touch()
    (tmp_path / "watched" / "t9").touch()  # it ran here once
    drive(agent, 1)
    assert agent.interval_s == 0.1
    head.orders = {"sampling": "slow"}
    agent.beat(START_S + 1)
    drive(agent, 1, START_S + 1.01)
    assert agent.interval_s == 1.0
    head.orders, _ = {"sampling": "fast"}, (tmp_path / "watched" / "t1").unlink()
    agent.beat(START_S + 2)
    drive(agent, 1, START_S + 2.02)
    assert agent.interval_s == 0.1
    head.orders = {}
    agent.beat(START_S + 3)
    drive(agent, 1, START_S + 3.03)
    assert agent.interval_s == 1.0


def test_a_gpu_that_is_lost_ends_its_window_at_once(env, tmp_path):
    train(tmp_path)
    reader = Reader(gpus=2)
    agent = Agent(env, reader, Head())
    assert drive(agent, 0.35) == []
    reader.lost = {1}
    first = drive(agent, 0.1, START_S + 0.36)
    assert [(w.device, w.validity, w.end_s - START_S) for w in first] == [
        (0, Validity.KNOWN, pytest.approx(0.4)), (1, Validity.LOST, pytest.approx(0.4)),
    ]  # fmt: skip
    assert len(drive(agent, 1.05, START_S + 0.47)) == 2  # told once: the next window is a whole one
    reader.xid = 79
    assert [w.xid for w in drive(agent, 0.1, START_S + 1.53)] == [79, None]


def test_the_head_says_how_often_to_post_within_reason(env):
    head = Head()
    agent = Agent(env, Reader(), head)
    for told, expected in ((4.0, 4.0), (3600.0, 5.0), (0.0, 1.0), ("x", 1.0)):
        head.orders = {"beat_s": told}
        agent.beat(START_S)
        assert agent.beat_s == expected


def test_bad_news_is_posted_at_once(env, tmp_path):
    train(tmp_path)
    head, reader, stop = Head(), Reader(), threading.Event()
    head.orders = {"beat_s": 5.0}
    thread = threading.Thread(target=Agent(env, reader, head).run, args=(stop,))
    thread.start()
    try:
        until(lambda: head.bodies)
        reader.lost = {0}
        until(lambda: any(w["validity"] == "lost" for w in head.windows()), patience_s=4.0)  # before the next beat
    finally:
        stop.set()
        thread.join(timeout=5)
    assert not thread.is_alive() and head.bodies[-1]["leaving"]


def until(happened, patience_s: float = 10.0) -> None:
    end = time.monotonic() + patience_s
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_schedule_does_not_drift_when_steps_are_late(env, tmp_path):
    train(tmp_path)
    reader = Reader()
    agent = Agent(env, reader, Head())
    agent.step(START_S)
    for i in range(1, 1001):  # each step comes 30 ms late
        agent.step(START_S + i * 0.1 + 0.03)
    assert len(reader.times) == 1000
    assert reader.times[-1] - START_S == pytest.approx(100.03)


def test_samples_slept_through_are_missing_not_made_up(env, tmp_path):
    train(tmp_path)
    reader = Reader()
    agent = Agent(env, reader, Head())
    drive(agent, 1)
    (w,) = agent.step(START_S + 6.0)  # five seconds asleep: one sample of fifty
    assert (w.end_s - w.start_s, w.valid_frac, w.validity) == (pytest.approx(5.0), 0.02, Validity.UNKNOWN)
    assert w.utilization_mean is None
    assert len(drive(agent, 2, START_S + 6.0)) == 2  # and on it goes


def test_a_clock_set_back_starts_the_schedule_anew(env):
    agent = Agent(env, Reader(), Head())
    drive(agent, 2)
    assert len(drive(agent, 2, START_S - 3600)) == 2


def test_the_machines_memory_is_told_now_and_then(env):
    head, ticks, uses = Head(), Ticks(), iter([MemoryUse(10.0, 64.0), None])
    agent = Agent(env, None, head, monotonic=ticks, memory=lambda: next(uses))
    for second in range(12):
        ticks.now = float(second)
        agent.beat(START_S + second)
    beats = [read_heartbeat(b, START_S + i + 0.5) for i, b in enumerate(head.bodies)]
    assert [(i, b.memory) for i, b in enumerate(beats) if b.memory] == [(0, (START_S + 0.5, 10.0, 64.0))]
    assert next(uses, None) is None  # asked a second time, and there was nothing to tell


def test_what_was_sent_is_not_sent_again_and_what_was_not_is(env):
    head, ticks = Head(), Ticks()
    agent = Agent(env, Reader(), head, monotonic=ticks)
    drive(agent, 2)
    assert agent.beat(START_S + 2)
    head.up = False
    drive(agent, 3, START_S + 2.01)
    assert not agent.beat(START_S + 5)
    assert not agent.beat(START_S + 6)
    assert (agent.last_ok_s, agent.last_error) == (START_S + 2, "no answer from the head")
    head.up = True
    assert agent.beat(START_S + 7)
    assert agent.beat(START_S + 8)
    assert [w["end_s"] - START_S for w in head.windows()] == [1, 2, 3, 4, 5]
    assert agent.last_error == ""


def test_a_long_outage_keeps_the_latest_windows_and_catches_up_in_parts(env, monkeypatch):
    monkeypatch.setattr(agent_module, "BUFFER_S", 50)
    monkeypatch.setattr(agent_module, "WINDOWS_PER_POST", 20)
    head = Head()
    head.up = False
    agent = Agent(env, Reader(), head)
    drive(agent, 200, tick_s=0.5)
    agent.beat(START_S + 200)
    head.up = True
    for _ in range(4):
        agent.beat(START_S + 200)
    assert [len(read_windows(b["windows"], 0.0)) for b in head.bodies] == [20, 20, 10, 0]
    assert [w["end_s"] - START_S for w in head.windows()] == list(range(151, 201))
    assert head.bodies[-1]["dropped"] == 150  # a gap that is known to be one


def test_a_heartbeat_says_who_where_and_what_runs(env, tmp_path):
    train(tmp_path)
    agent = Agent(env, Reader(), Head(), raylet_alive=lambda: False)
    drive(agent, 1)
    body = agent.heartbeat_body(START_S + 1)
    windows = [asdict(w) for w in read_windows(body.pop("windows"), 0.0).windows()]
    assert body == {
        "cluster": "c", "group": "rollout", "replica": "c-rollout-0", "index": 1, "t_s": START_S + 1,
        "pid": os.getpid(), "raylet_alive": False, "gpus": 1, "interval_s": 0.1, "telemetry_error": "",
        "running": [{"task_id": "t1", "rank": 0, "kind": "train", "gpus": [0]}], "leaving": False,
        "dropped": 0,
    }  # fmt: skip
    assert windows[0]["validity"] == "known"


def test_a_node_without_a_reader_still_beats_and_says_why(env):
    agent = Agent(env, None, Head(), no_reader_reason="NVML does not start: Driver Not Loaded")
    assert drive(agent, 3) == []
    body = agent.heartbeat_body(START_S)
    assert (body["gpus"], len(read_windows(body["windows"], 0.0))) == (1, 0)
    assert body["telemetry_error"] == "NVML does not start: Driver Not Loaded"


def test_a_reader_that_breaks_is_noted_and_forgotten_when_it_works_again(env):
    reader = Reader()
    agent = Agent(env, reader, Head())
    reader.error = OSError("driver gone")
    drive(agent, 2)
    assert agent.heartbeat_body(0)["telemetry_error"] == "cannot read the GPUs: driver gone"
    reader.error = None
    drive(agent, 1, START_S + 2.01)
    assert agent.heartbeat_body(0)["telemetry_error"] == ""


def test_gpus_are_counted_where_the_shape_is_not_known(tmp_path):
    env = NodeEnv("c", "g", "c-g-0", 0, "h", state_dir=str(tmp_path))
    agent = Agent(env, Reader(gpus=8), Head())
    drive(agent, 1)
    assert agent.heartbeat_body(0)["gpus"] == 8


def test_the_lease_is_renewed_by_answers_alone_and_not_by_the_wall_clock(env):
    head, ticks = Head(), Ticks()
    agent = Agent(env, Reader(), head, monotonic=ticks)
    assert agent.lease_left_s() == 600
    ticks.now = 100
    head.up = False
    agent.beat(START_S)
    assert agent.lease_left_s() == 500
    head.up, head.lease_s = True, 30.0
    agent.beat(START_S + 1e9)  # the wall clock jumps: the lease does not care
    assert agent.lease_left_s() == 30
    ticks.now = 131
    assert agent.lease_left_s() == -1


def test_the_loop_samples_posts_and_says_goodbye(tmp_path):
    env = NodeEnv(
        "c", "g", "c-g-0", 0, "h", state_dir=str(tmp_path), shape=NodeShape(gpus=1), simulated_gpus=True
    )  # fmt: skip
    spin = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        (tmp_path / "running").mkdir()
        about = {"task_id": "t1", "rank": 0, "gpus": [0], "pid": spin.pid, "kind": "train"}
        (tmp_path / "running" / "t1.0.json").write_text(json.dumps(about))
        head, stop = Head(), threading.Event()
        reader, reason = open_node_reader(env)
        assert reason == ""
        agent = Agent(env, reader, head)
        thread = threading.Thread(target=agent.run, args=(stop,))
        thread.start()
        time.sleep(3.5)
        stop.set()
        thread.join(timeout=5)
        assert not thread.is_alive()
    finally:
        spin.kill()
        spin.wait()
    assert 4 <= len(head.bodies) <= 7
    assert [b["leaving"] for b in head.bodies] == [False] * (len(head.bodies) - 1) + [True]
    windows = head.windows()
    assert len(windows) >= 2
    assert all(w["validity"] == "known" and w["valid_frac"] > 0.5 for w in windows)
    assert windows[-1]["utilization_mean"] > 0.5


def test_a_read_that_was_given_up_has_changed_nothing(env, tmp_path):
    train(tmp_path)
    reader = Reader()
    agent = Agent(env, reader, Head())
    drive(agent, 0.55)
    due_s, reader.error = agent.next_s, Relieved()
    with pytest.raises(Relieved):
        agent.step(due_s)
    assert agent.next_s == due_s and agent.heartbeat_body(0)["telemetry_error"] == ""
    reader.error = None
    (w,) = drive(agent, 0.5, due_s)  # another thread goes on
    assert (w.valid_frac, w.end_s - w.start_s) == (1.0, pytest.approx(1.0))


def test_a_gpu_whose_driver_hangs_holds_up_the_others_once(env, tmp_path):
    train(tmp_path)
    hangs, stop, hung = threading.Event(), threading.Event(), []

    def look(device: int, now_s: float) -> GpuSample:
        if device == 0 and hangs.is_set():
            hung.append(now_s)
            stop.wait(30)
        return GpuSample(device, time.time(), "H100", 0.5, 1.0, 80.0, 50.0, 100.0)

    class Hanging:
        def __init__(self):
            self.lanes, self.times, self.closed = Lanes(look, 0.1), [], False
            self.relieve = self.lanes.relieve

        def read(self, now_s):
            news = self.lanes.round((0, 1))
            self.times.append(news[1].t_s)
            return list(news.values())

        def close(self):
            self.closed = True

    reader = Hanging()
    thread = threading.Thread(target=Agent(env, reader, Head()).run, args=(stop,))
    thread.start()
    until(lambda: len(reader.times) >= 3)
    hangs.set()
    count = len(reader.times)
    until(lambda: len(reader.times) >= count + 20)
    stop.set()
    thread.join(timeout=5)
    assert not thread.is_alive() and reader.closed
    assert len(hung) == 1  # and the other was read twenty times meanwhile


def test_a_slow_head_delays_no_sample(env, tmp_path):
    train(tmp_path)
    reader, stop = Reader(), threading.Event()

    def slow(body):
        time.sleep(1.0)
        return {}

    thread = threading.Thread(target=Agent(env, reader, slow).run, args=(stop,))
    thread.start()
    time.sleep(2.0)
    stop.set()
    thread.join(timeout=5)
    assert len(reader.times) >= 14


def test_a_node_without_gpus_of_nvidia_has_no_reader(env, monkeypatch):
    from areal_sky.adapters import nvml

    monkeypatch.setattr(nvml, "open_reader", lambda: (None, "NVML sees no GPU on this machine"))
    assert open_node_reader(env) == (None, "NVML sees no GPU on this machine")
