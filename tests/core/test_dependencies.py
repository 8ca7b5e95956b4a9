"""Who waits for whom: names become numbers, circles are found, and whoever waits is freed exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sky.core.dependencies import Waits, as_numbers, expanded, looked_up, numbers_of, reference
from areal_sky.core.taskmodel import TaskSpec, TaskState
from areal_sky.errors import InvalidInput


def spec(name: str = "", *after: str, array: int | None = None) -> TaskSpec:
    return TaskSpec("train", command="x", name=name, after=after, array=array)


def test_references_are_numbers_and_ranges_of_them() -> None:
    assert [reference((5, 5)), reference((5, 9))] == ["t5", "t5..t9"]
    assert [as_numbers(r) for r in ("t5", "t5..t9", "prep", "t", "t5..9")] == [(5, 5), (5, 9), None, None, None]
    assert list(numbers_of(["t2", "t5..t7"])) == [2, 5, 6, 7]


def test_names_of_one_submit_go_before_those_that_were_there() -> None:
    there = {"prep": (3, 3), "t3": (3, 3)}
    found = looked_up([spec("train", "prep", "t3"), spec("prep", array=4), spec("", "prep")], 10, there.get)
    assert [s.after for s in found] == [("t11..t14", "t3"), (), ("t11..t14",)]
    assert [len(expanded([s])) for s in found] == [1, 4, 1]
    again = looked_up([spec("prep", "prep")], 10, there.get)  # once more, after the last of them
    assert again[0].after == ("t3",)


def test_all_that_is_unknown_is_told_and_one_circle() -> None:
    specs = [spec("a", "b"), spec("b", "c", "nobody"), spec("c", "a"), spec("d", "t99")]
    with pytest.raises(InvalidInput) as e:
        looked_up(specs, 1, lambda _: None)
    assert str(e.value).splitlines() == [
        "b: after: there is no task 'nobody'", "d: after: there is no task 't99'",
        "after: a waits for b waits for c waits for a: a circle, none of them could ever start",
    ]  # fmt: skip
    with pytest.raises(InvalidInput, match="me waits for me"):
        looked_up([spec("me", "me")], 1, lambda _: None)


graphs = st.integers(1, 12).flatmap(
    lambda n: st.lists(st.sets(st.integers(0, n - 1), max_size=3), min_size=n, max_size=n)
)


@given(graphs)
def test_circles_are_found_exactly_where_there_are_some(graph: list[set[int]]) -> None:
    specs = [spec(f"n{i}", *(f"n{j}" for j in deps)) for i, deps in enumerate(graph)]
    left, order = dict(enumerate(graph)), list[int]()
    while free := [i for i, deps in left.items() if not deps - set(order)]:
        order += free
        left = {i: deps for i, deps in left.items() if i not in free}
    if left:
        with pytest.raises(InvalidInput, match="a circle"):
            looked_up(specs, 1, lambda _: None)
    else:
        looked_up(specs, 1, lambda _: None)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=30), st.integers(0, 3))
def test_who_waits_is_freed_once_all_have_succeeded_and_lost_with_the_first_that_has_not(
    ends: list[tuple[int, bool]], before: int
) -> None:
    states = dict.fromkeys(range(10), TaskState.QUEUED)
    asks = {"a": ["t0..t4"], "b": ["t3..t7", "t1"], "c": ["t9"], "d": ["t0..t9", "t2"], "e": ["t0..t4"]}
    waits, news = Waits(), dict[str, str]()

    def add(task_id: str) -> None:
        if waits.add(task_id, asks[task_id], states.__getitem__) is not None:
            news[task_id] = "lost"
        elif task_id not in waits:
            news[task_id] = "freed"

    late = [t for i, t in enumerate(asks) if i < before]
    for task_id in asks:
        if task_id not in late:
            add(task_id)
    done: set[int] = set()
    for number, good in ends:
        if number in done:
            continue
        done.add(number)
        states[number] = TaskState.SUCCEEDED if good else TaskState.FAILED
        freed, lost = waits.ended(number, states[number])
        for task_id, what in (*((t, "freed") for t in freed), *((t, "lost") for t in lost)):
            assert task_id not in news or what == "lost" == news[task_id]
            news[task_id] = what
    for task_id in late:
        add(task_id)
    for task_id, refs in asks.items():
        of = [states[n] for n in numbers_of(refs)]
        if TaskState.FAILED in of:
            assert news[task_id] == "lost"
        elif set(of) == {TaskState.SUCCEEDED}:
            assert news[task_id] == "freed"
        else:
            assert task_id not in news and task_id in waits
