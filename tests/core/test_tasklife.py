"""Task records, their moves, and what ended ranks mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sky.core.failures import FIRST_MEMORY_GIB, MAX_BACKOFF_S, backoff_s, out_of_memory
from areal_sky.core.model import Bundle
from areal_sky.core.stopwatch import Stopwatch
from areal_sky.core.taskevents import (
    Checkpointed,
    Draining,
    Ended,
    Fact,
    NodeAvoided,
    PhaseChanged,
    Place,
    Placed,
    RankExited,
    Requeued,
    Started,
    Starting,
    Stopping,
    Submitted,
    TaskEvent,
    Warned,
    tell,
    where,
)
from areal_sky.core.tasklife import TaskRecord, fold
from areal_sky.core.taskmodel import BACKOFF_S, TaskSpec, TaskState
from areal_sky.core.taskspec import task_spec_from_json, task_spec_to_json
from areal_sky.core.taskverdict import SETTLE_S, SILENT_S, Verdict, Wait, overdue, verdict
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


def judged(r: TaskRecord, dead: set[str] | None = None, now_s: float = 100.0) -> Verdict:
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
    assert judged(both) == Requeued("why; retry 1 of 1", True, not_before_s=100 + BACKOFF_S)
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


STOPS = ("cancel", "evict", "lost", "failed", "timeout", "expired", "preempt", "regrow")
exits = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from([0, 1, -9, -15, 137, None])), max_size=2, unique_by=lambda e: e[0]
)


@given(exits, st.sets(st.sampled_from(["n0", "n1"])), st.sampled_from([None, *STOPS]))
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


def test_a_run_that_takes_too_long_is_stopped_and_counts() -> None:
    spec = replace(SPEC, timeout_s=60.0)
    r = replace(record(), spec=spec)  # started at 3 s
    assert overdue(r, 60, 60) is None
    stop = overdue(r, 61, 61)
    assert stop == Stopping("timeout", "ran longer than 1m (timeout)")
    stopped = replace(record(Stopping("timeout", "x"), RankExited(0, 0), RankExited(1, -15)), spec=spec)
    assert overdue(stopped, 1e6, 1e6) is None
    assert judged(stopped) == Requeued("x; retry 1 of 1", True, not_before_s=100 + BACKOFF_S)
    assert judged(replace(stopped, retries=1)) == Ended(TaskState.FAILED, "x")


def test_the_time_of_all_runs_together_has_an_end() -> None:
    r = replace(record(), spec=replace(SPEC, total_timeout_s=60.0))
    stop = overdue(r, 1, 61)
    assert isinstance(stop, Stopping) and stop.kind == "expired"
    assert overdue(replace(r, stop="cancel", stop_s=5.0), 1, 61) is None
    over = record(Stopping("expired", "too long"), RankExited(0, -15), RankExited(1, -15))
    assert judged(over) == Ended(TaskState.FAILED, "too long")
    waits = replace(record(Stopping("lost", "x"), Requeued("x", False)), spec=r.spec)
    assert isinstance(overdue(waits, 0, 61), Ended)
    assert overdue(waits, 0, 60) is None


def test_time_is_measured_by_a_clock_that_does_not_jump() -> None:
    watch = Stopwatch()
    watch.look(100.0)
    assert watch.elapsed_s("t1", None, 1e9) == 0.0  # it has never started: no time has run
    assert watch.elapsed_s("t1", 1000.0, 1007.0) == 7.0
    watch.look(110.0)
    for wall_s in (1017.0, 0.0, 1e9):
        assert watch.elapsed_s("t1", 1000.0, wall_s) == 17.0
    watch.forget(["t1"])
    assert watch.elapsed_s("t1", 1000.0, 1002.0) == 2.0


def test_preemption_tells_what_was_lost_and_checkpoints_bound_it() -> None:
    gone = [RankExited(0, -15), RankExited(1, -15)]
    r = record(Stopping("preempt", "t9 goes first"), *gone)
    assert judged(r, now_s=123) == Requeued("t9 goes first; 2m of work lost", False)
    assert r.unsaved_s(123) == 120
    saved = record(Checkpointed(), Stopping("preempt", "t9 goes first"), *gone)  # saved at 4 s, running since 3 s
    assert saved.unsaved_s(10) == 6
    after = record(Checkpointed(), Stopping("preempt", "x"), *gone, Requeued("x", False))
    assert (after.preempted, after.served_s, after.lost_s, after.checkpoint_s, after.retries) == (1, 5, 4, None, 0)


def test_memory_that_ran_out_is_asked_for_next_time() -> None:
    gone = [RankExited(0, 1, oom="gpu"), Stopping("failed", "why"), RankExited(1, -15)]
    whole = judged(record(*gone))
    assert isinstance(whole, Requeued) and (whole.bundle, whole.accelerators) == (None, ())
    bigger = verdict(record(*gone), set(), 100.0, 10.0, ("H200",))
    assert isinstance(bigger, Requeued) and bigger.accelerators == ("H200",)
    assert bigger.reason == "why; out of GPU memory; retry 1 of 1"
    shared = replace(record(*gone), spec=replace(SPEC, bundle=Bundle(0.25, 1)))
    found = judged(shared)
    assert isinstance(found, Requeued) and found.bundle == Bundle(0.5, 1)
    host = record(RankExited(0, -9, "out of memory", oom="host"), Stopping("failed", "why"), RankExited(1, -15))
    found = judged(host)
    assert isinstance(found, Requeued) and found.bundle == Bundle(1, 1, FIRST_MEMORY_GIB)
    again = record(*gone, Requeued("x", True, 0.0, Bundle(0.5, 1), ("H200",)))
    assert (again.bundle, again.accelerators) == (Bundle(0.5, 1), ("H200",))
    assert again.spec == SPEC  # what was asked for stays as it was


def poisoned(*runs: tuple[str, int, str]) -> Verdict:
    """The verdict after runs that failed on (node, with code, with last words)."""
    facts: list[Fact] = [Submitted(1, replace(SPEC, bundles=1, max_retries=9))]
    for n, (node, code, tail) in enumerate(runs, 1):
        facts += [Placed(n, (Place(node, f"c-{node}", 0),)), Starting(), Started(), RankExited(0, code, tail=tail)]
        facts += [Stopping("failed", "why"), Requeued("why", True)]
    return judged(record(base=facts[:-1]))


def test_a_task_that_fails_alike_on_several_nodes_is_poison() -> None:
    alike = [("n0", 1, "KeyError: 'x' at 0x7f01, step 3"), ("n1", 1, "KeyError: 'x' at 0x7f22, step 5")]
    third = ("n0", 1, "KeyError: 'x' at 0x7f33, step 4")
    assert isinstance(poisoned(*alike), Requeued)
    end = poisoned(*alike, third)
    assert isinstance(end, Ended) and "3 runs on different nodes failed alike" in end.reason
    assert isinstance(poisoned(*alike, ("n0", 2, "KeyError")), Requeued)
    assert isinstance(poisoned(*alike, ("n0", 1, "OSError: disk full")), Requeued)
    assert isinstance(poisoned(*[("n0", 1, "KeyError")] * 3), Requeued)  # perhaps it is that node
    assert isinstance(poisoned(*[("n0", -9, ""), ("n1", -9, ""), ("n2", -9, "")]), Requeued)  # killed from outside


def test_the_wait_between_runs_doubles_and_is_bounded() -> None:
    assert [backoff_s(5, n) for n in (1, 2, 3, 8)] == [5, 10, 20, MAX_BACKOFF_S]
    assert backoff_s(5, 10**6) == MAX_BACKOFF_S
    assert backoff_s(0, 3) == 0


@pytest.mark.parametrize(
    ("code", "lost", "words", "found"),
    [
        (1, "", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "gpu"),
        (1, "", "RuntimeError: CUDA error: out of memory", "gpu"),
        (1, "", "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while", "gpu"),
        (1, "", "MemoryError", "host"),
        (-6, "", "terminate called after throwing an instance of 'std::bad_alloc'", "host"),
        (-9, "the kernel killed it: out of memory", "", "host"),
        (None, "Worker was killed due to the node running low on memory", "", "host"),
        (-9, "", "", ""),
        (1, "", "ValueError: memory must be positive", ""),
        (0, "", "CUDA out of memory (caught, batch halved)", ""),
    ],
)
def test_evidence_of_exhausted_memory(code: int | None, lost: str, words: str, found: str) -> None:
    assert out_of_memory(code, lost, words) == found


def test_every_fact_has_its_sentence() -> None:
    facts: list[Fact] = [
        *RUNNING, RankExited(0, 1), RankExited(0, None, "gone"), Stopping("cancel", "user"), Requeued("x", False),
        Warned("its deadline was 5 s ago"), Checkpointed(), PhaseChanged("eval", True),
        Requeued("y", True, 60.0, Bundle(1, 1, 8), ("H200",)), *(Stopping(kind, "why") for kind in STOPS),
        Ended(TaskState.FAILED, "y"), Draining("c-w-0", ("n0",), 1.0, "idle"), NodeAvoided("n0", "c-w-0/0", 9.0, "bad"),
    ]  # fmt: skip
    lines = [tell(TaskEvent(0.0, "t1", f)) for f in facts]
    assert all(lines)
    assert "attempt 1: placed on c-w-0/0, c-w-1/0" in lines
    told = next(line for line in lines if "H200" in line)
    assert "not before 60 s from now; asks for 1 GPU, 1 CPU, 8 GiB per rank from now on; only on H200" in told
    assert where((PLACES[0], PLACES[0], PLACES[1])) == "c-w-0/0 x2, c-w-1/0"


def test_a_spec_survives_the_wire() -> None:
    spec = TaskSpec(
        "eval", payload="cGF5", name="e", model="m", model_type="moe", bundles=3, bundle=Bundle(0.25, 0.5, 1.5),
        priority=7.5, group="w", accelerators=("H100", "L40S"), envs={"A": "b=c\n"}, max_retries=2, deadline_s=5.0,
        submit_key="k", min_bundles=2, preemptible=False, estimate_s=60.0, if_late="refuse", after=("t1", "t3..t9"),
        backoff_s=1.0, timeout_s=60.0, total_timeout_s=90.0, labels={"team/x": "a b"}, array=5, array_index=4,
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
        ({"kind": "train", "command": "x", "min_bundles": 3}, "min_bundles: 3 is above bundles 1"),
        ({"kind": "train", "command": "x", "preemptible": "no"}, "preemptible: expected true or false"),
        ({"kind": "train", "command": "x", "if_late": "maybe"}, "if_late: 'maybe' is neither warn nor refuse"),
        ({"kind": "train", "command": "x", "after": "t1"}, "after: expected a list of names"),
        ({"kind": "train", "command": "x", "after": [""]}, "after: expected a list of names"),
        ({"kind": "train", "command": "x", "array": 0}, "array: 0 is not between 1 and 100000"),
        ({"kind": "train", "command": "x", "array": 10**6}, "array: 1e+06 is not between"),
        ({"kind": "train", "command": "x", "timeout_s": 0}, "timeout_s: 0 is not between 1 and"),
        ({"kind": "train", "command": "x", "total_timeout_s": float("nan")}, "total_timeout_s: expected a number"),
        ({"kind": "train", "command": "x", "backoff_s": -1}, "backoff_s: -1 is not between"),
        ({"kind": "train", "command": "x", "labels": {"-": "x"}}, "'-' is no label"),
        ({"kind": "train", "command": "x", "labels": {"a": 1}}, "labels.a: expected a text"),
        ({"kind": "train", "command": "x", "bundle": {"gpus": float("nan")}}, "gpus: expected a number"),
        ({"kind": "train", "command": "x", "bundle": {"gpus": -1}}, "gpus: -1 is not between"),
        ({"kind": "train", "command": "x", "bundle": {"gpus": 1e9}}, "gpus: 1e+09 is not between 0 and 1024"),
        ([], "must be a JSON object"),
    ],
)
def test_wrong_specs_are_refused_in_words(raw: object, words: str) -> None:
    with pytest.raises(InvalidInput) as e:
        task_spec_from_json(raw)
    assert words in str(e.value)
