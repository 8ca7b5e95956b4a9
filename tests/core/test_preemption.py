"""Who is ended for whom: by rank and role, as few and as little as possible, and never in turn."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_sky.core.admission import Admission, Decision, Entry, Place, Preempt, Shrink
from areal_sky.core.gangs import Ask, Placement
from areal_sky.core.leases import Hold
from areal_sky.core.model import Bundle, NodeShape
from areal_sky.core.queueing import WeightedOrder
from areal_sky.core.room import UNIT, empty_room, how_many, need_of
from areal_sky.core.shapes import Item
from areal_sky.core.victims import Unit, choose, cost, freed

GPU4 = NodeShape(gpus=4, cpus=16, memory_gib=64, accelerator="H100")


def task(number: int, gpus: float, priority: float = 5, kind: str = "rollout", count: int = 1, **more: object) -> Entry:
    ask = Ask(Bundle(gpus, 1), count)
    return Entry(f"t{number}", number, ask, 0.0, priority, kind=kind, **{"preemptible": True, **more})  # type: ignore


def cluster(nodes: int = 1) -> Admission:
    admission = Admission()
    for i in range(nodes):
        admission.set_node(empty_room(f"n{i}", "w", GPU4, f"n{i}"))
    return admission


def victims(decisions: list[Decision]) -> list[str]:
    return [d.task_id for d in decisions if isinstance(d, Preempt)]


def started(decisions: list[Decision]) -> list[str]:
    return [d.task_id for d in decisions if isinstance(d, Place)]


def test_a_higher_rank_takes_over_once_its_victim_has_gone() -> None:
    admission = cluster()
    admission.submit(task(1, 4, 2))
    admission.decide(0)
    admission.submit(task(2, 4, 8))
    assert victims(admission.decide(100)) == ["t1"]
    assert "t1 has ended" in admission.why("t2")
    assert admission.decide(101) == []
    admission.requeue("t1", 100.0, 110.0)
    admission.submit(task(3, 4, 8.5))  # even a better one does not get what was freed for t2
    assert started(admission.decide(110)) == ["t2"]
    assert admission.waiting_ids == ["t3", "t1"]


def test_equals_and_tasks_that_are_not_preemptible_are_left_alone() -> None:
    admission = cluster()
    admission.submit(task(1, 2, 5))
    admission.submit(task(2, 2, 1, preemptible=False))
    admission.decide(0)
    admission.submit(task(3, 2, 5.9))
    assert admission.decide(100) == []
    admission.submit(task(4, 4, 50))
    assert admission.decide(200) == []  # one of two would have to be ended that may not
    admission.submit(task(5, 2, 60))
    assert victims(admission.decide(300)) == ["t1"]


def test_nobody_is_ended_before_its_minimum_time() -> None:
    admission = cluster()
    admission.submit(task(1, 4, 1, min_runtime_s=60.0))
    admission.decide(0)
    admission.submit(task(2, 4, 9))
    assert admission.decide(50) == []
    assert victims(admission.decide(61)) == ["t1"]


def test_ageing_gives_no_right_to_end_others() -> None:
    admission = cluster()
    admission.submit(task(1, 4, 5))
    admission.decide(0)
    admission.submit(task(2, 4, 5))
    assert admission.decide(1e7) == []


def test_rollout_goes_before_train_and_few_before_many() -> None:
    admission = cluster(2)
    admission.submit(task(1, 4, 1, "train"))
    for n in (2, 3):
        admission.submit(task(n, 2, 1, "rollout"))
    admission.decide(0)
    admission.submit(task(4, 4, 50))
    assert sorted(victims(admission.decide(100))) == ["t2", "t3"]
    admission = cluster(2)
    admission.submit(task(1, 4, 1))
    for n in (2, 3):
        admission.submit(task(n, 2, 1))
    admission.decide(0)
    admission.submit(task(4, 4, 50))
    assert victims(admission.decide(100)) == ["t1"]


def test_least_work_since_the_last_checkpoint_is_lost() -> None:
    admission = cluster(3)
    for n in (1, 2, 3):
        admission.submit(task(n, 4, 1))
    admission.decide(0)
    admission.progress("t2", 95.0)
    admission.submit(task(4, 4, 50))
    assert victims(admission.decide(100)) == ["t2"]


def test_a_gang_over_several_nodes_gets_all_or_ends_nobody() -> None:
    admission = cluster(3)
    for n in (1, 2):
        admission.submit(task(n, 4, 1))
    admission.submit(task(3, 4, 1, preemptible=False))
    admission.decide(0)
    admission.submit(task(4, 4, 50, count=3))
    assert admission.decide(100) == []
    admission.submit(task(5, 4, 50, count=2))
    assert sorted(victims(admission.decide(200))) == ["t1", "t2"]
    admission.ended("t1", 210)
    assert admission.decide(210) == []
    admission.ended("t2", 220)
    assert started(admission.decide(220)) == ["t5"]


def test_elastic_gangs_shrink_before_anything_is_ended() -> None:
    admission = cluster(2)
    admission.submit(task(1, 1, 2, count=6, min_bundles=2))
    admission.submit(task(2, 2, 1))
    admission.decide(0)
    admission.submit(task(3, 1, 50, count=3))
    decided = admission.decide(100)
    assert [(d.task_id, d.ranks) for d in decided if isinstance(d, Shrink)] == [("t1", (3, 4, 5))]
    assert victims(decided) == []
    admission.shrunk("t1", (3, 4, 5), 110)
    assert started(admission.decide(110)) == ["t3"]
    placement = admission.placement("t1")
    assert placement is not None and len(placement.node_ids) == 3


def test_a_node_that_dies_under_a_claim_sends_the_task_back_to_its_place() -> None:
    admission = cluster()
    admission.submit(task(1, 4, 2))
    admission.decide(0)
    admission.submit(task(2, 4, 8))
    assert victims(admission.decide(100)) == ["t1"]
    admission.drop_node("n0")
    assert admission.decide(101) == []
    assert admission.waiting_ids == ["t2"]
    admission.requeue("t1", 100.0, 102.0)
    admission.set_node(empty_room("n1", "w", GPU4, "n1"))
    assert started(admission.decide(103)) == ["t2"]


def test_a_cancelled_preemptor_gives_back_what_was_set_aside() -> None:
    admission = cluster()
    admission.submit(task(1, 4, 2))
    admission.decide(0)
    admission.submit(task(2, 4, 8))
    admission.decide(100)
    admission.ended("t2", 101)
    admission.requeue("t1", 100.0, 110.0)
    assert started(admission.decide(110)) == ["t1"]


@given(st.integers(0, 100), st.integers(0, 100), st.floats(0.1, 4), st.floats(0.1, 4), st.floats(0, 1e6))
def test_no_two_tasks_may_push_each_other_out(a: int, b: int, weight_a: float, weight_b: float, t_s: float) -> None:
    order = WeightedOrder()
    one = Entry("a", 1, Ask(Bundle(1), 1), 0.0, a, weight_a)
    two = Entry("b", 2, Ask(Bundle(1), 1), t_s, b, weight_b)
    keys = order.key(one, 0, t_s)[0], order.key(two, 0, t_s)[0]
    may_a = order.may_preempt(one, keys[0], two, keys[1], t_s)
    may_b = order.may_preempt(two, keys[1], one, keys[0], t_s)
    assert not (may_a and may_b)


running = st.lists(
    st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from(["train", "eval"]), st.integers(0, 50)),
    min_size=1,
    max_size=6,
)


def lease(number: int, gpus: float, kind: str, at: list[tuple[int, float]]) -> Hold:
    item = Item(task(number, gpus, kind=kind))
    return Hold(item, Placement(("n",), (tuple(at),)), 0.0)


@given(running, st.sampled_from([0.5, 1.0, 2.0, 3.0, 4.0]))
@settings(deadline=None)
def test_the_chosen_set_frees_enough_and_is_the_cheapest(held: list[tuple[float, str, int]], gpus: float) -> None:
    devices = [UNIT] * 4
    units: list[Unit] = []
    for n, (its, kind, lost) in enumerate(held):
        need = need_of(Bundle(its, 1))
        free = [i for i, d in enumerate(devices) if d >= (UNIT if need.whole else need.part)][: max(1, need.whole)]
        if len(free) < max(1, need.whole):
            continue
        for i in free:
            devices[i] -= UNIT if need.whole else need.part
        units.append(Unit(lease(n, its, kind, [(i, need.share) for i in free]), (), lost * its))
    room = (devices, 100 * UNIT, 100 * UNIT)
    need = need_of(Bundle(gpus, 1))
    if how_many(*room, need):
        return
    found = choose(need, 1, 0, {"n": room}, units)
    every = [list(c) for k in range(1, len(units) + 1) for c in combinations(units, k)]
    enough = [c for c in every if how_many(*freed(room, "n", c), need)]
    assert (found is None) == (not enough)
    if found is not None:
        assert how_many(*freed(room, "n", found), need)
        assert not any(how_many(*freed(room, "n", [u for u in found if u is not v]), need) for v in found)
        if len(found) <= 3:
            assert cost(found) == pytest.approx(min(cost(c) for c in enough))


arrivals = st.lists(
    st.tuples(st.sampled_from([1.0, 2.0, 4.0]), st.integers(0, 20), st.sampled_from(["train", "rollout", "eval"])),
    min_size=2,
    max_size=15,
)


@given(arrivals)
@settings(deadline=None)
def test_pushing_out_comes_to_rest(tasks: list[tuple[float, int, str]]) -> None:
    """No ping-pong: nobody is ended in turn, and with nobody new and nobody done, all come to rest."""
    admission = cluster(2)
    seen: set[tuple[str, str]] = set()
    now_s = 0.0
    for number, (gpus, priority, kind) in enumerate(tasks, 1):
        admission.submit(task(number, gpus, priority, kind))
        admission.decide(now_s)
    for _ in range(len(tasks) ** 2 + 2):
        now_s += 10.0
        decided = [d for d in admission.decide(now_s) if isinstance(d, Preempt)]
        for d in decided:
            assert (d.for_task, d.task_id) not in seen
            seen.add((d.task_id, d.for_task))
            admission.requeue(d.task_id, 1.0, now_s)
    for _ in range(3):
        now_s += 10.0
        assert not victims(admission.decide(now_s))
