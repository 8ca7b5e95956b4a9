"""Who is first in line is not delayed by those behind it, and nobody starves."""

from __future__ import annotations

import heapq
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from areal_sky.core.admission import Admission, Entry, Place
from areal_sky.core.gangs import Ask
from areal_sky.core.model import Bundle, NodeShape
from areal_sky.core.queueing import WeightedOrder
from areal_sky.core.room import empty_room

GPU4 = NodeShape(gpus=4, cpus=16, memory_gib=64, accelerator="H100")


def task(number: int, gpus: float, priority: float = 5, count: int = 1, **more: object) -> Entry:
    return Entry(f"t{number}", number, Ask(Bundle(gpus, 1), count), 0.0, priority, **more)  # type: ignore[arg-type]


def cluster(nodes: int, patience_s: float = 300.0) -> Admission:
    admission = Admission(patience_s=patience_s)
    for i in range(nodes):
        admission.set_node(empty_room(f"n{i}", "w", GPU4, f"n{i}"))
    return admission


def started(admission: Admission, now_s: float) -> list[str]:
    return [d.task_id for d in admission.decide(now_s) if isinstance(d, Place)]


def busy() -> Admission:
    """n0: 2 GPUs until 1,000 s. n1: 2 GPUs until 5,000 s. t3 needs 4 and is first in line."""
    admission = cluster(2)
    admission.submit(task(1, 3, estimate_s=1000.0))
    admission.submit(task(2, 3, estimate_s=5000.0))
    assert started(admission, 0) == ["t1", "t2"]
    admission.submit(task(3, 4, 9))
    assert started(admission, 10) == []
    return admission


def test_the_start_of_the_first_in_line_is_known_from_expected_ends() -> None:
    admission = busy()
    reservation = admission.reservation("t3")
    assert reservation is not None
    assert (reservation.node_ids, reservation.start_s) == (("n0",), 1000.0)
    assert "1 node is reserved for it from about 990 s from now" in admission.why("t3")


def test_what_ends_in_time_may_use_reserved_nodes_others_only_free_ones() -> None:
    admission = busy()
    admission.submit(task(4, 1))  # nobody knows how long
    admission.submit(task(5, 1, estimate_s=900.0))  # until 1,320 s at most: lengths are known roughly
    admission.submit(task(6, 1, estimate_s=60.0))
    assert started(admission, 300) == ["t4", "t6"]
    placement = admission.placement("t4")
    assert placement is not None and placement.node_ids == ("n1",)
    admission.ended("t1", 1000)
    admission.ended("t6", 1000)
    assert started(admission, 1000) == ["t3"]


def test_a_reservation_ends_with_its_task() -> None:
    admission = busy()
    admission.submit(task(4, 1))
    admission.submit(task(5, 1))
    assert started(admission, 300) == ["t4"]
    assert "reserved for tasks before it" in admission.why("t5")
    admission.ended("t3", 310)
    assert started(admission, 310) == ["t5"]


def test_nodes_are_kept_free_after_some_patience_when_no_end_is_known() -> None:
    admission = cluster(1)
    admission.submit(task(1, 3))
    assert started(admission, 0) == ["t1"]
    admission.submit(task(2, 4, 9))
    admission.submit(task(3, 1))
    assert started(admission, 299) == ["t3"]
    admission.ended("t3", 305)
    admission.submit(task(4, 1))
    assert started(admission, 305) == []
    admission.ended("t1", 400)
    assert started(admission, 400) == ["t2"]


stream = st.lists(
    st.tuples(st.integers(0, 400), st.sampled_from([1, 2, 4]), st.sampled_from([1, 1, 2]), st.integers(10, 300)),
    min_size=30,
    max_size=60,
)


def finish(admission: Admission, arrivals: list[Entry], lengths: dict[str, float]) -> dict[str, float]:
    """Plays the stream to its end; when each task started."""
    starts: dict[str, float] = {}
    events: list[tuple[float, int, str]] = [(e.submitted_s, 0, e.task_id) for e in arrivals]
    entries = {e.task_id: e for e in arrivals}
    heapq.heapify(events)
    while events:
        now_s = events[0][0]
        while events and events[0][0] == now_s:
            _, what, task_id = heapq.heappop(events)
            if what == 0:
                admission.submit(entries[task_id])
            elif what == 1:
                admission.ended(task_id, now_s)
        for d in admission.decide(now_s):
            assert isinstance(d, Place)
            starts[d.task_id] = now_s
            heapq.heappush(events, (now_s + lengths[d.task_id], 1, d.task_id))
        if not events and admission.waiting_ids:
            heapq.heappush(events, (now_s + 300.0, 2, ""))  # only patience can be what is waited for
    return starts


@given(stream, st.sampled_from([1.0, 60.0]), st.booleans())
@settings(deadline=None, max_examples=60)
def test_no_task_starves(raw: list[tuple[int, int, int, int]], rate: float, known: bool) -> None:
    """The bound that the parameters imply. A task T of the lowest rank, as large as the cluster, in a stream of higher
    ones: (a) none submitted later than `overtaken_for_s` after T goes before T, except in T's shadow (backfill with a
    known end before T's start); (b) from when T is first in line, it starts as soon as what runs has ended, the
    patience of the reservation later at most.
    """
    order = WeightedOrder(ageing_per_hour=rate * 60)
    patience_s = 30.0
    admission = Admission(order, patience_s=patience_s)
    for i in range(2):
        admission.set_node(empty_room(f"n{i}", "w", GPU4, f"n{i}"))
    victim = Entry("victim", 1, Ask(Bundle(4, 1), 2), 50.0, 0.0, estimate_s=100.0 if known else None)
    arrivals, lengths = [victim], {"victim": 100.0}
    for n, (at_s, gpus, count, length_s) in enumerate(sorted(raw), 2):
        entry = Entry(
            f"t{n}", n, Ask(Bundle(gpus, 1), count), float(at_s), 10.0, estimate_s=float(length_s) if known else None
        )
        arrivals.append(entry)
        lengths[entry.task_id] = float(length_s)
    starts = finish(admission, arrivals, lengths)
    assert set(starts) == set(lengths)  # everybody ran
    bound_s = victim.submitted_s + order.overtaken_for_s(victim, 10.0 * 1.2)
    late = [e for e in arrivals if e.submitted_s > bound_s and starts[e.task_id] < starts["victim"]]
    longest_s = max(lengths.values())
    for e in late:
        if known:
            assert starts[e.task_id] + lengths[e.task_id] <= starts["victim"]
    # All that may run before the victim: what was submitted until then. They take at most the sum of their lengths,
    # then the last of them ends, and the reservation has kept all room for the victim.
    before_s = sum(lengths[e.task_id] for e in arrivals if e.submitted_s <= bound_s and e is not victim)
    first_in_line_s = min(bound_s, max(e.submitted_s for e in arrivals)) + before_s
    assert starts["victim"] <= first_in_line_s + patience_s + 300.0 + longest_s
    assert starts["victim"] < inf
