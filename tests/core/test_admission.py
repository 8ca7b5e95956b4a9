"""The admission engine on random histories: never over-commits, never overlooks, always the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_sky.core.admission import Admission, Entry, Place, Pool
from areal_sky.core.gangs import Ask, NoFit, Placement
from areal_sky.core.model import Bundle, NodeShape
from areal_sky.core.placement import fit
from areal_sky.core.room import EPS, NodeRoom, empty_room
from areal_sky.errors import InvalidInput

GPU4 = NodeShape(gpus=4, cpus=16, memory_gib=64, accelerator="H100")
A100 = NodeShape(gpus=2, cpus=8, memory_gib=32, accelerator="A100-80GB")
CPU8 = NodeShape(gpus=0, cpus=8, memory_gib=32)
SHAPES = (GPU4, A100, CPU8)


def entry(number: int, gpus: float = 1.0, count: int = 1, **more: object) -> Entry:
    ask = more.pop("ask", None) or Ask(Bundle(gpus, 1.0), count)
    return Entry(f"t{number}", number, ask, **{"submitted_s": float(number), **more})  # type: ignore[arg-type]


def cluster(*shapes: NodeShape) -> Admission:
    admission = Admission()
    for i, shape in enumerate(shapes):
        admission.set_node(empty_room(f"n{i}", "w", shape, f"n{i}"))
    return admission


def placed(admission: Admission, now_s: float = 100.0) -> dict[str, Placement]:
    return {d.task_id: d.placement for d in admission.decide(now_s) if isinstance(d, Place)}


def test_the_higher_score_goes_first() -> None:
    admission = cluster(GPU4)
    admission.submit(entry(1, 4))
    admission.submit(entry(2, 4, priority=9))
    assert list(placed(admission)) == ["t2"]
    assert admission.place_in_queue("t1") == (1, 1)
    assert "0 of 1 fit now" in admission.why("t1")
    admission.ended("t2", 200.0)
    assert list(placed(admission, 200.0)) == ["t1"]
    assert admission.why("t1") == ""


def test_a_gang_that_needs_scale_out_says_so() -> None:
    admission = cluster(GPU4)
    admission.submit(entry(1, 4, 2))
    admission.submit(entry(2, 4))
    placed(admission)
    assert "it needs more of them" in admission.why("t1")
    admission.submit(entry(3, 4))
    placed(admission)
    assert "it needs more of them" not in admission.why("t3")


def test_a_task_that_fits_does_not_wait_for_one_that_does_not() -> None:
    admission = cluster(GPU4, GPU4)
    admission.submit(entry(1, 4, 3, priority=9))
    admission.submit(entry(2, 2))
    assert list(placed(admission)) == ["t2"]


def test_a_gang_starts_when_nodes_have_got_enough_room() -> None:
    admission = cluster(GPU4, GPU4, GPU4)
    for n in (1, 2, 3):
        admission.submit(entry(n, 4))
    assert len(placed(admission)) == 3
    admission.submit(entry(4, 4, 2))
    assert placed(admission) == {}
    admission.ended("t1", 5.0)
    assert placed(admission) == {}
    admission.ended("t3", 6.0)
    assert placed(admission)["t4"].node_ids == ("n0", "n2")


def test_an_elastic_gang_starts_with_less() -> None:
    admission = cluster(GPU4, GPU4)
    admission.submit(entry(1, 4, 4, min_bundles=2))
    admission.submit(entry(2, 4, 4, min_bundles=3, priority=9))
    assert {t: len(p.node_ids) for t, p in placed(admission).items()} == {"t1": 2}


def test_a_requeued_task_waits_at_its_old_place() -> None:
    admission = cluster(GPU4)
    admission.submit(entry(1, 4))
    admission.submit(entry(2, 4))
    assert list(placed(admission)) == ["t1"]
    admission.requeue("t1", 10.0, 50.0)
    assert admission.waiting_ids == ["t1", "t2"]
    assert list(placed(admission)) == ["t1"]


@pytest.mark.parametrize("other", [None, Ask(Bundle(4.0, 1.0), 1, nodes=("n0",))])
def test_a_task_may_leave_and_come_back_at_once(other: Ask | None) -> None:
    """As it was or with another shape, with a deadline whose timer is the same again."""
    admission = cluster(GPU4)
    first = [entry(1, 4, deadline_s=5000.0), entry(2, 4, deadline_s=5000.0), entry(3, 4, deadline_s=5000.0)]
    for e in first:
        admission.submit(e)
    for e in first[:2]:
        admission.ended(e.task_id, 50.0, finished=False)
        admission.submit(e if other is None else replace(e, ask=other))
    assert list(placed(admission)) == ["t1"]
    for n in (1, 2):
        admission.ended(f"t{n}", 200.0 + n)
        assert list(placed(admission, 200.0 + n)) == [f"t{n + 1}"]


def test_what_others_use_is_placed_around() -> None:
    admission = cluster(GPU4)
    admission.set_node(empty_room("n0", "w", GPU4, "n0"), Bundle(3, 0, 0))
    admission.submit(entry(1, 2))
    admission.submit(entry(2, 1))
    assert list(placed(admission)) == ["t2"]
    assert admission.rooms()[0].free_gpus == 0
    admission.set_node(empty_room("n0", "w", GPU4, "n0"))
    assert list(placed(admission)) == ["t1"]


def test_a_flapping_node_neither_loses_nor_doubles_room() -> None:
    admission = cluster(GPU4)
    admission.submit(entry(1, 3))
    placed(admission)
    for _ in range(100):
        admission.drop_node("n0")
        admission.set_node(empty_room("n0", "w", GPU4, "n0"))
    assert admission.rooms()[0].free_gpus == 1
    admission.drop_node("n0")
    admission.ended("t1", 1.0)
    admission.set_node(empty_room("n0", "w", GPU4, "n0"))
    assert admission.rooms()[0].free_gpus == 4


def test_a_task_taken_over_from_an_earlier_process_keeps_its_devices() -> None:
    admission = Admission()
    admission.adopt(entry(1, 2), Placement(("n0",), (((2, 1.0), (3, 1.0)),)), since_s=0.0)
    admission.set_node(empty_room("n0", "w", GPU4, "n0"))
    admission.submit(entry(2, 2))
    assert placed(admission)["t2"].devices == (((0, 1.0), (1, 1.0)),)


def test_a_clock_that_goes_back_reorders_nothing() -> None:
    admission = cluster(GPU4)
    admission.submit(entry(1, 4))
    placed(admission, 1e6)
    for n in (2, 3):
        admission.submit(entry(n, 4, deadline_s=2e6))
    before = admission.waiting_ids
    placed(admission, 5.0)
    admission.ended("t1", 4.0)
    assert admission.waiting_ids == before
    assert list(placed(admission, 3.0)) == ["t2"]


def test_a_deadline_moves_a_task_when_its_slack_gets_short() -> None:
    admission = cluster(GPU4)
    admission.submit(entry(1, 4))
    placed(admission)
    admission.submit(entry(2, 4))
    admission.submit(entry(3, 4, deadline_s=100_000.0, estimate_s=1000.0))
    assert admission.waiting_ids == ["t2", "t3"]
    placed(admission, 100_000.0 - 1000.0 - 3600.0)
    assert admission.waiting_ids == ["t3", "t2"]


@pytest.mark.parametrize("gpus", [-1.0, float("nan"), float("inf"), 1.5, 1e-9])
def test_amounts_that_are_none_are_refused(gpus: float) -> None:
    with pytest.raises(InvalidInput, match="gpus"):
        cluster(GPU4).submit(entry(1, gpus))


def test_every_mistake_of_an_entry_is_told() -> None:
    with pytest.raises(InvalidInput) as e:
        cluster(GPU4).submit(entry(1, priority=float("nan"), weight=-1.0, min_bundles=5, estimate_s=-3.0))
    assert all(word in str(e.value) for word in ("priority", "weight", "min_bundles", "estimate_s"))


def test_a_hundred_thousand_submits_at_once_are_one_decision() -> None:
    admission = cluster(*[GPU4] * 10)
    for n in range(1, 100_001):
        admission.submit(entry(n, 1.0 + n % 2))
    assert len(placed(admission)) == 27  # 40 GPUs for 2 and 1 in turn


asks = st.builds(
    Ask,
    st.builds(
        Bundle,
        st.sampled_from([0.0, 0.25, 0.5, 0.7, 1.0, 2.0, 4.0]),
        st.sampled_from([0.5, 1.0, 4.0]),
        st.sampled_from([0.0, 8.0]),
    ),
    st.sampled_from([1, 1, 1, 2, 3, 6]),
    st.sampled_from([None, None, "w", "g1"]),
    st.sampled_from([(), (), ("H100",), ("A100-80GB", "H100")]),
    st.booleans(),
    st.sampled_from([None, None, None, "spot"]),
    st.sampled_from([(), (), (), ("n0", "n2")]),
    st.sampled_from(["pack", "pack", "spread"]),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), asks, st.integers(0, 9)),
        st.tuples(st.just("end"), st.integers(0, 50), st.booleans()),
        st.tuples(st.just("node"), st.integers(0, 5), st.sampled_from([0.0, 0.5, 1.0, 3.0])),
        st.tuples(st.just("drop"), st.integers(0, 5), st.booleans()),
        st.tuples(st.just("decide"), st.integers(-20, 100), st.booleans()),
    ),
    max_size=40,
)


class World:
    """Plays a history and keeps its own books of it."""

    def __init__(self, patience_s: float = inf, pools: tuple[Pool, ...] = ()) -> None:
        self.admission = Admission(pools=pools, patience_s=patience_s)
        self.nodes: dict[str, tuple[NodeRoom, Bundle]] = {}
        self.running: dict[str, tuple[Entry, Placement]] = {}
        self.entries: dict[str, Entry] = {}
        self.decisions: list[object] = []
        self.now_s = 1000.0

    def play(self, step: tuple[str, object, object]) -> None:
        what, a, b = step
        if what == "submit":
            number = len(self.entries) + 1
            task = Entry(f"t{number}", number, a, self.now_s, float(b), min_bundles=min(a.count, b % 3))  # type: ignore
            self.entries[task.task_id] = task
            self.admission.submit(task)
        elif what == "node":
            shape = SHAPES[a % 3]  # type: ignore[operator]
            room = empty_room(f"n{a}", ("w", "g1")[a % 2], shape, f"n{a}", ("", "spot")[a // 3])  # type: ignore
            foreign = Bundle(min(float(b), shape.gpus), 0.0, 0.0)  # type: ignore[arg-type]
            self.nodes[room.node_id] = (room, foreign)
            self.admission.set_node(room, foreign)
        elif what == "drop":
            self.nodes.pop(f"n{a}", None)
            self.admission.drop_node(f"n{a}")
        elif what == "end" and self.running:
            task_id = sorted(self.running)[a % len(self.running)]  # type: ignore[operator]
            del self.running[task_id]
            if b:
                self.admission.requeue(task_id, 5.0, self.now_s)
            else:
                self.admission.ended(task_id, self.now_s)
        elif what == "decide":
            self.now_s += a  # type: ignore[operator]
            self.decide()

    def decide(self) -> None:
        for d in self.admission.decide(self.now_s):
            self.decisions.append(d)
            assert isinstance(d, Place)
            task = self.entries[d.task_id]
            assert task.least <= len(d.placement.node_ids) <= task.ask.count
            assert d.task_id not in self.running
            for node_id in d.placement.node_ids:
                room = self.nodes[node_id][0]
                assert task.ask.group in (None, room.group)
                assert not task.ask.accelerators or room.accelerator in task.ask.accelerators
                assert task.ask.market in (None, room.market)
                assert not task.ask.nodes or node_id in task.ask.nodes
            self.running[d.task_id] = (task, d.placement)

    def check_nothing_is_over_committed(self) -> None:
        devices: Counter[tuple[str, int]] = Counter()
        cpus: Counter[str] = Counter()
        memory: Counter[str] = Counter()
        for task, placement in self.running.values():
            for node_id, shares in zip(placement.node_ids, placement.devices, strict=True):
                cpus[node_id] += task.ask.bundle.cpus  # type: ignore[assignment]
                memory[node_id] += task.ask.bundle.memory_gib  # type: ignore[assignment]
                assert sum(s for _, s in shares) == pytest.approx(task.ask.bundle.gpus)
                for device, share in shares:
                    devices[node_id, device] += share  # type: ignore[assignment]
        for node_id, (room, _) in self.nodes.items():
            assert cpus[node_id] <= room.cpus + EPS
            assert memory[node_id] <= room.memory_gib + EPS
        for (node_id, device), use in devices.items():
            assert use <= 1 + EPS
            if node_id in self.nodes:
                assert device < len(self.nodes[node_id][0].gpus)

    def check_nothing_that_fits_waits(self) -> None:
        rooms = self.admission.rooms()
        for task_id in self.admission.waiting_ids:
            task = self.entries[task_id]
            found = fit(replace(task.ask, count=task.least), rooms)
            assert isinstance(found, NoFit), (task_id, task.ask, found)


@given(steps)
@settings(deadline=None)
def test_random_histories(history: list[tuple[str, object, object]]) -> None:
    world, twin = World(), World()
    for step in history:
        world.play(step)
        twin.play(step)
        world.check_nothing_is_over_committed()
    world.decide()
    twin.decide()
    world.check_nothing_is_over_committed()
    world.check_nothing_that_fits_waits()
    assert world.decisions == twin.decisions  # the same history, the same decisions


@given(steps)
@settings(deadline=None)
def test_what_is_free_after_all_is_over_is_all(history: list[tuple[str, object, object]]) -> None:
    world = World()
    for step in history:
        world.play(step)
    for _ in range(100):
        world.decide()
        for task_id in list(world.running):
            world.play(("end", sorted(world.running).index(task_id), False))
    for room in world.admission.rooms():
        whole, foreign = world.nodes[room.node_id]
        assert room.free_gpus == pytest.approx(whole.free_gpus - foreign.gpus)
        assert (room.cpus, room.memory_gib) == (whole.cpus, whole.memory_gib)
