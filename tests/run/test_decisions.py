"""What the engine decides beside placing, carried out: preemption, shrinking, loans, pools, reservations."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from taskworld import GPU4, World

from areal_sky.adapters.fake_ray import Crash
from areal_sky.core.nodeenv import PoolShare
from areal_sky.core.regrowth import LEAST_RUN_S, SEARCH_EVERY_S
from areal_sky.core.taskverdict import GIVEN_BACK_S, SILENT_S
from areal_sky.run.admitting import MIN_RUNTIME_S


def made(tmp_path: Path, nodes: int = 1, pools: tuple[PoolShare, ...] = (), **ray: Any) -> World:
    world = World(tmp_path, nodes=nodes, **ray)
    world.env = dataclasses.replace(world.env, pools=pools)
    world.start()
    world.tick()
    return world


def grown_old(world: World) -> None:
    """What runs has run for long enough to be preempted."""
    world.tick(2)
    world.tick(2, seconds=MIN_RUNTIME_S)


def with_a_crash(world: World, calls: int, ticks: int) -> None:
    """A tick a second; the head dies after so many calls to Ray, and another one goes on."""
    world.ray.crash_after = calls
    for _ in range(ticks):
        try:
            world.tick(1, seconds=1)
        except Crash:
            world.start()
    world.ray.crash_after = None


def test_a_heavier_task_takes_the_place_of_a_preemptible_one(tmp_path: Path) -> None:
    world = made(tmp_path)
    rollout = world.submit(gpus=4, kind="rollout", priority=1)
    grown_old(world)
    world.service.checkpointed(rollout)
    world.tick(1, seconds=30)
    train = world.submit(gpus=4, kind="train", priority=9)
    world.tick(4)
    assert (world.state(rollout), world.state(train)) == ("QUEUED", "RUNNING")
    told = world.story(rollout)
    assert f"preempted: preempted for {train}" in told
    assert "waits again at its old place: preempted for" in told and "30s of work lost" in told
    info = world.service.get(rollout)
    assert (info["preempted"], info["retries"], round(info["lost_s"])) == (1, 0, 30)
    assert not world.ray.over_committed()
    world.finish(train)
    world.tick(4)
    assert world.state(rollout) == "RUNNING"


def test_what_is_not_preemptible_or_has_just_begun_is_left_alone(tmp_path: Path) -> None:
    world = made(tmp_path)
    safe = world.submit(gpus=4, kind="rollout", priority=1, preemptible=False)
    grown_old(world)
    heavy = world.submit(gpus=4, priority=9)
    world.tick(3)
    assert (world.state(safe), world.state(heavy)) == ("RUNNING", "QUEUED")
    world.finish(safe)
    world.finish(heavy) if world.state(heavy) == "RUNNING" else None
    world.tick(4)
    world.finish(heavy)
    world.tick(3)
    young = world.submit(gpus=4, kind="eval", priority=1)
    world.tick(2)
    other = world.submit(gpus=4, priority=9)
    world.tick(3)
    assert (world.state(young), world.state(other)) == ("RUNNING", "QUEUED")


def test_a_victim_that_ignores_sigterm_is_killed_and_nobody_else_gets_its_place(tmp_path: Path) -> None:
    world = made(tmp_path, slow_exit=True)
    victim = world.submit(gpus=4, kind="rollout", priority=1)
    grown_old(world)
    heavy = world.submit(gpus=4, priority=9)
    world.tick(3)
    cheap = world.submit(gpus=1, kind="train", priority=5)
    world.tick(3)
    assert [world.state(t) for t in (victim, heavy, cheap)] == ["RUNNING", "QUEUED", "QUEUED"]
    assert f"its room is set aside; it starts when {victim} has ended" in world.story(heavy)
    world.tick(2, seconds=world.service.grace_s + SILENT_S)  # not even SIGKILL is answered: the gang is given up
    world.tick(3)
    assert [world.state(t) for t in (victim, heavy, cheap)] == ["QUEUED", "RUNNING", "QUEUED"]


def test_a_new_process_goes_on_with_a_preemption(tmp_path: Path) -> None:
    world = made(tmp_path, slow_exit=True)
    victim = world.submit(gpus=4, kind="rollout", priority=1)
    grown_old(world)
    heavy = world.submit(gpus=4, priority=9)
    world.tick(2)
    world.start()
    world.tick(2)
    world.ray.finish(f"{victim}.1", 0, -15)
    world.tick(4)
    assert (world.state(victim), world.state(heavy)) == ("QUEUED", "RUNNING")


# ---------------------------------------------------------------- elastic gangs


def test_an_elastic_gang_starts_small_and_shrinks_before_it_is_killed(tmp_path: Path) -> None:
    world = made(tmp_path)
    elastic = world.submit(gpus=1, bundles=4, min_bundles=1, kind="rollout", priority=1)
    grown_old(world)
    assert world.ray.all_gangs[f"{elastic}.1"].apart
    heavy = world.submit(gpus=2, priority=9)
    world.tick(4)
    assert (world.state(elastic), world.state(heavy)) == ("RUNNING", "RUNNING")
    info = world.service.get(elastic)
    gone = info["gone_ranks"]
    assert (len(gone), 0 in gone, len(info["places"]), info["attempt"]) == (2, False, 2, 1)
    left = {r for g, r in world.ray.running() if g == f"{elastic}.1"}
    assert left == {0, 1, 2, 3} - set(gone)
    assert f"gives up ranks {gone[0]}, {gone[1]}: shrunk to 2 bundles for {heavy}" in world.story(elastic)
    assert f"runs on without ranks {gone[0]}, {gone[1]}" in world.story(elastic)
    assert not world.ray.over_committed()
    holds = [h for h in world.service.usage().holds if h.task_id == elastic]
    assert [(h.gpus, h.until_s is None) for h in holds] == [(4, False), (2, True)]
    world.start()
    world.tick(2)
    for rank in left:
        world.ray.finish(f"{elastic}.1", rank, 0)
    world.tick(3)
    assert world.state(elastic) == "SUCCEEDED"  # the ranks that it gave up are nobody's failure
    late = world.submit(gpus=1, bundles=4, min_bundles=2, kind="rollout")
    world.tick(3)
    info = world.service.get(late)
    assert (info["state"], len(info["places"])) == ("RUNNING", 2)


def test_a_shrunk_gang_starts_anew_with_all_its_ranks_when_there_is_room_again(tmp_path: Path) -> None:
    world = made(tmp_path)
    elastic = world.submit(gpus=1, bundles=4, min_bundles=1, kind="rollout", priority=1)
    grown_old(world)
    heavy = world.submit(gpus=2, priority=9)
    world.tick(4)
    assert len(world.service.get(elastic)["places"]) == 2
    world.finish(heavy)
    world.tick(2, seconds=LEAST_RUN_S)
    assert (world.state(elastic), world.service.get(elastic)["attempt"]) == ("RUNNING", 1)
    world.service.checkpointed(elastic)
    world.tick(1, seconds=SEARCH_EVERY_S)
    world.tick(3)
    assert world.state(elastic) == "QUEUED"
    world.tick(3, seconds=GIVEN_BACK_S)
    info = world.service.get(elastic)
    assert (info["state"], info["attempt"], len(info["places"]), info["retries"]) == ("RUNNING", 2, 4, 0)
    assert info["preempted"] == 0
    assert "told to start anew: starts anew with 4 bundles instead of 2: there is room" in world.story(elastic)
    assert not world.ray.over_committed()


def test_a_rank_that_is_given_up_may_take_its_node_with_it(tmp_path: Path) -> None:
    world = made(tmp_path, nodes=2, slow_exit=True)
    elastic = world.submit(gpus=4, bundles=2, min_bundles=1, kind="rollout", priority=1)
    grown_old(world)
    heavy = world.submit(gpus=4, priority=9)
    world.tick(3)
    where = world.service._tasks.get(elastic).places[1].node_id
    world.ray.kill_node(where)
    world.tick(4)
    info = world.service.get(elastic)
    assert (info["state"], info["gone_ranks"], info["retries"]) == ("RUNNING", [1], 0)
    assert world.state(heavy) == "QUEUED"  # what was set aside for it has gone
    world.ray.add_node("w", "c-w-9", GPU4)
    world.tick(4)
    assert world.state(heavy) == "RUNNING"


# ---------------------------------------------------------------- low phases


def test_idle_gpus_are_lent_to_preemptible_work_and_come_back_first(tmp_path: Path) -> None:
    world = made(tmp_path)
    train = world.submit(gpus=4, kind="train")
    world.tick(3)
    waits = world.submit(gpus=2, kind="rollout")
    plain = world.submit(gpus=2, kind="train")
    world.tick(2)
    assert (world.state(waits), world.state(plain)) == ("QUEUED", "QUEUED")
    world.service.enter_phase(train, "eval", True)
    world.tick(3)
    assert (world.state(waits), world.state(plain)) == ("RUNNING", "QUEUED")  # only what can be ended again
    gang = world.ray.all_gangs[f"{waits}.1"]
    assert (gang.bundles[0].gpus, gang.bundles[0].cpus, gang.starts[0].lent) == (0, 0, ("0", "1"))
    assert not world.ray.over_committed()
    assert world.service.get(train)["borrowers"] == [waits]
    world.service.enter_phase(train, "train", False)
    world.tick(3)
    assert world.state(waits) == "QUEUED"
    assert f"lent by {train}, which needs" in world.story(waits)
    assert world.service.get(train)["borrowers"] == []
    world.tick(2)
    assert world.state(train) == "RUNNING" and len(world.ray.running()) == 1
    world.finish(train)
    world.tick(3)
    assert (world.state(waits), world.state(plain)) == ("RUNNING", "RUNNING")


def test_a_lender_that_ends_leaves_its_borrowers_in_peace(tmp_path: Path) -> None:
    world = made(tmp_path)
    train = world.submit(gpus=4, kind="train")
    world.tick(3)
    world.service.enter_phase(train, "eval", True)
    borrower = world.submit(gpus=2, kind="rollout")
    world.tick(3)
    world.finish(train)
    world.tick(3)
    assert (world.state(train), world.state(borrower)) == ("SUCCEEDED", "RUNNING")
    # Ray still counts the GPUs as the lender's, so that it gives them to nobody else.
    assert world.ray.gangs_left() == [f"{train}.1", f"{borrower}.1"]
    other = world.submit(gpus=2, kind="train")
    world.tick(3)
    assert world.state(other) == "QUEUED"
    world.start()
    world.tick(3)
    assert world.ray.gangs_left() == [f"{train}.1", f"{borrower}.1"]
    world.finish(borrower)
    world.tick(4)
    assert world.state(other) == "RUNNING"
    assert world.ray.gangs_left() == [f"{other}.1"]


def test_a_loan_survives_the_process(tmp_path: Path) -> None:
    world = made(tmp_path)
    train = world.submit(gpus=4, kind="train")
    world.tick(3)
    world.service.enter_phase(train, "eval", True)
    first = world.submit(gpus=2, kind="rollout")
    world.tick(3)
    world.start()
    world.tick(3)
    second = world.submit(gpus=2, kind="rollout")
    world.tick(3)
    assert [world.state(t) for t in (train, first, second)] == ["RUNNING"] * 3
    ids = [world.ray.all_gangs[f"{t}.1"].starts[0].lent for t in (first, second)]
    assert sorted(i for pair in ids for i in pair) == ["0", "1", "2", "3"]
    world.service.enter_phase(train, "train", False)
    world.start()  # dies right after it has written that down
    world.tick(4)
    assert [world.state(t) for t in (train, first, second)] == ["RUNNING", "QUEUED", "QUEUED"]


# ---------------------------------------------------------------- pools and reservations


def test_a_pool_lends_what_it_is_guaranteed_and_takes_it_back(tmp_path: Path) -> None:
    world = made(tmp_path, pools=(PoolShare("moe", "moe", 4.0), PoolShare("base", "base", 0.0, 4.0)))
    base = [world.submit(gpus=2, model="b", kind="rollout") for _ in range(2)]
    grown_old(world)
    assert [world.state(t) for t in base] == ["RUNNING", "RUNNING"]
    moe = world.submit(gpus=2, model="m", priority=1)
    world.tick(4)
    assert world.state(moe) == "RUNNING"
    assert sorted(world.state(t) for t in base) == ["QUEUED", "RUNNING"]


def test_a_pool_has_its_limit(tmp_path: Path) -> None:
    world = made(tmp_path, pools=(PoolShare("base", "base", 0.0, 2.0),))
    first, second = (world.submit(gpus=2, model="b") for _ in range(2))
    world.tick(2)
    assert (world.state(first), world.state(second)) == ("RUNNING", "QUEUED")
    assert "base" in world.service.get(second)["reason"]
    assert world.service.view().demand == ()  # more nodes would not help it
    other = world.submit(gpus=4, bundles=2)
    world.tick()
    assert [d.task_id for d in world.service.view().demand] == [other]


def test_why_tells_when_a_reservation_is_expected_to_start(tmp_path: Path) -> None:
    world = made(tmp_path)
    running = world.submit(gpus=3, estimate_s=600.0)
    world.tick(2)
    gang = world.submit(gpus=4, priority=9)
    short, long = world.submit(gpus=1, estimate_s=60.0), world.submit(gpus=1, estimate_s=9000.0)
    world.tick(3, seconds=1)
    assert [world.state(t) for t in (running, gang, short, long)] == ["RUNNING", "QUEUED", "RUNNING", "QUEUED"]
    assert "1 node is reserved for it from about 5" in world.story(gang)
    assert "1 node is reserved for tasks before it" in world.story(long)
    assert "x train 1.2 +" in world.story(gang)


@pytest.mark.parametrize("step", range(12))
def test_a_preemption_survives_death_at_every_step(tmp_path: Path, step: int) -> None:
    world = made(tmp_path)
    victim = world.submit(gpus=1, bundles=4, min_bundles=2, kind="rollout", priority=1)
    grown_old(world)
    small = world.submit(gpus=2, priority=8)
    with_a_crash(world, step * 3 + 1, ticks=60)
    assert (world.state(victim), world.state(small)) == ("RUNNING", "RUNNING")
    assert len(world.ray.running()) == 3
    assert not world.ray.over_committed()
    assert all(n == 1 for n in world.ray.started.values())


@pytest.mark.parametrize("step", range(12))
def test_a_new_start_with_all_ranks_survives_death_at_every_step(tmp_path: Path, step: int) -> None:
    world = made(tmp_path)
    other = world.submit(gpus=2)
    world.tick(3)
    elastic = world.submit(gpus=1, bundles=4, min_bundles=2, kind="rollout")
    world.tick(3)
    world.finish(other)
    world.tick(3, seconds=LEAST_RUN_S)
    world.service.checkpointed(elastic)
    with_a_crash(world, step * 3 + 1, ticks=30)
    info = world.service.get(elastic)
    assert (info["state"], info["attempt"] >= 2, len(info["places"])) == ("RUNNING", True, 4)
    assert not world.ray.over_committed()
    assert all(n == 1 for n in world.ray.started.values())
