"""The order of waiting tasks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sky.core.queueing import Waiting, explain, in_order, order_key, score

HOUR = 3600.0


def waiting(number: int, priority: float = 5, weight: float = 1.0, submitted_s: float = 0.0) -> Waiting:
    return Waiting(f"t{number}", number, priority, weight, submitted_s)


def test_priority_times_weight_decides_between_tasks_of_one_age() -> None:
    base, moe, urgent = waiting(1), waiting(2, weight=1.5), waiting(3, priority=8)
    assert [w.task_id for w in in_order([base, moe, urgent], 1.0)] == ["t3", "t2", "t1"]


def test_waiting_earns_a_task_its_turn() -> None:
    old_base, new_moe = waiting(1), waiting(2, weight=1.5, submitted_s=3 * HOUR)
    assert in_order([new_moe, old_base], 1.0)[0] == old_base  # 5 + 3 h beats 7.5
    assert in_order([new_moe, old_base], 0.0)[0] == new_moe


def test_ties_go_to_the_earlier_submit() -> None:
    assert [w.number for w in in_order([waiting(2), waiting(3), waiting(1)], 1.0)] == [1, 2, 3]


def test_a_clock_that_went_back_costs_nothing() -> None:
    assert score(waiting(1, submitted_s=100.0), 1.0, now_s=0.0) == 5.0


def test_the_terms_are_told_in_words() -> None:
    text = explain(waiting(1, weight=1.5), 1.0, now_s=1.5 * HOUR)
    assert text == "score 9.00 = priority 5 x weight 1.5 + 1.50 for 1.5 h waited"
    assert "30 min waited" in explain(waiting(1), 2.0, now_s=0.5 * HOUR)


tasks = st.lists(
    st.tuples(st.integers(0, 100), st.sampled_from([0.5, 1.0, 1.5, 2.0]), st.integers(0, 10_000)),
    min_size=2,
    max_size=12,
)


@given(tasks, st.sampled_from([0.0, 0.5, 1.0, 4.0]), st.integers(10_000, 1_000_000))
def test_the_static_key_gives_the_order_of_scores_at_any_time(
    raw: list[tuple[int, float, int]], rate: float, now_s: int
) -> None:
    queue = in_order([waiting(i, p, w, float(s)) for i, (p, w, s) in enumerate(raw)], rate)
    scores = [score(w, rate, float(now_s)) for w in queue]
    assert all(a >= b - 1e-9 for a, b in pairwise(scores))


@given(tasks)
def test_two_tasks_never_swap_places(raw: list[tuple[int, float, int]]) -> None:
    queue = [waiting(i, p, w, float(s)) for i, (p, w, s) in enumerate(raw)]
    assert in_order(queue, 1.0) == in_order(reversed(queue), 1.0)
    assert len({order_key(w, 1.0) for w in queue}) == len(queue)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_requeued_task_keeps_its_place(rate: float) -> None:
    first, second = waiting(1), waiting(2, submitted_s=60.0)
    assert in_order([second, first], rate) == [first, second]
