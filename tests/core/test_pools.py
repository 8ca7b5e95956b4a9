"""Pools: guarantees hold, limits hold, idle room is borrowed, lent and given back."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_sky.core.admission import Admission, Decision, Entry, Place, Pool, Preempt, Restore, Shrink
from areal_sky.core.gangs import Ask, Placement
from areal_sky.core.model import Bundle, NodeShape
from areal_sky.core.room import empty_room
from areal_sky.errors import InvalidInput

GPU4 = NodeShape(gpus=4, cpus=64, memory_gib=64, accelerator="H100")


def task(
    number: int, gpus: float, pool: str | None = None, priority: float = 5, count: int = 1, **more: object
) -> Entry:
    ask = Ask(Bundle(gpus, 1), count)
    return Entry(f"t{number}", number, ask, 0.0, priority, pool=pool, **{"preemptible": True, **more})  # type: ignore


def cluster(nodes: int, *pools: Pool, patience_s: float = inf) -> Admission:
    admission = Admission(pools=pools, patience_s=patience_s)
    for i in range(nodes):
        admission.set_node(empty_room(f"n{i}", "w", GPU4, f"n{i}"))
    return admission


def started(decisions: list[Decision]) -> list[str]:
    return [d.task_id for d in decisions if isinstance(d, Place)]


def victims(decisions: list[Decision]) -> list[str]:
    return [d.task_id for d in decisions if isinstance(d, Preempt)]


def test_a_pool_never_gets_more_than_its_limit() -> None:
    admission = cluster(2, Pool("a", 2, 3), Pool("b", 2, borrow=False))
    for n in range(1, 7):
        admission.submit(task(n, 1, "a" if n % 2 else "b"))
    admission.submit(task(7, 1, "a", 9))
    assert sorted(started(admission.decide(0))) == ["t1", "t2", "t3", "t4", "t7"]
    assert admission.why("t5") == "pool a may have 3 GPUs and uses 3"
    assert admission.why("t6") == "pool b may have 2 GPUs and uses 2"
    admission.ended("t7", 1)
    assert started(admission.decide(1)) == ["t5"]


def test_a_pool_at_its_limit_makes_room_for_its_better_task_among_its_own() -> None:
    admission = cluster(2, Pool("a", 2, 3), Pool("b", 2))
    for n, priority in ((1, 9), (2, 1), (3, 5)):
        admission.submit(task(n, 1, "a", priority))
    admission.submit(task(4, 1, "b", 1))
    admission.decide(0)
    admission.submit(task(5, 1, "a", 9))
    admission.submit(task(6, 1, "a", 8))
    assert victims(admission.decide(100)) == ["t2"]  # of its own pool; there is free room, but no more for pool a
    assert admission.decide(101) == []  # one at a time; and not before t2 has gone
    assert "t2 has ended" in admission.why("t5")
    admission.requeue("t2", 100, 110)
    decided = admission.decide(110)
    assert (started(decided), victims(decided)) == (["t5"], ["t3"])
    admission.ended("t3", 112)
    assert started(admission.decide(112)) == ["t6"]
    assert victims(admission.decide(200)) == []  # who waits now is no better than who runs


def test_a_gang_of_a_pool_at_its_limit_ends_as_many_as_it_needs_and_equals_none() -> None:
    admission = cluster(2, Pool("a", 4, 4))
    for n in range(1, 5):
        admission.submit(task(n, 1, "a", 1))
    admission.decide(0)
    admission.submit(task(5, 1, "a", 1, count=3))
    assert admission.decide(100) == []
    admission.submit(task(6, 1, "a", 9, count=3))
    assert victims(admission.decide(200)) == ["t1", "t2", "t3"]
    for n in (1, 2, 3):
        assert started(admission.decide(200 + n)) == []
        admission.ended(f"t{n}", 200 + n)
    assert started(admission.decide(210)) == ["t6"]


def test_an_elastic_gang_takes_what_its_pool_allows() -> None:
    admission = cluster(2, Pool("a", 2, 5))
    admission.submit(task(1, 1, "a", count=8, min_bundles=2))
    decided = admission.decide(0)
    assert isinstance(decided[0], Place) and len(decided[0].placement.node_ids) == 5


def test_a_guarantee_is_taken_back_from_borrowers_whatever_the_ranks() -> None:
    admission = cluster(1, Pool("a", 2), Pool("b", 2))
    for n in range(1, 5):
        admission.submit(task(n, 1, "b", priority=50))
    assert len(started(admission.decide(0))) == 4
    admission.submit(task(5, 2, "a", priority=1))
    ended = victims(admission.decide(10))
    assert len(ended) == 2
    for t in ended:
        admission.requeue(t, 10, 11)
    assert started(admission.decide(11)) == ["t5"]
    assert victims(admission.decide(20)) == []  # b has its guarantee and no more


def test_work_within_a_guarantee_is_not_preempted_by_rank() -> None:
    admission = cluster(1, Pool("a", 4))
    admission.submit(task(1, 4, "a", priority=1))
    admission.decide(0)
    admission.submit(task(2, 4, priority=99))
    assert admission.decide(10) == []
    admission.submit(task(3, 4, "a", priority=50))  # of the same pool: by rank
    assert victims(admission.decide(20)) == ["t1"]


def test_what_cannot_be_preempted_borrows_only_what_nobody_is_guaranteed() -> None:
    admission = cluster(2, Pool("a", 4), Pool("b", 2))
    for n in range(1, 6):
        admission.submit(task(n, 1, "b", preemptible=False))
    assert len(started(admission.decide(0))) == 4  # 2 of its own and the 2 that nobody is guaranteed
    assert "promised to other pools" in admission.why("t5")


def test_pools_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(InvalidInput) as e:
        Admission(pools=(Pool("a", -1), Pool("b", 5, 2), Pool("b")))
    assert str(e.value).count("pool") >= 3


def test_a_task_in_a_low_phase_lends_and_gets_back_first() -> None:
    admission = cluster(1)
    admission.submit(task(1, 1, count=4, preemptible=False))
    assert started(admission.decide(0)) == ["t1"]
    admission.lend("t1", (2, 3), 10)
    admission.submit(task(2, 1, priority=90))
    admission.submit(task(3, 1, priority=90, preemptible=False))  # could not be made to give back
    assert started(admission.decide(10)) == ["t2"]
    admission.take_back("t1", 20)
    admission.submit(task(4, 1, priority=99))
    assert victims(admission.decide(20)) == ["t2"]
    admission.requeue("t2", 10, 25)
    decided = admission.decide(25)
    assert [d.task_id for d in decided if isinstance(d, Restore)] == ["t1"]
    assert started(decided) == []
    placement = admission.placement("t1")
    assert placement is not None and len(placement.node_ids) == 4
    admission.ended("t1", 30)
    assert len(started(admission.decide(30))) == 3


def test_only_a_running_task_lends_only_what_it_has() -> None:
    admission = cluster(1)
    admission.submit(task(1, 1, count=2))
    with pytest.raises(InvalidInput, match="does not run"):
        admission.lend("t1", (0,), 0)
    admission.decide(0)
    with pytest.raises(InvalidInput, match="0 to 1"):
        admission.lend("t1", (2,), 0)
    admission.lend("t1", (1,), 0)
    with pytest.raises(InvalidInput, match="already"):
        admission.lend("t1", (0,), 0)
    admission.ended("t1", 1)
    admission.submit(task(2, 1, count=4, preemptible=False))
    assert started(admission.decide(1)) == ["t2"]  # nothing is left of the loan


POOLS = (Pool("a", 4, 6), Pool("b", 2, borrow=False))
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.tuples(
                st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0]), st.sampled_from([1, 1, 2, 5]),
                st.sampled_from([None, "a", "b"]), st.booleans(), st.sampled_from([0, 0, 1, 2]),
                st.sampled_from([None, 30.0, 500.0]),
                st.sampled_from(["train", "eval"]), st.sampled_from([None, 400.0]),
            ),
            st.integers(0, 20),
        ),
        st.tuples(st.just("end"), st.booleans(), st.integers(0, 50)),
        st.tuples(st.just("obey"), st.integers(1, 3), st.integers(0, 3)),
        st.tuples(st.just("node"), st.booleans(), st.integers(0, 3)),
        st.tuples(st.just("lend"), st.booleans(), st.integers(0, 50)),
        st.tuples(st.just("decide"), st.integers(-5, 60), st.just(0)),
    ),
    max_size=60,
)  # fmt: skip


class World:
    """Plays a history: victims end when they `obey`; keeps its own books of who holds what."""

    def __init__(self) -> None:
        self.admission = cluster(0, *POOLS, patience_s=50.0)
        self.now_s = 0.0
        self.entries: dict[str, Entry] = {}
        self.running: dict[str, Placement] = {}
        self.lent: dict[str, Placement] = {}
        self.orders: list[Preempt | Shrink] = []  # not obeyed yet
        self.nodes: set[str] = set()
        self.log: list[Decision] = []

    def play(self, what: str, a: object, b: int) -> None:
        admission = self.admission
        if what == "submit":
            gpus, count, pool, preemptible, least, estimate_s, kind, deadline_s = a  # type: ignore[misc]
            n = len(self.entries) + 1
            entry = Entry(
                f"t{n}", n, Ask(Bundle(gpus, 1), count), self.now_s, float(b), 1.0, kind, pool, deadline_s, estimate_s,
                preemptible, min(least, count), 5.0,
            )  # fmt: skip
            self.entries[entry.task_id] = entry
            admission.submit(entry)
        elif what == "end" and self.running:
            self.end(sorted(self.running)[b % len(self.running)], requeue=bool(a))
        elif what == "obey":
            now, self.orders = self.orders[: int(a)], self.orders[int(a) :]  # type: ignore[call-overload]
            for order in now:
                if isinstance(order, Preempt):
                    if order.task_id in self.running:
                        self.end(order.task_id, requeue=True)
                elif order.task_id in self.running:
                    admission.shrunk(order.task_id, order.ranks, self.now_s)
                    self.running[order.task_id] = admission.placement(order.task_id)  # type: ignore[assignment]
        elif what == "node":
            if a:
                admission.set_node(empty_room(f"n{b}", "w", GPU4, f"n{b}"))
                self.nodes.add(f"n{b}")
            else:
                admission.drop_node(f"n{b}")
                self.nodes.discard(f"n{b}")
        elif what == "lend" and self.running:
            task_id = sorted(self.running)[b % len(self.running)]
            busy = any(o.task_id == task_id for o in self.orders)
            if task_id in self.lent:
                admission.take_back(task_id, self.now_s)
            elif a and not busy and len(self.running[task_id].node_ids) > 1:
                try:
                    admission.lend(task_id, (1,), self.now_s)
                except InvalidInput:  # it is about to be ended
                    return
                self.lent[task_id] = self.running[task_id]
                self.running[task_id] = admission.placement(task_id)  # type: ignore[assignment]
        elif what == "decide":
            self.now_s += b if b else float(a)  # type: ignore[arg-type]
            self.decide()

    def end(self, task_id: str, *, requeue: bool) -> None:
        del self.running[task_id]
        self.lent.pop(task_id, None)
        self.orders = [o for o in self.orders if o.task_id != task_id]
        if requeue:
            self.admission.requeue(task_id, 1.0, self.now_s)
        else:
            self.admission.ended(task_id, self.now_s)

    def decide(self) -> None:
        for d in self.admission.decide(self.now_s):
            self.log.append(d)
            match d:
                case Place():
                    entry = self.entries[d.task_id]
                    assert d.task_id not in self.running
                    assert entry.least <= len(d.placement.node_ids) <= entry.ask.count
                    self.running[d.task_id] = d.placement
                case Restore():
                    self.running[d.task_id] = self.admission.placement(d.task_id)  # type: ignore[assignment]
                    del self.lent[d.task_id]
                case _:
                    victim = self.entries[d.task_id]
                    assert d.task_id in self.running
                    assert victim.preemptible
                    if isinstance(d, Shrink):
                        assert len(self.running[d.task_id].node_ids) - len(d.ranks) >= victim.least
                    self.orders.append(d)
        self.check()

    def check(self) -> None:
        use: dict[tuple[str, int], float] = {}
        pools: dict[str | None, float] = {}
        for task_id, placement in self.running.items():
            entry = self.entries[task_id]
            pools[entry.pool] = pools.get(entry.pool, 0.0) + entry.ask.bundle.gpus * len(placement.node_ids)
            for node_id, shares in zip(placement.node_ids, placement.devices, strict=True):
                for i, share in shares:
                    use[node_id, i] = use.get((node_id, i), 0.0) + share
        assert max(use.values(), default=0.0) <= 1 + 1e-9
        assert pools.get("a", 0.0) <= 6 + 1e-6
        assert pools.get("b", 0.0) <= 2 + 1e-6


@given(steps)
@settings(deadline=None, max_examples=150)
def test_random_histories_with_everything(history: list[tuple[str, object, int]]) -> None:
    world, twin = World(), World()
    for step in history:
        world.play(*step)
        twin.play(*step)
    assert world.log == twin.log
    # Whoever was promised room gets it once all victims have gone and while its nodes live.
    for n in range(4):
        world.play("node", True, n)
    world.play("decide", 0, 10)
    promised = {o.for_task for o in world.orders} - set(world.running)
    for _ in range(20):
        world.play("obey", 3, 0)
        if not world.orders:
            break
    for d in world.admission.decide(world.now_s):
        if isinstance(d, Place):
            world.running[d.task_id] = d.placement
    assert promised <= set(world.running)
    # And all room is free again when all is over.
    for _ in range(200):
        for task_id in sorted(world.running):
            world.end(task_id, requeue=False)
        world.now_s += 60.0
        world.decide()
        if not world.running and not world.orders:
            break
    assert all(room.free_gpus == 4 for room in world.admission.rooms())
