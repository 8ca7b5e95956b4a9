"""The order of waiting tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sky.core.gangs import Ask
from areal_sky.core.model import Bundle
from areal_sky.core.queueing import (
    URGENCY_STEPS,
    Entry,
    WeightedOrder,
    check_entry,
    deadline_warning,
)
from areal_sky.errors import InvalidInput

HOUR = 3600.0


ORDER = WeightedOrder()


def entry(number: int = 1, priority: float = 5, weight: float = 1.0, submitted_s: float = 0.0, **more: object) -> Entry:
    ask = Ask(Bundle(1, 1), 1)
    return Entry(f"t{number}", number, ask, submitted_s, priority, weight, **{"kind": "rollout", **more})  # type: ignore


def in_order(order: WeightedOrder, *queue: Entry) -> list[int]:
    """Submit numbers, first to be placed first."""
    return [e.number for e in sorted(queue, key=lambda e: (order.key(e, 0.0, 0.0)[0], e.number))]


def test_priority_times_weight_decides_between_tasks_of_one_age() -> None:
    assert in_order(ORDER, entry(1), entry(2, weight=1.5), entry(3, priority=8)) == [3, 2, 1]
    assert in_order(ORDER, entry(2), entry(3), entry(1)) == [1, 2, 3]  # ties go to the earlier submit


def test_waiting_earns_a_task_its_turn() -> None:
    old_base, new_moe = entry(1), entry(2, weight=1.5, submitted_s=3 * HOUR)
    assert in_order(ORDER, new_moe, old_base) == [1, 2]  # 5 + 3 h beats 7.5
    assert in_order(WeightedOrder(ageing_per_hour=0.0), new_moe, old_base) == [2, 1]


def test_a_clock_that_went_back_costs_nothing() -> None:
    assert ORDER.score(entry(submitted_s=100.0), 0.0, now_s=0.0) == 5.0


def test_each_term_of_the_score_is_told() -> None:
    text = ORDER.explain(entry(weight=1.5, kind="train"), 0.0, 1.5 * HOUR)
    assert text == "score 10.50 = priority 5 x weight 1.5 x train 1.2 + 1.50 for 1.5 h waited"
    urgent = entry(deadline_s=5 * HOUR, estimate_s=2 * HOUR)
    told = ORDER.explain(urgent, 0.0, 2 * HOUR)
    assert told.endswith("+ 2 for its deadline (1.0 h of slack, more in 45 min)")
    assert "1.0 h too little time" in ORDER.explain(urgent, 0.0, 4 * HOUR)
    assert "which has passed" in ORDER.explain(urgent, 0.0, 6 * HOUR)


def test_a_deadline_that_cannot_be_met_is_told_and_accepted() -> None:
    assert "passed 1.0 h ago" in deadline_warning(entry(deadline_s=HOUR), 2 * HOUR)
    assert "in 1.0 h, but it is expected to run for 2.0 h" in deadline_warning(
        entry(deadline_s=HOUR, estimate_s=2 * HOUR), 0.0
    )
    assert deadline_warning(entry(deadline_s=3 * HOUR, estimate_s=2 * HOUR), 0.0) == ""
    check_entry(entry(deadline_s=-5.0))


def test_every_mistake_is_told_at_once() -> None:
    with pytest.raises(InvalidInput) as e:
        check_entry(entry(priority=1e9, weight=float("inf"), deadline_s=float("nan"), min_runtime_s=-1.0))
    assert str(e.value).count("\n") == 3


entries = st.builds(
    entry,
    st.integers(1, 1000),
    st.integers(0, 100),
    st.sampled_from([0.5, 1.0, 1.5]),
    st.integers(0, 10**6).map(float),
    kind=st.sampled_from(["train", "rollout", "eval"]),
    deadline_s=st.one_of(st.none(), st.integers(0, 10**6).map(float)),
    estimate_s=st.one_of(st.none(), st.integers(0, 10**5).map(float)),
)


@given(entries, st.integers(0, 10**6), st.integers(0, 10**5))
def test_a_key_holds_until_it_says_and_agrees_with_the_score(e: Entry, now: int, later: int) -> None:
    now_s = max(float(now), e.submitted_s)
    key, until_s = ORDER.key(e, 0.0, now_s)
    assert until_s > now_s
    assert ORDER.score(e, 0.0, now_s) == pytest.approx(now_s / HOUR - key, abs=1e-6)
    if now_s + later < until_s:
        assert ORDER.key(e, 0.0, now_s + later) == (key, until_s)
    else:
        assert len(URGENCY_STEPS) + 1 >= sum(1 for _ in moves(e, now_s))


def moves(e: Entry, t_s: float) -> Iterator[float]:
    """The times at which the task's key changes, all of them known by asking."""
    while (t_s := ORDER.key(e, 0.0, t_s)[1]) != inf:
        yield t_s


@given(entries, entries, st.sampled_from([0.5, 1.0, 10.0]), st.integers(0, 10**6))
def test_nobody_is_overtaken_for_longer_than_the_bound(old: Entry, new: Entry, rate: float, now: int) -> None:
    """What is submitted later than `overtaken_for_s` after a task never goes before it, whatever its deadline."""
    order = WeightedOrder(ageing_per_hour=rate)
    bound_s = order.overtaken_for_s(old, order.rank(new))
    late = replace(new, submitted_s=old.submitted_s + bound_s + 1.0)
    now_s = max(float(now), late.submitted_s)
    assert order.key(old, 0.0, now_s)[0] <= order.key(late, 0.0, now_s)[0] + 1e-9
    assert WeightedOrder(ageing_per_hour=0.0).overtaken_for_s(entry(priority=0), 5.0) == inf
