"""The task service on a Ray without machines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from taskworld import GPU4, World

from areal_sky.core.model import Bundle
from areal_sky.core.taskevents import TaskEvent
from areal_sky.core.taskmodel import TaskSpec
from areal_sky.core.telemetry import Validity
from areal_sky.errors import InvalidInput, NotFound, Refused, StateError, Unreachable
from areal_sky.run.dispatch import RESERVE_S

HOLD_AFTER_S = 300.0


@pytest.fixture
def world(tmp_path: Path) -> World:
    w = World(tmp_path)
    w.tick()
    return w


def story(world: World, task_id: str) -> str:
    return "\n".join(line["text"] for line in world.service.story(task_id))


def test_before_the_first_look_there_is_no_view(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(Unreachable, match="not seen Ray yet"):
        world.service.view()


def test_a_task_runs_and_ends(world: World) -> None:
    answer = world.service.submit(TaskSpec("train", command="x", bundle=Bundle(2, 1)))
    assert answer == {"task_id": "t1", "status": "SCHEDULED", "reason": "", "warnings": []}
    world.tick()
    assert world.state("t1") == "PLACED"  # its runners were only asked for
    world.tick()
    assert world.state("t1") == "RUNNING"
    world.finish("t1")
    world.tick()
    assert world.state("t1") == "SUCCEEDED"
    world.tick()
    assert world.ray.gangs_left() == []
    assert "running" in story(world, "t1")


def test_usage_tells_who_held_what_and_survives_a_restart(world: World) -> None:
    first = world.submit(gpus=1, bundles=2, name="grpo")
    world.tick()
    (held,) = world.service.usage().holds
    assert (held.task_id, held.replica, held.gpus, held.node_gpus, held.node_cpus) == (first, "c-w-0", 2, 4, 16)
    assert held.until_s is None
    world.finish(first)
    world.tick(3)
    waits = world.submit(gpus=4, bundles=4)  # more than there is: holds nothing
    past = world.service.usage()
    (ended,) = past.holds
    assert ended.key == held.key and ended.until_s is not None
    assert 0 < ended.until_s - ended.from_s < 1
    world.start()
    assert world.service.usage().holds == past.holds
    assert world.service.usage(ended.until_s + 1).holds == ()
    assert world.state(waits) == "QUEUED"


def test_schedule_says_queued_with_the_reason(world: World) -> None:
    world.submit(gpus=4, bundles=2)
    answer = world.service.submit(TaskSpec("eval", command="x", bundle=Bundle(1, 1)))
    assert answer["status"] == "QUEUED"
    assert "0 of 1 fit now" in answer["reason"]
    world.tick()
    assert "number 1 of 1 in the queue: score 4.00 = priority 5 x weight 1 x eval 0.8 +" in story(world, "t2")


def test_weights_and_priorities_order_the_queue(world: World) -> None:
    world.submit(gpus=4, bundles=2)
    base, moe = world.submit(model="b"), world.submit(model="m")
    urgent = world.submit(model="b", priority=9)
    assert [t["task_id"] for t in world.service.list("queued")] == [urgent, moe, base]
    assert world.service.list("active")[0]["task_id"] == "t1"


def test_a_gang_is_all_or_nothing(world: World) -> None:
    world.submit(gpus=4)
    gang = world.submit(gpus=4, bundles=2)
    world.tick(3)
    assert world.state(gang) == "QUEUED"
    assert {g for g, _ in world.ray.running()} == {"t1.1"}
    world.finish("t1")
    world.tick(3)
    assert world.state(gang) == "RUNNING"
    assert len(world.ray.running()) == 2


def test_a_gang_that_can_never_fit_is_refused(world: World) -> None:
    with pytest.raises(Refused, match="group w takes at most 4 of them"):
        world.submit(gpus=4, bundles=5)
    with pytest.raises(InvalidInput, match="no group 'x'"):
        world.submit(group="x")
    assert world.service.list() == []


def test_a_submit_key_submits_once(world: World) -> None:
    assert world.submit(submit_key="k") == world.submit(submit_key="k") == "t1"


def test_a_failed_rank_ends_the_gang(world: World) -> None:
    gang = world.submit(gpus=4, bundles=2)
    world.tick(2)
    world.ray.finish("t1.1", 1, 3)
    world.tick(3)
    task = world.service.get(gang)
    assert task["state"] == "FAILED"
    assert task["reason"] == "rank 1 ended with exit code 3"
    assert task["exit_codes"] == {"0": -15, "1": 3}


def test_own_failures_are_retried_as_often_as_asked(world: World) -> None:
    task = world.submit(max_retries=1)
    world.tick()
    world.finish(task, 1)
    world.tick(3)
    assert world.service.get(task)["attempt"] == 2
    world.finish(task, 1)
    world.tick(3)
    assert world.state(task) == "FAILED"


def test_the_loss_of_a_node_costs_no_retry_and_no_place(world: World) -> None:
    gang = world.submit(gpus=4, bundles=2)
    world.tick(2)
    later = world.submit(gpus=4, bundles=2)
    world.ray.kill_node(world.nodes[1])
    world.tick(3)
    task = world.service.get(gang)
    assert (task["state"], task["retries"]) == ("QUEUED", 0)
    assert world.ray.running() == []  # the surviving rank was ended
    assert [t["task_id"] for t in world.service.list("queued")] == [gang, later]
    world.ray.add_node("w", "c-w-1", GPU4, node_id="new")
    world.tick(3)
    assert world.state(gang) == "RUNNING"
    assert "node c-w-1/0 died under rank 1" in story(world, gang)


def test_an_echo_of_a_dying_node_is_not_a_failure(world: World) -> None:
    """Ray notices a dead node seconds after its processes were killed."""
    gang = world.submit(gpus=4, bundles=2)
    world.tick(2)
    world.ray.finish("t1.1", 0, -9)
    world.tick(3)
    assert world.state(gang) == "RUNNING"
    world.ray.kill_node(world.nodes[0])
    world.tick(2)
    assert (world.state(gang), world.service.get(gang)["retries"]) == ("QUEUED", 0)


def test_a_rank_killed_on_a_healthy_node_is_a_failure(world: World) -> None:
    for task, end in ((world.submit(), "kill"), (world.submit(), "lose")):
        world.tick(2)
        if end == "kill":
            world.finish(task, -9)
        else:
            world.ray.lose(f"{task}.1", 0)
    world.tick(3)
    world.tick(2, seconds=8)
    assert (world.state("t1"), world.state("t2")) == ("FAILED", "FAILED")
    assert "killed by signal 9" in world.service.get("t1")["reason"]
    assert "its runner died" in world.service.get("t2")["reason"]


def test_cancel_at_every_stage(tmp_path: Path) -> None:
    world = World(tmp_path, slow_reserve=True, slow_exit=True)
    placed, queued = world.submit(), world.submit()
    assert world.service.cancel(queued)["state"] == "CANCELLED"
    world.tick()
    assert world.state(placed) == "PLACED"
    assert world.service.cancel(placed)["state"] == "CANCELLED"
    running = world.submit()
    world.tick()
    world.ray.reserve_all()
    world.tick(2)
    assert world.state(running) == "RUNNING"
    assert world.service.cancel(running)["state"] == "RUNNING"
    world.tick(2)
    world.finish(running, -15)
    world.tick(2)
    assert world.state(running) == "CANCELLED"
    assert world.service.cancel(running)["state"] == "CANCELLED"
    world.tick()
    assert world.ray.gangs_left() == []
    with pytest.raises(NotFound):
        world.service.cancel("t99")


def test_a_rank_that_never_answers_the_kill_is_given_up(tmp_path: Path) -> None:
    world = World(tmp_path, slow_exit=True)
    task = world.submit()
    world.tick(2)
    world.service.cancel(task)
    world.tick(2)
    assert world.state(task) == "RUNNING"
    world.tick(1, seconds=60)
    assert world.state(task) == "CANCELLED"


def test_ray_that_does_not_reserve_gives_the_place_back(tmp_path: Path) -> None:
    world = World(tmp_path, slow_reserve=True)
    task = world.submit()
    world.tick(2)
    assert world.state(task) == "PLACED"
    world.tick(1, seconds=RESERVE_S + 1)
    assert world.state(task) == "QUEUED"
    assert "Ray did not give it its resources within 30 s; not before 5 s" in world.service.get(task)["reason"]
    world.tick(2, seconds=6)
    assert world.service.get(task)["attempt"] == 2
    world.tick(1, seconds=RESERVE_S + 1)
    assert "not before 10 s from now" in world.service.get(task)["reason"]  # less and less often
    world.ray.slow_reserve = False
    world.tick(3, seconds=11)
    assert (world.state(task), world.ray.gangs_left()) == ("RUNNING", [f"{task}.3"])


def test_a_draining_replica_takes_no_work_and_is_emptied_at_its_deadline(world: World) -> None:
    task = world.submit(gpus=4)
    world.tick(2)
    where = world.service.get(task)["places"][0]["replica"]
    deadline_s = world.clock.now() + 60
    assert world.service.drain_replica(where, "idle", deadline_s) == 1
    events = len(world.journal.read())
    assert world.service.drain_replica(where, "idle", deadline_s) == 1
    assert len(world.journal.read()) == events  # repeating it is harmless
    other = world.submit(gpus=4)
    world.tick(2)
    assert world.service.get(other)["places"][0]["replica"] != where
    assert world.state(task) == "RUNNING"
    assert next(x for x in world.service.view().loads if x.replica == where).draining
    world.start()  # the mark outlives the process
    world.tick(2, seconds=40)
    world.tick(2)
    assert world.state(task) == "QUEUED"
    assert f"replica {where} is leaving: idle" in story(world, task)


def test_evict_moves_work_now(world: World) -> None:
    task = world.submit(gpus=4)
    world.tick(2)
    where = world.service.get(task)["places"][0]["replica"]
    world.service.evict_replica(where, "reclaimed")
    world.tick(4)
    moved = world.service.get(task)
    assert (moved["state"], moved["attempt"], moved["retries"]) == ("RUNNING", 2, 0)
    assert moved["places"][0]["replica"] != where


def test_a_successor_of_a_drained_replica_starts_fresh(world: World) -> None:
    world.service.drain_replica("c-w-0", "idle", world.clock.now() + 60)
    world.ray.kill_node(world.nodes[0])
    world.tick()
    world.ray.add_node("w", "c-w-0", GPU4, node_id="again")
    world.tick()
    assert not any(n.draining for n in world.service.view().nodes)


def test_a_long_waiting_gang_is_not_starved_by_small_tasks(world: World) -> None:
    small = [world.submit() for _ in range(2)]
    world.tick(2)
    gang = world.submit(gpus=4, bundles=2)
    world.tick(1, seconds=HOLD_AFTER_S)
    late = world.submit(priority=1)
    world.tick(2)
    assert world.state(late) == "QUEUED"
    assert "2 nodes are reserved for tasks before it" in world.service.get(late)["reason"]
    for task in small:
        world.finish(task)
    world.tick(3)
    assert world.state(gang) == "RUNNING"
    world.finish(gang)
    world.tick(3)
    assert world.state(late) == "RUNNING"


def test_before_that_small_tasks_may_pass(world: World) -> None:
    world.submit()
    world.tick(2)
    gang = world.submit(gpus=4, bundles=2)
    passing = world.submit(priority=1)
    world.tick(2)
    assert (world.state(gang), world.state(passing)) == ("QUEUED", "RUNNING")


def test_nothing_is_held_back_for_a_gang_that_waits_for_new_nodes(world: World) -> None:
    gang = world.submit(gpus=4, bundles=4)
    world.tick(1, seconds=HOLD_AFTER_S)
    small = world.submit(priority=1)
    world.tick(2)
    assert (world.state(gang), world.state(small)) == ("QUEUED", "RUNNING")


def test_the_view_tells_the_controller_what_waits_and_what_idles(world: World) -> None:
    class Hub:
        def replica_loads(self, now_s: float) -> dict[str, tuple[float | None, Validity, float | None]]:
            return {"c-w-0": (0.9, Validity.KNOWN, 0.5)}

    world.service._hub = Hub()
    running = world.submit(gpus=4)
    world.tick(2)
    waiting = world.submit(gpus=4, bundles=3, group="w")
    world.tick()
    view = world.service.view()
    assert (view.running_tasks, view.waiting_tasks) == (1, 1)
    assert [(d.task_id, d.group, d.bundles) for d in view.demand] == [(waiting, "w", 3)]
    busy, idle = view.load("c-w-0"), view.load("c-w-1")
    assert busy is not None and idle is not None
    assert (busy.running_tasks, busy.idle_since_s, busy.utilization_mean) == (1, None, 0.9)
    assert (idle.running_tasks, idle.validity) == (0, Validity.UNKNOWN)
    assert idle.idle_since_s is not None
    assert [n.free_gpus for n in view.nodes] == [0, 4]
    world.finish(running)
    world.tick(2)
    freed = world.service.view().load("c-w-0")
    assert freed is not None
    assert freed.idle_since_s == world.clock.now() - 0.1 or freed.idle_since_s == world.clock.now()


def test_foreign_work_is_not_idle(world: World) -> None:
    node = world.ray.live[world.nodes[0]]
    connection = world.service._gangs._ray
    original = connection.nodes

    def with_foreign() -> tuple[Any, ...]:
        return tuple(dataclasses.replace(n, available_gpus=2.0) if n.node_id == node.node_id else n for n in original())

    connection.nodes = with_foreign  # type: ignore[method-assign]
    world.tick()
    load = world.service.view().load("c-w-0")
    assert load is not None and load.idle_since_s is None
    assert world.service.view().nodes[0].free_gpus == 2.0


def test_metrics_are_checked_kept_and_survive(world: World) -> None:
    task = world.submit()
    world.service.track_metrics(task, {"reward": 0.5, "step": 3})
    world.service.track_metrics(task, {"reward": 0.7})
    with pytest.raises(InvalidInput, match="'x' is not a number"):
        world.service.track_metrics(task, {"x": True})
    world.tick()
    world.start()
    assert world.service.get(task)["metrics"] == {"reward": 0.7, "step": 3.0}
    world.service.track_metrics(task, {"reward": float("nan")}, rank=0)
    assert world.service.get(task)["metrics"] == {"step": 3.0}  # it is not what it was
    told = world.service.metrics(task)
    assert [r["metrics"] for r in told] == [{"reward": 0.5, "step": 3.0}, {"reward": 0.7}, {"reward": None}]
    assert told[0]["t_s"] <= told[2]["t_s"]
    assert "reported (the latest 3 within" in world.story(task)
    assert "reward no number (0.5 to 0.7), step 3" in world.story(task)


def test_logs_are_idempotent_by_offset(world: World) -> None:
    task = world.submit()
    world.tick(2)
    push = world.service.push_log
    assert push(task, 1, 0, "out", 0, b"hello ") == 6
    assert push(task, 1, 0, "out", 0, b"hello wor") == 9
    assert push(task, 1, 0, "out", 100, b"gap") == 9  # the runner is told to go back
    assert push(task, 1, 0, "out", 9, "ld ü".encode()) == 14
    page = world.service.logs(task)
    assert (page["text"], page["next_offset"], page["ended"]) == ("hello world ü", 14, False)
    with pytest.raises(InvalidInput):
        push(task, 1, 0, "../x", 0, b"")
    with pytest.raises(NotFound):
        push("../t1", 1, 0, "out", 0, b"")
    with pytest.raises(InvalidInput, match="ranks 0 to 0"):
        world.service.logs(task, rank=7)


def test_ray_away_for_a_while_harms_nothing(world: World) -> None:
    task = world.submit()
    world.tick(2)
    world.ray.unreachable = "Ray is away"
    with pytest.raises(Unreachable):
        world.tick()
    queued = world.submit(gpus=4, bundles=2)
    world.finish(task)
    assert len(world.service.view().nodes) == 2
    world.clock.advance(60)
    with pytest.raises(Unreachable, match="has not seen Ray for 60 s"):
        world.service.view()  # old news is no news
    world.ray.unreachable = ""
    world.tick(4)
    assert (world.state(task), world.state(queued)) == ("SUCCEEDED", "RUNNING")


def test_a_full_disk_stops_the_service_but_loses_no_exit(world: World) -> None:
    task = world.submit()
    world.tick(2)
    world.finish(task)
    append, world.journal.append = world.journal.append, _full  # type: ignore[method-assign]
    with pytest.raises(StateError, match="disk is full"):
        world.tick()
    with pytest.raises(StateError):
        world.submit()
    world.journal.append = append  # type: ignore[method-assign]
    world.tick(2)
    assert world.state(task) == "SUCCEEDED"


def _full(events: Sequence[TaskEvent]) -> None:
    raise StateError("disk is full")
