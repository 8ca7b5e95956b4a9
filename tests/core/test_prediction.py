"""Predictions: they follow what has ended and what still runs, and stay within their bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sky.core.fragmentation import UsualAsk
from areal_sky.core.gangs import Ask
from areal_sky.core.model import Bundle
from areal_sky.core.order_policies import BUILT_IN, AttainedOrder, ShortestOrder
from areal_sky.core.prediction import MOST_LIKENESSES, RunningTimes, likeness_name
from areal_sky.core.queueing import Entry, LearningOrder, OrderByService, OrderPolicy
from areal_sky.core.runtimegrid import GRID, N_BUCKETS, gittins_index


def entry(number: int, **more) -> Entry:
    return Entry(f"t{number}", number, Ask(Bundle(gpus=1.0), 1), **{"submitted_s": float(number), **more})


def learnt(runs_s: list[float]) -> RunningTimes:
    times = RunningTimes()
    for i, s in enumerate(runs_s):
        times.submitted(f"old{i}", "sweep", float(i))
        times.ended(f"old{i}", s)
    return times


def test_like_tasks_are_expected_to_run_as_long():
    times = learnt([3600.0] * 6)
    times.submitted("new", "sweep", 10.0)
    left = times.remaining("new", 0.0)
    assert 2000 < left.median_s < 6000 and left.low_s < left.median_s < left.high_s
    times.submitted("stranger", "other", 10.0)
    odd = times.remaining("stranger", 0.0)
    assert odd.high_s / max(odd.low_s, 1.0) > left.high_s / max(left.low_s, 1.0)


def test_a_sibling_that_still_runs_makes_the_others_longer():
    times = RunningTimes()
    for i in range(4):
        times.submitted(f"s{i}", "sweep", float(i))
    before = times.remaining("s3", 0.0).median_s
    for i in range(3):
        times.served(f"s{i}", 100000.0)
    assert times.remaining("s3", 0.0).median_s > 3 * before
    assert "s3" in times.moved()


def test_an_estimate_counts_and_so_does_how_wrong_they_were():
    right, wrong = RunningTimes(), RunningTimes()
    for i in range(30):
        for times, run_s in ((right, 3600.0), (wrong, 3600.0 * 30 ** ((-1) ** i))):
            times.submitted(f"old{i}", "x", i * 1e5, estimate_s=3600.0)
            times.ended(f"old{i}", run_s)
    spread = []
    for times in (right, wrong):
        times.submitted("new", "y", 1e7, estimate_s=3600.0)
        left = times.remaining("new", 0.0)
        spread.append(left.high_s / left.low_s)
    assert spread[0] < spread[1]


def test_what_was_cancelled_is_no_proof_of_shortness():
    cancelled, ended = RunningTimes(), RunningTimes()
    for times, finished in ((cancelled, False), (ended, True)):
        for i in range(5):
            times.submitted(f"a{i}", "x", float(i))
            times.ended(f"a{i}", 60.0, finished=finished)
        times.submitted("b", "x", 6.0)
    assert cancelled.remaining("b", 0.0).median_s > ended.remaining("b", 0.0).median_s


def test_memory_is_bounded():
    times = RunningTimes()
    for i in range(3 * MOST_LIKENESSES):
        times.submitted(f"t{i}", i, float(i))
        times.ended(f"t{i}", 60.0)
    assert len(times._likenesses) <= MOST_LIKENESSES and not times._tasks


@given(st.lists(st.floats(0.001, 1.0), min_size=N_BUCKETS, max_size=N_BUCKETS))
def test_the_index_is_never_more_than_serving_to_the_end(mass: list[float]):
    table = gittins_index(mass)
    assert all(0 < x < math.inf for x in table)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(1, 1e6), st.booleans()), max_size=15))
def test_beliefs_stay_probabilities(history):
    times = RunningTimes()
    for i, (like, run_s, finished) in enumerate(history):
        times.submitted(f"t{i}", like, i * 500.0)
        times.served(f"t{i}", run_s / 2)
        times.ended(f"t{i}", run_s, finished=finished)
    times.submitted("new", "a", 1e6)
    left = times.remaining("new", 0.0)
    assert 0 <= left.low_s <= left.median_s <= left.high_s < math.inf
    assert len(times._all) == len(GRID) and all(x > -1e-6 for x in times._all)


def test_names_without_numbers():
    assert likeness_name("sweep-17") == likeness_name("sweep-8") != likeness_name("eval-8")


# ---------------------------------------------------------------- orders


def test_shortest_keeps_weight_priority_kind_and_waiting():
    order = ShortestOrder()
    plain, _ = order.key(entry(1), 0.0, 0.0)
    assert order.key(entry(2, weight=1.5, submitted_s=1.0), 0.0, 0.0)[0] < plain
    assert order.key(entry(3, priority=9.0, submitted_s=1.0), 0.0, 0.0)[0] < plain
    assert order.key(entry(4, kind="eval", submitted_s=1.0), 0.0, 0.0)[0] > plain
    assert order.key(entry(5, priority=0.0, submitted_s=1.0), 0.0, 0.0)[0] > plain


def test_equals_do_not_preempt_each_other():
    order = ShortestOrder(hysteresis=2.0)
    a, b = entry(1), entry(2)
    assert not order.may_preempt(a, 0.0, b, 0.5, 0.0) and order.may_preempt(a, 0.0, b, 1.5, 0.0)
    assert not order.may_preempt(b, 1.5, a, 0.0, 0.0)


def test_attained_falls_level_by_level():
    order = AttainedOrder((100.0, 400.0))
    keys = [order.key(entry(1), served, 0.0)[0] for served in (0.0, 99.0, 100.0, 399.0, 400.0)]
    assert keys[0] == keys[1] < keys[2] == keys[3] < keys[4]
    assert [order.next_step_s(entry(1), s) for s in (0.0, 100.0, 400.0)] == [100.0, 400.0, math.inf]


def test_protocols_are_met():
    assert isinstance(ShortestOrder(), LearningOrder) and isinstance(ShortestOrder(), OrderByService)
    made: list[OrderPolicy] = [factory({}, 1.0) for factory in BUILT_IN.values()]
    assert not isinstance(made[0], LearningOrder)


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("shortest", {"hysteresis": 0.5}), ("shortest", {"ageing_halving": 0}), ("attained", {"factor": 1}),
        ("fifo", {"x": 1}), ("weighted", {"margin": 0}), ("shortest", {"hysteresis": "two"}),
    ],
)  # fmt: skip
def test_wrong_numbers_are_refused(kind: str, numbers: dict[str, float]):
    with pytest.raises(ValueError):
        BUILT_IN[kind](numbers, 1.0)


def test_stranded_gpus_are_those_without_the_usual_cpus():
    usual = UsualAsk()
    assert usual.stranded(8, 0) == 0
    usual.seen(10, 100)
    assert usual.stranded(8, 40) == 4 and usual.stranded(4, 100) == 0
    assert usual.grows_by(8, 80, 0, 20) == 2 and usual.grows_by(8, 80, 1, 10) == 0
