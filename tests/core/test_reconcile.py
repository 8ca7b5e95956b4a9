from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import PATIENCE, World, group, plan

from areal_sky.core import reconcile
from areal_sky.core.events import (
    DownRequested,
    LaunchAccepted,
    LaunchIntended,
    ReplicaGone,
    ReplicaLost,
    ReplicaNoted,
    TerminateIntended,
    decode,
    encode,
    fold,
)  # fmt: skip
from areal_sky.core.lifecycle import MOVES, move
from areal_sky.core.model import MOST_FAULTS, Machine, MachineState, Replica, ReplicaState
from areal_sky.errors import StateError


def started(*groups: object, **sizes: int) -> World:
    world = World(plan(*groups))  # type: ignore[arg-type]
    world.want("head", 1, "spec")
    for name, size in (sizes or {"rollout": 1}).items():
        world.want(name, size, "spec")
    world.settle(10)
    return world


def test_brings_up_what_is_wanted_head_first() -> None:
    world = started(rollout=2)
    assert world.launches == ["c-head-0", "c-rollout-0", "c-rollout-1"]
    assert world.ready("head") == ["c-head-0"]
    assert world.ready("rollout") == ["c-rollout-0", "c-rollout-1"]
    assert world.tick() == []  # fixed point


def test_intent_is_recorded_before_the_launch() -> None:
    world = started(rollout=1)
    kinds = [(type(r.event), getattr(r.event, "replica", "")) for r in world.records]
    assert kinds.index((LaunchIntended, "c-rollout-0")) < kinds.index((LaunchAccepted, "c-rollout-0"))


def test_crash_between_intent_and_launch_launches_once() -> None:
    world = World(plan())
    world.want("head", 1, "spec")
    world.want("rollout", 1, "spec")
    seen = reconcile.Observation({}, None, {})
    world.record(*reconcile.decide(world.state, world.plan, seen, 0.0, PATIENCE))
    world.settle(5)  # as a new controller would go on
    assert sorted(world.launches) == ["c-head-0", "c-rollout-0"]


def test_crash_between_launch_and_record_adopts() -> None:
    world = World(plan())
    world.want("head", 1, "spec")
    world.want("rollout", 1, "spec")
    seen = reconcile.Observation({}, None, {})
    world.record(*reconcile.decide(world.state, world.plan, seen, 0.0, PATIENCE))
    world.machines["c-rollout-0"] = Machine("c-rollout-0", MachineState.UP, 1)
    world.settle(5)
    assert world.launches == ["c-head-0"]
    assert LaunchAccepted("c-rollout-0", "", adopted=True) in [r.event for r in world.records]
    assert world.ready("rollout") == ["c-rollout-0"]


def test_lost_replica_is_replaced_at_once_in_a_free_slot() -> None:
    world = started(rollout=2)
    del world.machines["c-rollout-0"]
    events = [type(e).__name__ for _ in range(10) for e in world.tick()]
    assert events[:3] == ["ReplicaLost", "TerminateIntended", "LaunchIntended"]
    assert sorted(world.ready("rollout")) == ["c-rollout-1", "c-rollout-2"]
    assert "c-rollout-0" not in world.state.replicas


def test_lost_head_is_replaced_under_its_own_name() -> None:
    world = started(rollout=1)
    del world.machines["c-head-0"]
    world.settle(10)
    assert world.ready("head") == ["c-head-0"]
    assert world.launches.count("c-head-0") == 2 and "c-head-1" not in world.launches


def test_node_that_ray_misses_is_lost_only_after_patience() -> None:
    world = started(group("rollout", nodes=2), rollout=1)
    world.refuse.add("c-rollout-0")
    assert [e for _ in range(4) for e in world.tick()] == []
    assert "ReplicaLost" in [type(e).__name__ for _ in range(4) for e in world.tick()]


def test_the_clouds_word_alone_ends_nothing_that_works() -> None:
    world = started(rollout=1)
    world.machines["c-rollout-0"] = Machine("c-rollout-0", MachineState.FAILED, 1, "sick, it says")
    assert [e for _ in range(9) for e in world.tick()] == []
    world.refuse.add("c-rollout-0")  # Ray misses it too
    assert world.tick()[0] == ReplicaLost("c-rollout-0", "sick, it says")


def test_an_adopted_launch_keeps_the_request_of_before() -> None:
    world = World(plan())
    world.want("head", 1, "spec")
    seen = reconcile.Observation({}, None, {})
    world.record(*reconcile.decide(world.state, world.plan, seen, 0.0, PATIENCE))
    world.machines["c-head-0"] = Machine("c-head-0", MachineState.STARTING, 0, request_id="r7", note="queued")
    assert world.tick()[0] == LaunchAccepted("c-head-0", "r7", adopted=True)
    assert world.state.replicas["c-head-0"].request_id == "r7"
    assert world.tick() == [ReplicaNoted("c-head-0", "queued")] and world.tick() == []


def test_a_teardown_that_fails_says_why_until_it_is_confirmed() -> None:
    world = started(rollout=1)
    world.want("rollout", 0)
    world.settle(1)
    stuck = Machine("c-rollout-0", MachineState.STOPPING, 1, error="no credentials")
    world.record(TerminateIntended("c-rollout-0", "test"))
    world.machines["c-rollout-0"] = stuck
    seen = reconcile.Observation(dict(world.machines), world.view(), {})
    (event,) = reconcile.observe(world.state, seen, world.now_s, PATIENCE)
    world.record(event)
    assert world.state.replicas["c-rollout-0"].note == "no credentials"
    assert reconcile.observe(world.state, seen, world.now_s, PATIENCE) == []
    assert reconcile.Terminate("c-rollout-0") in reconcile.todo(world.state)
    seen = reconcile.Observation({}, None, {})
    assert ReplicaGone("c-rollout-0") in reconcile.observe(world.state, seen, world.now_s, PATIENCE)


def test_what_misses_ray_nodes_or_is_slow_to_join_is_doubted() -> None:
    world = started(rollout=1)
    assert reconcile.doubtful(world.state, {}, world.now_s) == ()
    assert reconcile.doubtful(world.state, {"c-rollout-0": 1.0}, world.now_s) == ("c-rollout-0",)
    world = World(plan())
    world.want("rollout", 1, "spec")
    world.refuse.add("c-rollout-0")
    world.settle(4)
    assert reconcile.doubtful(world.state, {}, world.now_s) == ()
    assert reconcile.doubtful(world.state, {}, world.now_s + reconcile.SLOW_JOIN_S) == ("c-rollout-0",)


def test_silent_head_proves_nothing() -> None:
    world = started(rollout=1)
    seen = reconcile.Observation(dict(world.machines), None, {})
    assert reconcile.observe(world.state, seen, 1e6, PATIENCE) == []


def test_shrink_drains_first_and_waits_for_work() -> None:
    world = started(rollout=2)
    world.running = {"c-rollout-1": 1}
    world.want("rollout", 1)
    world.record(
        *reconcile.decide(
            world.state, world.plan, reconcile.Observation(world.machines, world.view(), {}), world.now_s, PATIENCE
        )
    )
    draining = [r.name for r in world.state.replicas.values() if r.state is ReplicaState.DRAINING]
    assert draining == ["c-rollout-1"]  # no idle time known: the highest slot goes
    for _ in range(10):
        world.tick()
    assert "c-rollout-1" in world.state.replicas
    world.running = {}
    world.settle(4)
    assert "c-rollout-1" not in world.state.replicas


def test_drain_deadline_ends_the_wait() -> None:
    world = started(rollout=1)
    world.running = {"c-rollout-0": 1}
    world.want("rollout", 0)
    world.settle(int(PATIENCE.drain_s) + 3)
    assert world.ready("rollout") == [] and "c-rollout-0" not in world.machines


def test_named_victims_go_first() -> None:
    world = started(rollout=3)
    world.record(reconcile_desired(2, ("c-rollout-0",)))
    world.settle(5)
    assert sorted(world.ready("rollout")) == ["c-rollout-1", "c-rollout-2"]


def reconcile_desired(desired: int, victims: tuple[str, ...]):  # type: ignore[no-untyped-def]
    from areal_sky.core.events import GroupDesired

    return GroupDesired("rollout", desired, "idle", "policy", victims)


def test_a_group_whose_launches_always_fail_is_given_up_until_somebody_asks_again() -> None:
    world = started(rollout=0)
    world.refuse.add("c-rollout-0")
    world.want("rollout", 1)
    tried = [e for _ in range(4000) for e in world.tick() if isinstance(e, LaunchIntended)]
    assert len(tried) == MOST_FAULTS and world.state.groups["rollout"].given_up
    world.refuse.clear()
    world.want("rollout", 1, "policy")
    world.settle(100)
    assert not world.ready("rollout"), "a policy is nobody who has mended it"
    world.want("rollout", 1, "user")
    world.settle(100)
    assert world.ready("rollout") == ["c-rollout-0"] and not world.state.groups["rollout"].given_up


def test_failed_launch_is_cleaned_up_and_retried_with_backoff() -> None:
    world = started(rollout=0)
    world.refuse.add("c-rollout-0")
    world.want("rollout", 1)
    tried: list[float] = []
    while len(tried) < MOST_FAULTS - 1:
        tried += [world.now_s for e in world.tick() if isinstance(e, LaunchIntended)]
    waits = [b - a for a, b in pairwise(tried)]
    assert waits == sorted(waits), "each wait is at least as long as the one before"
    world.refuse.clear()
    world.settle(100)
    assert world.ready("rollout") == ["c-rollout-0"]
    assert world.state.groups["rollout"].failures == 0


def test_mixed_group_fills_on_demand_base_first() -> None:
    world = started(group("rollout", 0, 3, market="mixed", base=1), rollout=3)
    assert sorted(r.market for r in world.state.replicas.values() if r.group == "rollout") == [
        "on_demand", "spot", "spot",
    ]  # fmt: skip


def test_down_ends_everything_head_last_and_closes_the_ledger() -> None:
    world = started(rollout=2)
    world.record(DownRequested("asked for", 5.0))
    gone: list[str] = []
    for _ in range(20):
        gone += [e.replica for e in world.tick() if type(e).__name__ == "ReplicaGone"]  # type: ignore[attr-defined]
    assert gone[-1] == "c-head-0" and len(gone) == 3
    assert world.state.down_s is not None and world.machines == {}
    assert all(x.until_s is not None for x in world.state.ledger)


def test_down_while_launching_leaves_nothing() -> None:
    world = World(plan())
    world.want("head", 1, "spec")
    world.want("rollout", 3, "spec")
    world.tick()
    world.record(DownRequested("asked for", 0.0))
    world.settle(20)
    assert world.machines == {} and world.state.down_s is not None


def test_illegal_move_tells_the_story() -> None:
    replica = Replica("c-x-0", "x", 0, ReplicaState.TERMINATED, 0.0, 1, "spot", None)
    with pytest.raises(StateError, match="c-x-0: illegal move TERMINATED -> READY"):
        move(replica, ReplicaState.READY, 1.0)


def test_every_state_but_the_last_leads_to_termination() -> None:
    for state in set(ReplicaState) - {ReplicaState.TERMINATED, ReplicaState.TERMINATING}:
        assert (state, ReplicaState.TERMINATING) in MOVES, state


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("want"), st.integers(0, 3)),
        st.tuples(st.just("lose"), st.integers(0, 2)),
        st.tuples(st.just("block"), st.integers(0, 2)),
        st.tuples(st.just("tick"), st.integers(1, 30)),
        st.tuples(st.just("down"), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_any_history_reaches_its_fixed_point(steps: list[tuple[str, int]]) -> None:
    world = World(plan(group("rollout", 0, 3), group("trainer", 1, 1, nodes=2)))
    world.want("head", 1, "spec")
    world.want("trainer", 1, "spec")
    world.want("rollout", 1, "spec")
    for what, n in steps:
        if what == "want":
            world.want("rollout", n)
        elif what == "lose":
            world.machines.pop(f"c-rollout-{n}", None)
        elif what == "block":
            world.refuse.symmetric_difference_update({f"c-rollout-{n}"})
        elif what == "tick":
            world.settle(n)
        elif world.state.down_requested_s is None:
            world.record(DownRequested("asked for", 3.0))
        assert len(world.machines) <= 1 + 1 + 6
    world.refuse.clear()
    world.settle(250)
    if world.state.down_requested_s is not None:
        assert world.state.down_s is not None and world.machines == {} and world.state.replicas == {}
    else:
        assert len(world.ready("rollout")) == world.state.groups["rollout"].desired
        assert len(world.machines) == len(world.state.replicas)
        assert world.ready("trainer") == ["c-trainer-0"]
    assert world.tick() == []
    # The fold is deterministic, in one go or through the wire format.
    assert fold(world.records) == world.state
    again = [type(r)(r.seq, r.t_s, decode(*encode(r.event))) for r in world.records]
    assert fold(again) == world.state
    # Every paid second belongs to exactly one line per replica at a time.
    for name in {x.replica for x in world.state.ledger}:
        lines = [x for x in world.state.ledger if x.replica == name]
        assert all(a.until_s is not None and a.until_s <= b.from_s for a, b in pairwise(lines))
