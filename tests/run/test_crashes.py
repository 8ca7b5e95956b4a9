"""The service dies between every two journal writes and at every call of Ray: no task is lost, none runs twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from taskworld import GPU4, World

from areal_sky.adapters.fake_ray import Crash
from areal_sky.core.taskevents import Starting, TaskEvent
from areal_sky.run.journal import Journal


class MortalJournal(Journal):
    """Dies before or after the n-th append, in turn."""

    crash_in: int | None = None

    def __init__(self, path: Path):
        super().__init__(path, durable=False)

    def append(self, events: Sequence[TaskEvent]) -> None:
        self._step()
        super().append(events)
        self._step()

    def _step(self) -> None:
        cls = type(self)
        if cls.crash_in is not None:
            cls.crash_in -= 1
            if cls.crash_in <= 0:
                cls.crash_in = None
                raise Crash


def _scenario(world: World, crash: Callable[[int], None], point: int) -> bool:
    """Gangs, a retry, an evict and a cancel under one crash; True when the crash point was reached."""
    crashed = False
    submitted: dict[str, str] = {}
    chain = [
        world.spec(name="sweep", array=2, submit_key="sweep", priority=6),
        world.spec(name="sum", after=("sweep",), submit_key="sum"),
    ]
    steps: list[Callable[[], object]] = [
        lambda: submitted.setdefault("gang", world.submit(gpus=3, bundles=2, submit_key="gang")),
        lambda: submitted.setdefault("retry", world.submit(gpus=1, max_retries=1, submit_key="retry")),
        lambda: submitted.setdefault("wait", world.submit(gpus=4, bundles=2, submit_key="wait")),
        lambda: submitted.setdefault("cancel", world.submit(gpus=1, submit_key="cancel")),
        lambda: world.tick(2),
        lambda: world.ray.finish("t2.1", 0, 1) if ("t2.1", 0) in world.ray.running() else None,
        lambda: world.tick(2),
        lambda: world.service.cancel("t4"),
        lambda: world.tick(2),
        lambda: world.service.evict_replica("c-w-1", "reclaimed"),
        lambda: world.tick(3),
        lambda: world.ray.add_node("w", "c-w-2", GPU4, node_id="extra") if "extra" not in world.ray.live else None,
        lambda: world.service.submit_many(chain),
        lambda: world.service.submit(world.spec(gpus=0.5, kind="rollout", bundles=3, min_bundles=1, submit_key="el")),
        lambda: world.tick(2),
    ]
    crash(point)
    for step in steps:
        try:
            step()
        except Crash:
            crashed = True
            world.start()
            step()  # the caller had no answer: it asks again
        _no_task_runs_twice(world)
    for _ in range(30):
        for gang, rank in world.ray.running():
            world.ray.finish(gang, rank, 0)
        try:
            world.tick(2, seconds=5)
        except Crash:
            crashed = True
            world.start()
        _no_task_runs_twice(world)
        if not world.service.busy():
            break
    return crashed


def _no_task_runs_twice(world: World) -> None:
    attempts = {g.split(".")[0]: {a for a, _ in world.ray.running() if a.startswith(g.split(".")[0] + ".")}
                for g, _ in world.ray.running()}  # fmt: skip
    assert all(len(a) == 1 for a in attempts.values()), attempts
    assert not world.ray.over_committed()
    again = [rank for rank, n in world.ray.started.items() if n > 1]
    assert not again, f"started twice: {again}"


@pytest.mark.parametrize("where", ["journal", "ray"])
def test_no_crash_loses_a_task_or_runs_one_twice(tmp_path: Path, where: str) -> None:
    point = 0
    while True:
        point += 1
        world = World(tmp_path / str(point), journal=MortalJournal)

        def crash(n: int, world: World = world) -> None:
            if where == "journal":
                MortalJournal.crash_in = n
            else:
                world.ray.crash_after = n

        reached = _scenario(world, crash, point)
        MortalJournal.crash_in = world.ray.crash_after = None
        states = Counter(t["state"] for t in world.service.list())
        world.tick(2)
        assert states == {"SUCCEEDED": 7, "CANCELLED": 1}, (point, states)
        assert world.ray.gangs_left() == [], f"crash point {point} leaked a placement group"
        world.journal.close()
        if not reached:
            break
    assert point > 20  # the scenario has that many steps at least


def test_a_gang_started_but_not_recorded_is_taken_over(tmp_path: Path) -> None:
    world = World(tmp_path, journal=MortalJournal)
    task = world.submit(gpus=4, bundles=2)
    MortalJournal.crash_in = 5  # before and after Placed, before and after Starting, before Started
    with pytest.raises(Crash):
        world.tick(2)
    assert isinstance(world.journal.read()[-1].fact, Starting)
    assert len(world.ray.running()) == 2
    world.start()
    world.tick(2)
    assert world.state(task) == "RUNNING"
    assert set(world.ray.started.values()) == {1}
