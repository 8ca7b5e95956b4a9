"""Drivers on a Ray without machines: admitted for all their backends, never counted twice, never over-committed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taskworld import GPU4, World

from areal_sky.core.memory_terms import ModelNeed
from areal_sky.core.model import Bundle
from areal_sky.core.nodeenv import GroupShape
from areal_sky.core.tenancy import ForeignUse
from areal_sky.errors import InvalidInput, Refused


@pytest.fixture
def world(tmp_path: Path) -> World:
    w = World(tmp_path)
    w.tick()
    return w


def driver(world: World, backends: str | None = "sglang:d2t2+fsdp:d2", **more: object) -> str:
    return world.submit(0, 1, kind="driver", backends=backends, **more)


def two_groups(tmp_path: Path) -> World:
    """Of one node each, and no more to be had."""
    world = World(tmp_path, nodes=1)
    world.env = replace(world.env, groups=(GroupShape("w", GPU4, 1, 1, 1), GroupShape("r", GPU4, 1, 1, 1)))
    world.nodes.append(world.ray.add_node("r", "c-r-0", GPU4))
    world.start()
    world.tick()
    return world


def takes(world: World, node: int, gpus: float, owner: str | None) -> None:
    """Somebody makes a placement group."""
    world.ray.others.append(ForeignUse(world.nodes[node], Bundle(gpus, 0, 0), owner))
    assert not world.ray.over_committed()


def free(world: World) -> float:
    return sum(v.free_gpus for v in world.service.view().nodes)


def test_a_driver_is_admitted_for_the_gpus_of_all_its_backends(world: World) -> None:
    first = driver(world)  # 6 of 8 GPUs
    second = driver(world)
    world.tick(3)
    assert (world.state(first), world.state(second)) == ("RUNNING", "QUEUED")
    assert "of its 6 GPUs" in world.service.get(second)["reason"] or "2 are free" in world.service.get(second)["reason"]
    assert world.ray.all_gangs[f"{first}.1"].bundle == Bundle(0, 1)  # Ray reserves the driver alone
    assert free(world) == 2
    assert "with 6 GPUs for what it makes itself" in world.story(first)
    assert sum(h.gpus for h in world.service.usage().holds) == 6


def test_no_driver_starts_while_room_is_lent(world: World) -> None:
    lender = world.submit(4)
    world.tick(3)
    world.service.enter_phase(lender, "eval", True)
    waits = driver(world, "sglang:d2t2")  # 4 GPUs, and 4 are free
    world.tick(3)
    assert world.state(waits) == "QUEUED"
    world.service.enter_phase(lender, "train", False)
    world.tick(3)
    assert world.state(waits) == "RUNNING"


def test_its_own_groups_are_not_counted_twice(world: World) -> None:
    run = driver(world)
    world.tick(3)
    for node, gpus in ((0, 2), (1, 2), (0, 1), (0, 1)):
        takes(world, node, gpus, f"{run}.1")
        world.tick()
        assert free(world) == 2
    small = [world.submit() for _ in range(3)]
    world.tick(3)
    assert sorted(world.state(t) for t in small) == ["QUEUED", "RUNNING", "RUNNING"]
    assert not world.ray.over_committed()


def test_ray_may_put_its_groups_elsewhere(world: World) -> None:
    run = driver(world, "sglang:d1t4")
    world.tick(3)
    claimed = world.service.get(run)["claim"]
    other = 1 if claimed.startswith("c-w-0") else 0
    takes(world, other, 4, f"{run}.1")
    world.tick()
    assert free(world) == 4
    gang = world.submit(gpus=4)  # the node of its claim is free again
    world.tick(3)
    assert world.state(gang) == "RUNNING"
    assert not world.ray.over_committed()
    world.finish(run)
    world.ray.others.clear()
    world.tick(2)
    assert free(world) == 4
    more = [world.submit(gpus=4) for _ in range(2)]
    world.tick(3)
    assert [world.state(t) for t in more] == ["RUNNING", "QUEUED"]  # the gang is still where it was placed


def test_a_stranger_does_not_use_up_a_claim(world: World) -> None:
    run = driver(world, "sglang:d2t2")
    world.tick(3)
    takes(world, 0, 1, None)
    takes(world, 1, 1, None)
    world.tick()
    assert free(world) == 2
    assert world.state(run) == "RUNNING"


def test_what_it_held_comes_back_with_its_end(world: World) -> None:
    run = driver(world)
    world.tick(3)
    takes(world, 0, 4, f"{run}.1")
    waits = world.submit(gpus=4, bundles=2)
    world.tick(2)
    world.finish(run)
    world.tick(2)
    assert world.state(waits) == "QUEUED"  # Ray has not taken its groups down yet
    world.ray.others.clear()
    world.tick(3)
    assert world.state(waits) == "RUNNING"


def test_a_new_process_goes_on_with_its_claim(world: World) -> None:
    run = driver(world)
    world.tick(3)
    takes(world, 0, 2, f"{run}.1")
    world.start()
    world.tick(2)
    assert world.state(run) == "RUNNING" and free(world) == 2
    assert world.service.get(run)["attempt"] == 1


def test_it_may_lie_over_groups_that_are_too_small_alone(tmp_path: Path) -> None:
    world = two_groups(tmp_path)
    run = driver(world, "sglang:d1t4+fsdp:d4")
    world.tick(3)
    assert world.state(run) == "RUNNING" and free(world) == 0
    with pytest.raises(Refused, match=r"sglang:d2t4\+fsdp:d4 can never fit: of its 12 GPUs 8 can be had"):
        driver(world, "sglang:d2t4+fsdp:d4")


def test_smaller_tasks_do_not_starve_one_that_needs_several_groups(tmp_path: Path) -> None:
    world = two_groups(tmp_path)
    running = [world.submit(gpus=2) for _ in range(4)]
    world.tick(3)
    run = driver(world, "sglang:d1t4+fsdp:d4")
    started, reason = world.clock.now(), ""
    while world.state(run) == "QUEUED" and world.clock.now() - started < 3600:
        world.finish(running.pop(0))
        world.submit(gpus=2)
        world.tick(30, 1.0)
        running = [t["task_id"] for t in world.service.list() if t["state"] == "RUNNING" and t["task_id"] != run]
        reason = world.service.get(run)["reason"] if world.state(run) == "QUEUED" else reason
    assert world.state(run) == "RUNNING"
    assert 300 < world.clock.now() - started < 600  # patience, then what ran there has ended one by one
    assert "2 nodes are reserved for it" in reason
    world.finish(run)
    world.tick(3)
    assert len([t for t in world.service.list() if t["state"] == "RUNNING"]) == 4  # nothing is kept free any more


def test_the_nodes_that_it_waits_for_are_demand(world: World) -> None:
    run = driver(world, "sglang:d2t4+fsdp:d4")  # 12 GPUs; two nodes of four, and the group may have four
    world.tick(2)
    (demand,) = world.service.view().demand
    assert (demand.task_id, demand.bundle.gpus, demand.bundles) == (run, 4, 3)
    world.nodes.append(world.ray.add_node("w", "c-w-2", GPU4))
    world.tick(3)
    assert world.state(run) == "RUNNING"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"backends": "sglang:d9x2"}, "backends: `sglang:d9x2`"),
        ({"backends": "cpu"}, "names no backend"),
        ({"backends": "fsdp:d2", "kind": "train"}, "only a task of kind driver"),
        ({"backends": "fsdp:d2", "gpus": 1}, "one bundle without GPUs"),
    ],
)
def test_wrong_backends_say_why(more: dict[str, object], reason: str) -> None:
    from areal_sky.task import Task

    with pytest.raises(InvalidInput, match="backends") as refused:
        Task("x", **{"kind": "driver", **more}).spec()  # type: ignore[arg-type]
    assert reason in str(refused.value)


def test_a_driver_of_a_model_brings_the_models_backends_and_its_memory_is_checked(world: World) -> None:
    small = ModelNeed("m", "train", "fsdp:d4", 4, 4, 40.0, 20.0, 6.0)
    huge = ModelNeed("b", "rollout", "vllm:d4", 4, 1, 400.0, 200.0, 6.0)
    world.env = replace(world.env, needs=(small, huge))
    world.start()
    world.tick()
    run = driver(world, None, model="m")
    assert world.service.get(run)["backends"] == "fsdp:d4"
    with pytest.raises(Refused, match=r"b cannot fit: 400 GiB a GPU .200 at the least. of 79 on H100"):
        world.submit(1, 4, kind="rollout", model="b")
    tight = world.service.submit(world.spec(1, 2, model="m"))
    assert tight["warnings"] == ["m: train as fsdp:d4 takes 4 GPUs, the task asks for 2"]


@settings(max_examples=25)
@given(st.data())
def test_whatever_they_take_nothing_is_promised_twice(data: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        world.tick()
        runs = [driver(world, data.draw(st.sampled_from(["fsdp:d2", "vllm:d1t2", "fsdp:d1"]))) for _ in range(2)]
        world.tick(3)
        for _ in range(6):
            node = data.draw(st.integers(0, 1))
            owner = data.draw(st.sampled_from([None, *(f"{r}.1" for r in runs)]))
            room = world.ray._free(world.nodes[node])[0]
            if room >= 1:
                takes(world, node, 1, owner)
            world.tick()
            if data.draw(st.booleans()):
                world.submit()
            world.tick(2)
            # Ray never has to say no to a gang of ours, and what is left of the claims still fits beside all others.
            assert not world.ray.over_committed()
            holding = [r for r in world.service._tasks.holding.values() if r.claim]
            left = sum(max(0, len(r.claim) - sum(u.owner == r.gang_id for u in world.ray.others)) for r in holding)
            strangers = sum(u.owner is None for u in world.ray.others)
            took = [sum(u.owner == r.gang_id for u in world.ray.others) - len(r.claim) for r in holding]
            really_free = sum(world.ray._free(n)[0] for n in world.nodes)
            assert left <= really_free + strangers + sum(max(0, n) for n in took)
            assert free(world) <= max(0, really_free - left)
