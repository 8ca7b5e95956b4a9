"""Order, arrays, retries, time limits, memory, poison, broken nodes: what a task may ask of the service."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from taskworld import GPU4, World

from areal_sky.core.model import Bundle
from areal_sky.core.nodefaults import AVOID_S
from areal_sky.core.taskmodel import TaskSpec
from areal_sky.errors import AlreadyExists, InvalidInput, NotFound, Refused, StateError
from areal_sky.run import taskbook
from areal_sky.run.dispatch import START_S
from areal_sky.run.tasklogs import TaskLogs


@pytest.fixture
def world(tmp_path: Path) -> World:
    w = World(tmp_path)
    w.tick()
    return w


def fail(world: World, task_id: str, code: int = 1, words: str = "", lost: str = "") -> None:
    """Every rank of the running task fails, and the service takes note."""
    attempt = world.service.get(task_id)["attempt"]
    if words:
        world.service.push_log(task_id, attempt, 0, "err", 0, words.encode())
    for rank in range(world.service.get(task_id)["bundles"]):
        world.ray.finish(f"{task_id}.{attempt}", rank, code, lost)
    world.tick(3)


# ---------------------------------------------------------------- order


def test_a_task_waits_for_others_and_says_for_which(world: World) -> None:
    prep = world.submit(name="prep")
    train = world.submit(name="train", after=("prep",))
    late = world.submit(after=("train", prep))
    world.tick(2)
    assert world.service.get(train)["after"] == ["t1"]
    assert world.service.get(train)["reason"] == "it comes after t1 (prep)"
    assert world.service.get(late)["reason"] == "it comes after t2 (train), t1 (prep)"
    assert world.service.view().demand == ()  # no machine helps
    world.finish(prep)
    world.tick(3)
    assert (world.state(train), world.state(late)) == ("RUNNING", "QUEUED")
    world.start()  # a new process knows it, too
    world.tick()
    assert world.service.get(late)["reason"] == "it comes after t2 (train)"
    world.finish(train)
    world.tick(3)
    assert world.state(late) == "RUNNING"
    assert world.state(world.submit(after=("train",))) == "PLACED"  # it has succeeded already


def test_who_waits_in_vain_ends_with_a_reason(world: World) -> None:
    first = world.submit(name="prep")
    second = world.submit(name="train", after=(first,))
    third = world.submit(after=(second,))
    world.tick(2)
    fail(world, first)
    assert [world.state(t) for t in (second, third)] == ["FAILED", "FAILED"]
    assert world.service.get(second)["reason"] == "t1 (prep), which it waited for, failed"
    assert world.service.get(third)["reason"] == "t2 (train), which it waited for, failed"
    too_late = world.submit(after=(first,))
    assert world.state(too_late) == "FAILED"
    running = world.submit()
    waits = world.submit(after=(running,))
    world.tick(2)
    world.service.cancel(running)
    world.tick(3)
    assert world.state(waits) == "CANCELLED"


def test_wrong_orders_are_refused_in_words(world: World) -> None:
    with pytest.raises(InvalidInput, match="after: there is no task 't7'"):
        world.submit(after=("t7",))
    with pytest.raises(InvalidInput, match="after: there is no task 'me2'\nafter: me waits for me: a circle"):
        world.submit(name="me", after=("me2", "me"))
    specs = [world.spec(name="a", after=("c",)), world.spec(name="b", after=("a",)), world.spec(name="c", after=("b",))]
    with pytest.raises(InvalidInput, match="a waits for c waits for b waits for a: a circle"):
        world.service.submit_many(specs)
    assert world.service.list() == []


def test_an_array_is_many_tasks_and_one_name(world: World) -> None:
    answer = world.service.submit(world.spec(name="sweep", array=10))
    assert (answer["task_id"], answer["task_ids"]) == ("t1", "t1..t10")
    after = world.submit(name="sum", after=("sweep",))
    world.tick(2)
    assert world.ray.all_gangs["t4.1"].starts[0].envs == {"AREAL_SKY_ARRAY_INDEX": "3", "AREAL_SKY_ARRAY_SIZE": "10"}
    assert world.service.get(after)["reason"] == "it comes after t1..t10 (sweep), 10 of them left"
    assert world.state("t8") == "RUNNING" and world.state("t9") == "QUEUED"
    for n in range(1, 9):
        world.finish(f"t{n}")
    world.tick(3)
    world.start()
    world.tick(2)
    assert world.service.get(after)["reason"].endswith("2 of them left")
    for n in (9, 10):
        world.finish(f"t{n}")
    world.tick(3)
    assert world.state(after) == "RUNNING"


@pytest.mark.parametrize("strategy", ["weighted", "fifo", "shortest", "attained"])
def test_every_order_runs_and_explains_itself(tmp_path: Path, strategy: str) -> None:
    world = World(tmp_path)
    world.env = replace(world.env, strategy=strategy)
    world.start()
    world.tick()
    tasks = [world.submit(gpus=4, name="like", priority=p) for p in (1, 1, 9, 5)]
    world.tick(2, seconds=30)
    assert "number 1 of 2 in the queue: " in world.story(next(t for t in tasks if "number 1 of" in world.story(t)))
    for _ in range(4):
        for gang, rank in world.ray.running():
            world.ray.finish(gang, rank)
        world.tick(3, seconds=30)
    assert {world.state(t) for t in tasks} == {"SUCCEEDED"}
    world.start()  # what it has learnt is learnt again
    world.tick()
    assert world.state(world.submit(gpus=4, name="like")) == "PLACED"


def test_an_order_that_does_not_exist_is_said(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.env = replace(world.env, strategy="fastest")
    with pytest.raises(InvalidInput, match="there is no strategy 'fastest'"):
        world.start()


def test_labels_find_tasks_again(world: World) -> None:
    both = world.submit(labels={"run": "a", "team": "x"})
    world.submit(labels={"run": "b"})
    assert [t["task_id"] for t in world.service.list(labels={"run": "a"})] == [both]
    assert world.service.list(labels={"run": "a", "team": "y"}) == []
    assert len(world.service.list("active", limit=1)) == 1


# ---------------------------------------------------------------- submitting


def test_a_batch_is_all_or_nothing_and_its_keys_make_it_safe_to_repeat(world: World) -> None:
    good = [world.spec(submit_key=f"k{n}", name=f"n{n}") for n in range(3)]
    with pytest.raises(Refused, match="can never fit"):
        world.service.submit_many([*good, world.spec(gpus=4, bundles=9)])
    assert world.service.list() == []
    first = world.service.submit_many(good)
    assert [a["task_id"] for a in first["tasks"]] == ["t1", "t2", "t3"]
    again = world.service.submit_many([*good, world.spec(after=("n1",))])
    assert [a["task_id"] for a in again["tasks"]] == ["t1", "t2", "t3", "t4"]
    array = world.spec(submit_key="sweep", array=3)
    assert world.service.submit(array)["task_ids"] == "t5..t7"
    assert world.service.submit(array)["task_ids"] == "t5..t7"
    with pytest.raises(AlreadyExists, match="'k1' is t2's, which was asked to do other work"):
        world.submit(submit_key="k1", command="something else")
    with pytest.raises(InvalidInput, match="array_index"):
        world.submit(array_index=1)


def test_a_large_array_is_one_transaction(world: World) -> None:
    appended: list[int] = []
    append = world.journal.append
    world.journal.append = lambda events: (appended.append(len(events)), append(events))[1]  # type: ignore[method-assign]
    answer = world.service.submit(world.spec(array=2000))
    assert answer["task_ids"] == "t1..t2000"
    assert appended == [2000, 8]  # all submits at once, all placements at once


def test_a_key_is_known_after_the_end_and_after_a_restart(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taskbook, "RECENT", 1)
    old = world.submit(submit_key="k", name="old")
    world.service.cancel(old)
    for _ in range(3):
        world.service.cancel(world.submit())
    world.start()
    assert world.submit(submit_key="k") == old


def test_ended_tasks_leave_the_memory_and_are_found_on_disk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taskbook, "RECENT", 5)
    for n in range(20):
        task = world.submit(name=f"n{n}", labels={"n": str(n)})
        world.tick(2)
        world.service.track_metrics(task, {"n": n})
        world.finish(task)
        world.tick(2)
    assert len(world.service._tasks.recent) == 5
    assert [t["task_id"] for t in world.service.list()] == ["t20", "t19", "t18", "t17", "t16"]
    first = world.service.get("t1")
    assert (first["state"], first["metrics"]) == ("SUCCEEDED", {"n": 0.0})
    assert "succeeded" in world.story("t1")
    waits = world.submit(after=("n2", "t1"))
    assert world.state(waits) == "PLACED"
    assert len(world.service.usage().holds) == 21  # none is lost to the bill
    world.start()
    assert len(world.service._tasks.recent) == 5
    assert world.service.get("t3")["name"] == "n2"
    assert len(world.service.usage().holds) == 21
    with pytest.raises(NotFound):
        world.service.get("t99")


def test_the_slack_of_a_deadline_comes_from_how_long_like_tasks_have_run(world: World) -> None:
    for i in range(6):
        done = world.submit(gpus=4, name=f"step-{i}")
        world.tick(5)
        world.tick(seconds=1800.0)
        world.finish(done)
        world.tick(3)
    for n in range(2):
        world.submit(gpus=4, name=f"long-{n}")  # both nodes are taken
    world.tick(3)
    now_s = world.clock.now()
    like = world.submit(gpus=4, name="step-7", deadline_s=now_s + 3 * 3600)
    other = world.submit(gpus=4, name="new", deadline_s=now_s + 3 * 3600)

    def slack_h(task_id: str) -> float:
        (told,) = re.findall(r"deadline \(([0-9.]+) h of slack", world.story(task_id))
        return float(told)

    assert 2.3 <= slack_h(like) <= 2.7 and slack_h(other) == 3.0  # half an hour, as the others; nothing is known
    world.start()  # what was learnt is learnt again
    world.tick()
    assert 2.3 <= slack_h(like) <= 2.7


def test_an_order_that_learns_takes_no_prediction_for_a_users_estimate(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.env = replace(world.env, strategy="shortest")
    world.start()
    done = world.submit(name="step-1")
    world.tick(5)
    world.tick(seconds=1800.0)
    world.finish(done)
    world.tick(3)
    like = world.submit(name="step-2", deadline_s=world.clock.now() + 3600)
    record = world.service._tasks.live(like)
    assert record is not None and world.service._admitting.entry(record).estimate_s is None


def test_a_deadline_that_cannot_be_met_is_warned_of_or_refused(world: World) -> None:
    now_s = world.clock.now()
    answer = world.service.submit(world.spec(deadline_s=now_s - 120))
    assert answer["warnings"] == ["its deadline passed 2 min ago: it counts for nothing"]
    assert "warning: its deadline passed 2 min ago" in world.story(answer["task_id"])
    with pytest.raises(Refused, match="it asks to be refused then"):
        world.submit(deadline_s=now_s + 60, estimate_s=3600.0, if_late="refuse")
    task = world.submit(deadline_s=now_s + 60)
    world.tick(2, seconds=61)
    assert world.service.get(task)["late"] is True


# ---------------------------------------------------------------- runs that fail


def test_retries_wait_longer_each_time(world: World) -> None:
    task = world.submit(max_retries=2, backoff_s=10.0)
    world.tick(2)
    fail(world, task)
    info = world.service.get(task)
    assert (info["state"], info["retries"]) == ("QUEUED", 1)
    assert "retry 1 of 2; not before 10 s from now" in info["reason"]
    assert world.service.view().demand == ()
    world.start()  # a restart does not shorten the pause
    world.tick(2, seconds=4)
    assert world.state(task) == "QUEUED"
    world.tick(2, seconds=4)
    assert world.service.get(task)["attempt"] == 2
    world.tick(1)
    fail(world, task)
    assert "not before 20 s" in world.service.get(task)["reason"]
    world.service.cancel(task)
    world.tick(2, seconds=20)
    assert world.state(task) == "CANCELLED"


def test_jitter_spreads_what_failed_together(tmp_path: Path) -> None:
    world = World(tmp_path)
    factors = iter((0.8, 1.2))
    world.service._jitter = lambda: next(factors)
    world.tick()
    tasks = [world.submit(max_retries=1, backoff_s=100.0) for _ in range(2)]
    world.tick(2)
    for task in tasks:
        world.finish(task, 1)
    world.tick(3)
    first, second = (world.service.get(t)["not_before_s"] for t in tasks)
    assert second - first == pytest.approx(40)


def test_time_limits_end_runs_and_tasks(world: World) -> None:
    task = world.submit(timeout_s=60.0, total_timeout_s=100.0, max_retries=5)
    world.tick(2)
    world.tick(3, seconds=30)
    world.tick(2)
    info = world.service.get(task)
    assert (info["attempt"], info["retries"]) == (2, 1)
    assert "timed out: ran longer than 1m (timeout)" in world.story(task)
    world.tick(3, seconds=20)
    assert world.service.get(task)["state"] == "FAILED"
    assert "not done 1m40s after its first start" in world.service.get(task)["reason"]
    world.tick(2)
    assert world.ray.gangs_left() == []


def test_memory_that_ran_out_is_asked_for_next_time(world: World) -> None:
    host = world.submit(gpus=1, max_retries=2)
    world.tick(2)
    fail(world, host, -9, lost="the kernel killed it: out of memory")
    world.tick(2, seconds=11)
    assert world.service.get(host)["bundle"]["memory_gib"] == 4.0
    assert world.ray.all_gangs[f"{host}.2"].bundle == Bundle(1, 1, 4.0)
    shared = world.submit(gpus=0.5, max_retries=2)
    world.tick(2)
    fail(world, shared, 1, "Traceback ...\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n")
    world.tick(2)
    assert world.service.get(shared)["bundle"]["gpus"] == 1.0
    assert "out of GPU memory; retry 1 of 2; asks for 1 GPU, 1 CPU per rank from now on" in world.story(shared)
    world.start()
    assert world.service.get(shared)["bundle"]["gpus"] == 1.0


def test_a_task_that_outgrows_every_node_ends_instead_of_waiting_for_ever(world: World) -> None:
    task = world.service.submit(TaskSpec("train", command="x", bundle=Bundle(1, 1, 40), max_retries=9, backoff_s=0.0))
    task_id = task["task_id"]
    world.tick(2)
    fail(world, task_id, 1, "MemoryError\n")
    world.tick(2)
    info = world.service.get(task_id)
    assert info["state"] == "FAILED"
    assert "one bundle is more than a whole node of group w" in info["reason"]


def test_poison_is_not_run_again(world: World) -> None:
    task = world.submit(max_retries=50)
    for n in range(3):
        world.tick(2)
        assert world.state(task) == "RUNNING", n
        assert world.service.get(task)["places"][0]["replica"] == ("c-w-0", "c-w-0", "c-w-1")[n]
        fail(world, task, 1, f"KeyError: 'x' at 0x{n:06x}\n")
    assert world.state(task) == "FAILED"
    assert "3 runs on different nodes failed alike" in world.service.get(task)["reason"]
    assert world.service.get(task)["retries"] == 2


def test_a_task_that_avoids_a_node_waits_on_while_nodes_come(world: World) -> None:
    task = world.submit(4, max_retries=5)
    world.tick(2)
    world.submit(4)
    world.tick(2)
    for _ in range(2):
        fail(world, task, 1, "KeyError: 'x'\n")
        world.tick(2)
    assert world.state(task) == "QUEUED"  # it failed twice alike on one node, and the other is taken
    world.ray.add_node("w", "c-w-2", GPU4)
    world.tick(2)
    assert world.service.get(task)["places"][0]["replica"] == "c-w-2"


def test_where_there_is_one_node_a_task_is_not_kept_from_it(tmp_path: Path) -> None:
    world = World(tmp_path, nodes=1)
    world.tick()
    task = world.submit(max_retries=5)
    for n in range(1, 4):
        world.tick(2)
        assert (world.state(task), world.service.get(task)["attempt"]) == ("RUNNING", n)
        fail(world, task, 1, "KeyError: 'x'\n")
    world.ray.add_node("w", "c-w-1", GPU4)
    fail(world, task, 1, "KeyError: 'x'\n")
    world.tick(2)
    assert world.state(task) == "RUNNING"
    assert world.service.get(task)["places"][0]["replica"] == "c-w-1"
    world.ray.kill_node(next(n for n in world.ray.live if n.startswith("c-w-1")))
    world.tick(4)
    assert world.service.get(task)["places"][0]["replica"] == "c-w-0"  # it is the only one left


def test_a_node_where_different_tasks_fail_is_avoided_for_a_time(world: World) -> None:
    def run_and_fail(command: str) -> str:
        task = world.submit(command=command)
        world.tick(2)
        where = world.service.get(task)["places"][0]["replica"]
        fail(world, task)
        return where

    assert [run_and_fail("same") for _ in range(4)] == ["c-w-0"] * 4  # one command says nothing of the node
    assert [run_and_fail(f"c{n}") for n in range(3)] == ["c-w-0", "c-w-0", "c-w-1"]
    whole = world.submit(gpus=4, bundles=2)
    world.tick()
    assert "node c-w-0/0 is avoided: 3 different tasks failed there soon after their start" in world.story(whole)
    assert [run_and_fail(f"d{n}") for n in range(4)] == ["c-w-1"] * 4  # never more than half of a group
    world.start()
    world.tick()
    assert world.state(whole) == "QUEUED"
    world.tick(3, seconds=AVOID_S / 2)
    assert world.state(whole) == "RUNNING"


# ---------------------------------------------------------------- starting and stopping


def test_a_task_runs_when_its_runners_say_so(tmp_path: Path) -> None:
    world = World(tmp_path, slow_start=True)
    world.tick()
    task = world.submit(gpus=4, bundles=2)
    world.tick(5)
    assert world.state(task) == "PLACED"
    assert len(world.ray.running()) == 2
    world.ray.slow_start = False
    world.tick()
    assert world.state(task) == "RUNNING"


def test_a_run_so_short_that_nobody_saw_it_start_counts_as_one(tmp_path: Path) -> None:
    world = World(tmp_path, slow_start=True)
    world.tick()
    good, bad = world.submit(), world.submit()
    world.tick()
    world.finish(good, 0)
    world.finish(bad, 3)
    world.tick(3)
    assert (world.state(good), world.state(bad)) == ("SUCCEEDED", "FAILED")
    assert world.service.get(good)["running_s"] is not None


def test_runners_that_never_start_give_the_place_back(tmp_path: Path) -> None:
    world = World(tmp_path, slow_start=True)
    world.tick()
    task = world.submit()
    world.tick(2)
    world.tick(1, seconds=START_S + 60)
    assert "its ranks did not start within 120 s" in world.story(task)
    world.ray.slow_start = False
    world.tick(4)
    assert world.state(task) == "RUNNING"


@pytest.mark.parametrize("ticks", [0, 1, 2])
def test_cancel_races_the_start(tmp_path: Path, ticks: int) -> None:
    """However far the start has come, nothing is left of it."""
    world = World(tmp_path, slow_start=True)
    world.tick()
    task = world.submit(gpus=4, bundles=2)
    world.tick(ticks)
    connection: Any = world.service._gangs._ray
    start = connection.start

    def cancelled_meanwhile(*args: Any) -> None:
        world.service.cancel(task)
        start(*args)

    connection.start = cancelled_meanwhile
    world.tick()
    if ticks:
        world.service.cancel(task)
    world.ray.slow_start = False
    world.tick(4)
    assert world.state(task) == "CANCELLED"
    assert world.ray.running() == [] and world.ray.gangs_left() == []


def test_a_node_that_comes_and_goes_loses_no_task(world: World) -> None:
    task = world.submit(gpus=4, bundles=2)
    for n in range(5):
        world.tick(2)
        assert world.state(task) == "RUNNING"
        world.ray.kill_node(world.nodes[1] if n == 0 else f"again{n}")
        world.tick(3)
        assert world.state(task) == "QUEUED"
        world.ray.add_node("w", "c-w-1", GPU4, node_id=f"again{n + 1}")
    world.tick(3)
    info = world.service.get(task)
    assert (info["state"], info["retries"], info["attempt"]) == ("RUNNING", 0, 6)
    assert not world.ray.over_committed()
    world.finish(task)
    world.tick(3)
    assert world.state(task) == "SUCCEEDED"


def test_a_clock_that_jumps_harms_nothing(world: World) -> None:
    steady = [0.0]
    world.service._steady = lambda: steady[0]
    task = world.submit(gpus=4, timeout_s=3600.0)
    waits = world.submit(gpus=4, bundles=2)
    failed = world.submit(gpus=0, max_retries=1, backoff_s=60.0)
    world.tick(2)
    fail(world, failed)
    world.tick(3, seconds=-7200.0)
    world.tick(2)
    assert world.state(failed) == "RUNNING"  # its pause is over rather sooner than hours later
    assert (world.state(task), world.state(waits)) == ("RUNNING", "QUEUED")
    assert world.service.get(waits)["waiting_s"] == 0.0
    world.tick(3, seconds=86400.0)
    assert world.state(task) == "RUNNING"  # it has not run for a day
    steady[0] += 3700.0
    world.tick(1, seconds=3700.0)
    world.tick(2)
    assert "timed out: ran longer than 1h" in world.story(task)
    world.service.cancel(failed)
    world.tick(2)
    assert world.state(waits) == "RUNNING"


def test_a_full_disk_while_placing_leaves_the_task_waiting(world: World) -> None:
    world.submit(gpus=4, bundles=2)
    waits = world.submit(gpus=4)
    world.tick(2)
    world.finish("t1")
    append = world.journal.append

    def full(events: Sequence[Any]) -> None:
        if any(type(e.fact).__name__ == "Placed" for e in events):
            raise StateError("disk is full")
        append(events)

    world.journal.append = full  # type: ignore[method-assign]
    for _ in range(3):
        with pytest.raises(StateError):
            world.tick(2)
    assert world.state(waits) == "QUEUED"
    world.journal.append = append  # type: ignore[method-assign]
    world.tick(3)
    assert world.state(waits) == "RUNNING"


# ---------------------------------------------------------------- reports and logs


def test_checkpoints_and_phases_are_kept(world: World) -> None:
    task = world.submit()
    with pytest.raises(Refused, match="does not run"):
        waits = world.submit(gpus=4, bundles=2)
        world.service.checkpointed(waits)
    world.tick(2)
    world.service.checkpointed(task)
    world.service.enter_phase(task, "eval", True)
    world.service.enter_phase(task, "eval", True)
    with pytest.raises(InvalidInput, match="phase"):
        world.service.enter_phase(task, "", True)
    world.start()
    info = world.service.get(task)
    assert (info["checkpoint_s"], info["phase"], info["phase_low"]) == (world.clock.now(), "eval", True)
    assert world.story(task).count("leaves its GPUs idle") == 1


def test_logs_keep_the_latest_and_say_what_they_dropped(tmp_path: Path) -> None:
    logs = TaskLogs(tmp_path, segment_bytes=10)
    text = b"0123456789abcdefghijABCDEFGHIJ+-"
    at = 0
    for n in (3, 9, 13, 7):
        at = logs.append("t1", 1, 0, "out", at, text[at : at + n])
    assert at == len(text)
    assert sum(f.stat().st_size for f in (tmp_path / "t1").iterdir()) == 12
    kept, end, over = logs.read("t1", 1, 0, "out", 0)
    assert kept == "[areal_sky: 20 bytes of earlier output are no longer kept]\nABCDEFGHIJ+-"
    assert (end, over) == (len(text), True)
    assert logs.read("t1", 1, 0, "out", 25)[0] == "FGHIJ+-"
    assert logs.read("t1", 1, 0, "out", 22, limit=4)[:2] == ("CDEF", 26)
    assert logs.read("t1", 1, 0, "out", -4)[0] == "IJ+-"
    assert logs.append("t1", 1, 0, "out", 28, text[28:]) == len(text)  # seen before
    assert logs.append("t1", 1, 0, "out", 99, b"gap") == len(text)


def test_what_a_spec_asked_for_is_not_changed_by_what_it_learned(world: World) -> None:
    spec = world.spec(gpus=0.5, max_retries=1)
    world.service.submit(spec)
    world.tick(2)
    fail(world, "t1", 1, "CUDA out of memory\n")
    assert world.service._tasks.get("t1").spec == replace(spec, array_index=None)
