"""Task records, their moves, and what ended ranks mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sky.core.model import Bundle
from areal_sky.core.taskevents import (
    Draining,
    Ended,
    Fact,
    Place,
    Placed,
    RankExited,
    Requeued,
    Started,
    Starting,
    Stopping,
    Submitted,
    TaskEvent,
    tell,
    where,
)
from areal_sky.core.tasklife import SETTLE_S, SILENT_S, TaskRecord, Wait, fold, verdict
from areal_sky.core.taskmodel import TaskSpec, TaskState
from areal_sky.core.taskspec import task_spec_from_json, task_spec_to_json
from areal_sky.errors import InvalidInput, StateError

PLACES = (Place("n0", "c-w-0", 0, ((0, 1.0),)), Place("n1", "c-w-1", 0, ((0, 1.0),)))
SPEC = TaskSpec("train", command="x", bundles=2, bundle=Bundle(1, 1), max_retries=1)
RUNNING: list[Fact] = [Submitted(1, SPEC), Placed(1, PLACES), Starting(), Started()]


def record(*more: Fact, base: list[Fact] | None = None) -> TaskRecord:
    facts = [*(RUNNING if base is None else base), *more]
    records, _ = fold([TaskEvent(float(i), "t1", f) for i, f in enumerate(facts)])
    return records["t1"]


def test_a_life_in_order() -> None:
    r = record()
    assert (r.state, r.gang_id, r.started_s, r.submitted_s) == (TaskState.RUNNING, "t1.1", 3.0, 0.0)
    r = record(RankExited(0, 0), RankExited(1, 0), Ended(TaskState.SUCCEEDED))
    assert (r.state, r.ended_s, [e.code for e in r.exits]) == (TaskState.SUCCEEDED, 6.0, [0, 0])


def test_a_requeued_task_keeps_number_and_submit_time_and_starts_clean() -> None:
    r = record(RankExited(0, 1), Stopping("failed", "x"), Requeued("x", True))
    assert (r.state, r.number, r.submitted_s, r.retries) == (TaskState.QUEUED, 1, 0.0, 1)
    assert (r.places, r.exits, r.stop, r.attempt) == ((), (), None, 1)


@pytest.mark.parametrize(
    "facts",
    [
        [Submitted(1, SPEC), Submitted(1, SPEC)],
        [Placed(1, PLACES)],
        [Submitted(1, SPEC), Started()],
        [Submitted(1, SPEC), Starting()],
        [Submitted(1, SPEC), RankExited(0, 0)],
        [Submitted(1, SPEC), Requeued("x", False)],
        [*RUNNING, Placed(2, PLACES)],
        [Submitted(1, SPEC), Ended(TaskState.CANCELLED), Placed(1, PLACES)],
    ],
)
def test_moves_that_the_life_does_not_have_are_refused(facts: list[Fact]) -> None:
    with pytest.raises(StateError, match="cannot happen to it"):
        record(base=facts)


def judged(r: TaskRecord, dead: set[str] | None = None, now_s: float = 100.0) -> object:
    return verdict(r, dead or set(), now_s, grace_s=10.0)


def test_all_ranks_must_end_well() -> None:
    assert judged(record()) == Wait()
    assert judged(record(RankExited(0, 0))) == Wait()
    assert judged(record(RankExited(0, 0), RankExited(1, 0))) == Ended(TaskState.SUCCEEDED)


def test_the_first_failure_stops_the_gang_and_names_the_reason() -> None:
    stop = judged(record(RankExited(1, 2, tail="boom"), RankExited(0, -15)))
    assert stop == Stopping("failed", "rank 1 ended with exit code 2: boom")
    not_found = "rank 0 ended with exit code 127 (command not found)"
    assert judged(record(RankExited(0, 127))) == Stopping("failed", not_found)
    assert judged(record(RankExited(0, -11))) == Stopping("failed", "rank 0 was killed by signal 11")


def test_a_failure_waits_for_the_other_ranks_then_counts() -> None:
    stopped = record(RankExited(0, 2), Stopping("failed", "rank 0 ended with exit code 2"))
    assert judged(stopped, now_s=6) == Wait()
    both = record(RankExited(0, 2), Stopping("failed", "why"), RankExited(1, -15))
    assert judged(both) == Requeued("why; retry 1 of 1", True)
    assert judged(replace(both, retries=1)) == Ended(TaskState.FAILED, "why")


def test_a_silent_rank_is_given_up_after_the_kill() -> None:
    stopped = record(Stopping("cancel", "by the user"))  # at 4 s
    assert judged(stopped, now_s=4 + 10 + SILENT_S) == Wait()
    assert judged(stopped, now_s=4 + 10 + SILENT_S + 1) == Ended(TaskState.CANCELLED, "by the user")


def test_node_loss_beats_failure_and_costs_nothing() -> None:
    assert judged(record(), {"n1"}) == Stopping("lost", "node c-w-1/0 died under rank 1")
    assert judged(record(RankExited(1, 0)), {"n1"}) == Wait()  # it had finished there
    failed = record(RankExited(0, -9), Stopping("failed", "rank 0 was killed"), RankExited(1, -15))
    assert judged(failed, now_s=4 + SETTLE_S - 1) == Wait()  # perhaps the echo of a dying node
    assert judged(failed, {"n0"}, now_s=7) == Requeued("node c-w-0/0 died under rank 0", False)
    assert isinstance(judged(failed, now_s=5 + SETTLE_S), Requeued)


def test_cancel_overrides_and_evict_requeues_even_a_clean_exit() -> None:
    evicted = record(Stopping("evict", "leaving"), RankExited(0, 0), RankExited(1, 0))
    assert judged(evicted) == Requeued("leaving", False)
    cancelled = record(Stopping("evict", "leaving"), Stopping("cancel", "user"), RankExited(0, -15), RankExited(1, -15))
    assert judged(cancelled) == Ended(TaskState.CANCELLED, "user")


exits = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from([0, 1, -9, -15, 137, None])), max_size=2, unique_by=lambda e: e[0]
)


@given(exits, st.sets(st.sampled_from(["n0", "n1"])), st.sampled_from([None, "cancel", "evict", "lost", "failed"]))
def test_every_stopped_gang_comes_to_an_end(
    ended: list[tuple[int, int | None]], dead: set[str], stop: str | None
) -> None:
    facts: list[Fact] = [RankExited(rank, code) for rank, code in ended]
    r = record(*facts, *([Stopping(stop, "why")] if stop else []))  # type: ignore[arg-type]
    found = judged(r, dead, now_s=1000.0)
    if stop is not None:
        assert isinstance(found, Ended | Requeued)
    if isinstance(found, Ended) and found.state is TaskState.SUCCEEDED:
        assert sorted(ended) == [(0, 0), (1, 0)]
    if isinstance(found, Requeued) and found.counted:
        assert not dead - {f"n{rank}" for rank, code in ended if code == 0}


def test_every_fact_has_its_sentence() -> None:
    facts: list[Fact] = [
        *RUNNING, RankExited(0, 1), RankExited(0, None, "gone"), Stopping("cancel", "user"), Requeued("x", False),
        Ended(TaskState.FAILED, "y"), Draining("c-w-0", ("n0",), 1.0, "idle"),
    ]  # fmt: skip
    lines = [tell(TaskEvent(0.0, "t1", f)) for f in facts]
    assert all(lines)
    assert "attempt 1: placed on c-w-0/0, c-w-1/0" in lines
    assert where((PLACES[0], PLACES[0], PLACES[1])) == "c-w-0/0 x2, c-w-1/0"


def test_a_spec_survives_the_wire() -> None:
    spec = TaskSpec(
        "eval", payload="cGF5", name="e", model="m", model_type="moe", bundles=3, bundle=Bundle(0.25, 0.5, 1.5),
        priority=7.5, group="w", accelerators=("H100", "L40S"), envs={"A": "b=c\n"}, max_retries=2, deadline_s=5.0,
        submit_key="k",
    )  # fmt: skip
    assert task_spec_from_json(task_spec_to_json(spec)) == spec


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({}, "kind: '' is not one of"),
        ({"kind": "train"}, "exactly one of them"),
        ({"kind": "train", "command": "x", "payload": "y"}, "exactly one of them"),
        ({"kind": "train", "command": " "}, "exactly one of them"),
        ({"kind": "train", "command": "x" * 100_001}, "put it into a file"),
        ({"kind": "train", "command": "x\0"}, "NUL"),
        ({"kind": "train", "command": "x", "bundles": 2.5}, "bundles: expected a whole number"),
        ({"kind": "train", "command": "x", "bundles": True}, "bundles: expected a number"),
        ({"kind": "train", "command": "x", "bundles": 10**6}, "bundles: 1e+06 is not between 1 and 1024"),
        ({"kind": "train", "command": "x", "priority": -1}, "priority: -1 is not between 0 and 100"),
        ({"kind": "train", "command": "x", "bundle": {"gpus": 2.5}}, "neither whole nor a fraction below 1"),
        ({"kind": "train", "command": "x", "bundle": {"gpus": 0, "cpus": 0}}, "neither GPUs nor CPUs"),
        ({"kind": "train", "command": "x", "bundle": {"gpus": 1e-9}}, "below 0.0001"),
        ({"kind": "train", "command": "x", "bundle": 4}, "bundle: expected an object"),
        ({"kind": "train", "command": "x", "envs": {"1A": "x"}}, "no name of an environment variable"),
        ({"kind": "train", "command": "x", "envs": {"A": 1}}, "envs.A: expected a text"),
        ({"kind": "train", "command": "x", "envs": {"AREAL_SKY_X": "1"}}, "set by areal_sky"),
        ({"kind": "train", "command": "x", "accelerators": "H100"}, "expected a list of names"),
        ({"kind": "train", "command": "x", "name": "a\x1b[31m"}, "printable"),
        ([], "must be a JSON object"),
    ],
)
def test_wrong_specs_are_refused_in_words(raw: object, words: str) -> None:
    with pytest.raises(InvalidInput) as e:
        task_spec_from_json(raw)
    assert words in str(e.value)
