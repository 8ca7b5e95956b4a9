from __future__ import annotations

from areal_sky.core.model import Bundle
from areal_sky.core.taskevents import (
    Draining,
    Ended,
    Fact,
    Place,
    Placed,
    Requeued,
    Started,
    Starting,
    Submitted,
    TaskEvent,
)
from areal_sky.core.tasklife import fold
from areal_sky.core.taskmodel import TaskSpec, TaskState
from areal_sky.core.usage import Hold, Usage, holds, merge, past_holds, usage_from_json, usage_to_json

SPEC = TaskSpec("train", command="x", name="grpo", bundles=3, bundle=Bundle(2, 4))
PLACES = (Place("n0", "c-w-0", 0, (), 8, 16), Place("n0", "c-w-0", 0, (), 8, 16), Place("n1", "c-w-1", 0, (), 8, 16))


def journal(*facts: Fact) -> list[TaskEvent]:
    rows = [TaskEvent(float(i), "" if isinstance(f, Draining) else "t1", f) for i, f in enumerate(facts)]
    return [TaskEvent.from_row(*e.to_row()) for e in rows]


def hold(replica: str, gpus: float, start: float, end: float | None, attempt: int = 1) -> Hold:
    return Hold("t1", attempt, "grpo", "train", replica, 0, gpus, gpus * 2, 8, 16, start, end)


def test_ranks_on_one_node_are_one_hold_from_placement_to_release() -> None:
    events = journal(
        Submitted(1, SPEC), Placed(1, PLACES), Starting(), Started(), Draining("c-w-0", ("n0",), 9.0, "why"),
        Requeued("why", False), Placed(2, PLACES[2:]), Starting(), Started(), Ended(TaskState.SUCCEEDED),
    )  # fmt: skip
    assert past_holds(events) == [
        hold("c-w-0", 4, 1.0, 5.0), hold("c-w-1", 2, 1.0, 5.0), hold("c-w-1", 2, 6.0, 9.0, attempt=2)
    ]  # fmt: skip


def test_what_still_runs_is_open_and_what_waits_holds_nothing() -> None:
    events = journal(Submitted(1, SPEC), Placed(1, PLACES), Starting(), Started())
    assert past_holds(events) == []
    record = fold(events)[0]["t1"]
    assert holds(record, None) == (hold("c-w-0", 4, 1.0, None), hold("c-w-1", 2, 1.0, None))
    assert holds(fold(events[:1])[0]["t1"], None) == ()


def test_a_journal_of_an_earlier_version_has_no_node_sizes() -> None:
    row = TaskEvent(1.0, "t1", Placed(1, PLACES[:1])).to_row()
    old = row[3].replace(',"node_gpus":8,"node_cpus":16', "")
    assert "node_gpus" not in old
    assert TaskEvent.from_row(*row[:3], old).fact == Placed(1, (Place("n0", "c-w-0", 0),))


def test_answers_merge_by_hold() -> None:
    first = Usage(10.0, (hold("c-w-0", 4, 1.0, 5.0), hold("c-w-1", 2, 6.0, None)))
    second = Usage(20.0, (hold("c-w-1", 2, 6.0, 15.0), hold("c-w-0", 2, 16.0, None)))
    assert merge(Usage(), first) == first
    assert merge(first, second) == Usage(20.0, (first.holds[0], *second.holds))
    assert merge(second, second) == second


def test_a_head_that_lost_its_journal_ends_what_it_forgot_where_it_was_last_seen() -> None:
    before = Usage(10.0, (hold("c-w-0", 4, 1.0, None),))
    after = Usage(20.0, (hold("c-w-0", 4, 12.0, None),))  # again t1, again attempt 1
    assert merge(before, after).holds == (hold("c-w-0", 4, 1.0, 10.0), hold("c-w-0", 4, 12.0, None))


def test_json_there_and_back() -> None:
    usage = Usage(10.0, (hold("c-w-0", 4, 1.0, 5.0), hold("c-w-1", 2, 6.0, None)))
    assert usage_from_json(usage_to_json(usage)) == usage
