"""Elastic gangs get their bundles back: when nobody waits, soon after a checkpoint, and not for ever in turn."""

from __future__ import annotations

import pytest

from areal_sky.core.admission import Admission, Decision, Entry, Place, Pool, Regrow
from areal_sky.core.gangs import Ask
from areal_sky.core.model import Bundle, NodeShape
from areal_sky.core.regrowth import LEAST_RUN_S, MOST_LOST_S, SEARCH_EVERY_S
from areal_sky.core.room import empty_room

GPU4 = NodeShape(gpus=4, cpus=16, memory_gib=64, accelerator="H100")
LATER_S = LEAST_RUN_S + 100.0


def task(number: int, count: int = 1, min_bundles: int = 0, **more: object) -> Entry:
    return Entry(f"t{number}", number, Ask(Bundle(1, 1), count), 0.0, preemptible=True, min_bundles=min_bundles, **more)  # type: ignore


def small_gang(pools: tuple[Pool, ...] = (), **more: object) -> Admission:
    """t1 runs with 2 of its 4 bundles, as t2 had the other 2 and has ended."""
    admission = Admission(pools=pools)
    admission.set_node(empty_room("n0", "w", GPU4, "n0"))
    admission.submit(task(2, 2))
    admission.decide(0)
    admission.submit(task(1, 4, min_bundles=2, **more))
    admission.decide(0)
    assert bundles(admission) == 2
    admission.ended("t2", 10)
    admission.decide(10)
    return admission


def bundles(admission: Admission) -> int:
    placement = admission.placement("t1")
    return len(placement.node_ids) if placement is not None else 0


def told(decisions: list[Decision]) -> list[str]:
    return [d.task_id for d in decisions if isinstance(d, Regrow)]


def test_it_starts_anew_with_all_its_bundles_soon_after_a_checkpoint() -> None:
    admission = small_gang()
    assert admission.decide(LATER_S) == []  # it would lose all that it has done
    admission.progress("t1", LATER_S + 100)
    decided = admission.decide(LATER_S + 110)
    assert told(decided) == ["t1"]
    assert isinstance(decided[0], Regrow) and "with 4 bundles instead of 2" in decided[0].reason
    assert "its checkpoint is 10 s old" in decided[0].reason
    assert admission.decide(LATER_S + 120) == []  # it has been told
    admission.requeue("t1", LATER_S, LATER_S + 130)
    placed = admission.decide(LATER_S + 130)
    assert [d.task_id for d in placed if isinstance(d, Place)] == ["t1"] and bundles(admission) == 4
    admission.progress("t1", LATER_S + 1000)
    assert admission.decide(LATER_S + 1001) == []  # it has all of them


@pytest.mark.parametrize("run_s, lost_s", [(LEAST_RUN_S - 1, 0), (LATER_S, MOST_LOST_S + 1)])
def test_not_before_it_has_run_for_a_while_nor_with_an_old_checkpoint(run_s: float, lost_s: float) -> None:
    admission = small_gang()
    admission.progress("t1", run_s - lost_s)
    assert admission.decide(run_s) == []
    admission.progress("t1", LATER_S + 50)
    assert told(admission.decide(LATER_S + 50)) == ["t1"]


def test_not_while_anybody_waits_nor_without_room_for_all_that_is_missing() -> None:
    admission = small_gang()
    admission.submit(task(3, 8))
    admission.progress("t1", LATER_S)
    assert told(admission.decide(LATER_S)) == []
    admission.ended("t3", LATER_S, finished=False)
    admission.submit(task(4, 1))
    admission.decide(LATER_S + SEARCH_EVERY_S)
    assert told(admission.decide(LATER_S + 2 * SEARCH_EVERY_S)) == []
    admission.ended("t4", LATER_S + 20)
    assert told(admission.decide(LATER_S + 20)) == ["t1"]


def test_a_gang_that_gave_ranks_up_for_its_own_sake_stays_small_in_this_run() -> None:
    admission = small_gang()
    admission.shrunk("t1", [], 20)  # nothing has asked for it: its straggler has gone
    admission.progress("t1", LATER_S)
    assert admission.decide(LATER_S) == []
    admission.requeue("t1", LATER_S, LATER_S + 10)
    admission.decide(LATER_S + 10)
    assert bundles(admission) == 4


def test_a_pool_at_its_limit_gets_no_more() -> None:
    admission = small_gang((Pool("moe", 2, 2),), pool="moe")
    admission.progress("t1", LATER_S)
    assert admission.decide(LATER_S) == []
