"""Which market a replica comes from: the base, spot that cannot be had, the way back, and no flapping."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import World, group, plan

from areal_sky.core import reconcile
from areal_sky.core.events import (
    DrainStarted,
    GroupDesired,
    LaunchFailed,
    LaunchIntended,
    apply,
    decode,
    encode,
    fold,
)
from areal_sky.core.market import MarketChoice, back_to_spot, market_for, victims, with_market
from areal_sky.core.model import ClusterState, GroupState, Machine, MachineState, Replica, ReplicaState, SpotPatience
from areal_sky.core.reconcile import Launch

PATIENCE = SpotPatience(give_up_s=60, hold_s=300)
MIXED = group("rollout", low=0, high=6, market="mixed", base=1)
SPOT = group("rollout", low=0, high=6, market="spot")


def state(since_s: float | None = None, last_s: float | None = None, market: str | None = None) -> GroupState:
    return GroupState("rollout", 2, 0.0, "", "user", market=market, spot_refused_since_s=since_s, spot_refused_s=last_s)


class SpotWorld(World):
    """A world where spot can be had only while `spot` says so; refusals come at the next look, as clouds give them."""

    spot = True

    def carry_out(self, action: reconcile.Action) -> None:
        super().carry_out(action)
        if isinstance(action, Launch) and self.state.replicas[action.replica].market == "spot" and not self.spot:
            self.machines[action.replica] = Machine(
                action.replica, MachineState.FAILED, 0, "none left in use1-az1", no_capacity=True
            )

    def markets(self, name: str = "rollout") -> list[str]:
        return sorted(r.market for r in self.state.replicas.values() if r.group == name and r.state == "READY")

    def launched(self) -> list[LaunchIntended]:
        return [r.event for r in self.records if isinstance(r.event, LaunchIntended) and r.event.group == "rollout"]


def world(size: int, g: Any = MIXED, spot: bool = True) -> SpotWorld:
    w = SpotWorld(replace(plan(g), spot=PATIENCE))
    w.spot = spot
    w.want("head", 1, "spec")
    w.want("rollout", size, "spec")
    w.settle(10)
    return w


# ---------------------------------------------------------------- the decision


@pytest.mark.parametrize(
    ("g", "wanted", "on_demand", "starting", "now_s", "market", "said"),
    [
        (MIXED, state(), 0, 0, 0, "on_demand", ""),
        (MIXED, state(), 1, 0, 0, "spot", ""),
        (SPOT, state(), 0, 0, 0, "spot", ""),
        (group("g"), state(), 0, 0, 0, "on_demand", ""),
        (replace(SPOT, spot_offer=None), state(), 0, 0, 0, "on_demand", ""),
        (SPOT, state(market="on_demand"), 0, 0, 0, "on_demand", ""),
        (MIXED, state(market="spot"), 0, 0, 0, "spot", ""),  # asked for by a person
        (SPOT, state(0, 30), 0, 0, 59, "spot", "refused for 59s, given up after 1m"),
        (SPOT, state(0, 30), 0, 0, 60, "on_demand", "spot was refused for 30s, last 30s ago; tried again every 5m"),
        (SPOT, state(0, 30), 0, 0, 329, "on_demand", "last 4m59s ago"),
        (SPOT, state(0, 30), 0, 0, 330, "spot", "tried again, last refused 5m ago"),
        (SPOT, state(0, 30), 0, 1, 330, "on_demand", ""),  # one try at a time
        (replace(SPOT, on_demand_offer=None), state(0, 30), 0, 0, 100, "spot", ""),  # nothing to fall back to
    ],
)
def test_the_market_of_the_next_replica(
    g: Any, wanted: GroupState, on_demand: int, starting: int, now_s: float, market: str, said: str
) -> None:
    choice = market_for(g, wanted, on_demand, starting, now_s, PATIENCE)
    assert choice.market == market and said in choice.reason
    assert choice.fallback is (market == "on_demand" and bool(choice.reason))


# ---------------------------------------------------------------- in the loop


def test_the_base_is_on_demand_and_the_rest_spot() -> None:
    assert world(3).markets() == ["on_demand", "spot", "spot"]


def test_spot_that_cannot_be_had_is_given_up_after_the_patience_and_not_before() -> None:
    w = world(2, spot=False)
    while not any(e.fallback for e in w.launched()) and w.now_s < 500:
        w.tick()
    first, last = w.launched()[0], w.launched()[-1]
    assert (first.market, last.market, last.fallback) == ("on_demand", "on_demand", True)
    assert "spot was refused" in last.reason and last.price_usd_per_hour == 10.0
    failed = [r.t_s for r in w.records if isinstance(r.event, LaunchFailed)]
    # Not a tick after the patience: the wait after failed spot launches does not hold up one on demand.
    assert failed[0] + PATIENCE.give_up_s <= w.now_s <= failed[0] + PATIENCE.give_up_s + 2
    w.settle(5)
    assert w.markets() == ["on_demand", "on_demand"]


def test_what_stands_in_for_spot_stays_within_the_budget() -> None:
    w = world(3, spot=False)
    w.plan = replace(w.plan, max_hourly_usd=35.0)  # the head, the base, and one of the two that spot lacks
    w.settle(300)
    assert w.markets() == ["on_demand", "on_demand"]
    assert sum((r.price_usd_per_hour or 0) * r.nodes for r in w.state.replicas.values()) <= 35.0
    assert w.launched()[-1].market == "spot" and "on demand would cost $10.00/h more" in w.launched()[-1].reason
    w.spot = True
    w.settle(2 * int(PATIENCE.hold_s))
    assert w.markets() == ["on_demand", "spot", "spot"]


def test_back_to_spot_one_at_a_time_after_the_hold_and_never_short() -> None:
    w = world(4, spot=False)
    w.settle(80)
    assert w.markets() == ["on_demand"] * 4
    w.spot = True
    fewest = 4
    for _ in range(4 * int(PATIENCE.hold_s)):
        events = w.tick()
        fewest = min(fewest, len(w.markets()))
        assert sum(isinstance(e, DrainStarted) for e in events) <= 1
    assert w.markets() == ["on_demand", "spot", "spot", "spot"]
    assert fewest == 4  # a replica leaves only once the one in its place is ready
    reasons = [e.reason for e in w.launched() if "back to spot" in e.reason]
    assert len(reasons) == 3 and "to replace c-rollout-" in reasons[0]
    drains = [r.event.reason for r in w.records if isinstance(r.event, DrainStarted)]
    assert len(drains) == 3 and all("spot can be had again" in d for d in drains)
    assert w.tick() == []


def test_a_try_that_is_refused_again_costs_nothing_but_the_hold() -> None:
    w = world(2, spot=False)
    w.settle(1500)
    tries = [e for e in w.launched() if "back to spot" in e.reason]
    assert w.markets() == ["on_demand", "on_demand"]
    assert 2 <= len(tries) <= 1500 / PATIENCE.hold_s


def test_a_fixed_group_at_work_is_not_replaced() -> None:
    w = world(1, replace(group("rollout", 1, 1, nodes=2, market="spot"), elastic=False), spot=False)
    w.settle(100)
    assert w.markets() == ["on_demand"]
    w.spot = True
    w.settle(700)
    assert w.markets() == ["on_demand"] and not any("back to" in e.reason for e in w.launched())


def test_a_launch_that_breaks_is_no_lack_of_spot() -> None:
    w = world(0)
    w.refuse |= {f"c-rollout-{n}" for n in range(20)}  # machines come up, Ray is never joined
    w.want("rollout", 2)
    w.settle(600)
    assert w.state.groups["rollout"].spot_refused_since_s is None
    assert not any(e.fallback for e in w.launched())


def test_who_goes_first_leaves_the_base_alone() -> None:
    def replica(slot: int, market: str, fallback: bool = False) -> Replica:
        return Replica(f"c-rollout-{slot}", "rollout", slot, ReplicaState.READY, 0.0, 1, market, 1.0, fallback=fallback)

    serving = [replica(0, "on_demand"), replica(1, "spot"), replica(2, "on_demand", True), replica(3, "spot")]
    assert [r.slot for r in victims(MIXED, serving, state(), None)] == [2, 3, 1, 0]
    named = replace(state(), victims=("c-rollout-1", "c-rollout-0"))
    assert [r.slot for r in victims(MIXED, serving, named, None)] == [1, 2, 3, 0]  # the base holds, whoever is named


def test_who_is_replaced_by_spot_and_when() -> None:
    def replica(slot: int, market: str, fallback: bool = False, state: ReplicaState = ReplicaState.READY) -> Replica:
        return Replica(
            f"c-rollout-{slot}", "rollout", slot, state, 0.0, 1, market, 1.0, ready_s=100.0, fallback=fallback
        )

    regular, stand_in, spot = replica(0, "on_demand"), replica(1, "on_demand", True), replica(2, "spot")
    later_s = 100 + PATIENCE.hold_s

    def why(*serving: Replica, now_s: float = later_s, wanted: GroupState | None = None) -> str:
        return back_to_spot(MIXED, wanted or state(), serving, now_s, PATIENCE)

    assert why(regular, stand_in) == "back to spot, to replace c-rollout-1"
    assert why(regular, stand_in, now_s=later_s - 1) == ""  # it has not served for the hold yet
    assert why(stand_in, spot) == ""  # it is the base now
    assert why(regular, replica(1, "on_demand"), spot) == ""  # somebody wanted it on demand
    assert why(regular, stand_in, replica(3, "spot", state=ReplicaState.REQUESTED)) == ""
    assert why(regular, stand_in, wanted=state(0, later_s - 10)) == ""  # refused a moment ago
    assert why(regular, stand_in, wanted=state(market="on_demand")) == ""


# ---------------------------------------------------------------- properties


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 400), st.booleans(), st.integers(0, 6)), min_size=1, max_size=8),
    st.sampled_from(["mixed", "spot"]),
)
def test_no_flapping_the_base_holds_and_a_replay_says_the_same(story: list[tuple[int, bool, int]], market: str) -> None:
    base = 1 if market == "mixed" else 0
    w = world(2, group("rollout", low=0, high=6, market=market, base=base))
    for ticks, spot, size in story:
        w.spot = spot
        w.want("rollout", size)
        for _ in range(ticks):
            w.tick()
            serving = [r for r in w.state.replicas.values() if r.group == "rollout" and r.state in reconcile.SERVING]
            # The base first: never a spot replica while fewer than the base are on demand.
            spots = sum(r.market == "spot" for r in serving)
            assert spots == 0 or len(serving) - spots >= min(base, len(serving))
    stand_ins, tries = _turns(w)
    # On demand in its place only after the patience; then one try in any hold, as long as it is refused.
    assert all(t - since_s >= PATIENCE.give_up_s for since_s, t in stand_ins)
    assert all(b - a >= PATIENCE.hold_s for (x, a), (y, b) in pairwise(tries) if x == y)
    # A new row of refusals takes the patience before the market turns again.
    rows = sorted({since_s for since_s, _ in stand_ins})
    assert all(b - a >= PATIENCE.give_up_s for a, b in pairwise(rows))
    replayed = [type(r)(r.seq, r.t_s, decode(*encode(r.event))) for r in w.records]
    assert fold(replayed) == w.state


def _turns(w: SpotWorld) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Launches in place of spot, and spot launches after it was given up: (start of the row of refusals, time)."""
    now = ClusterState()
    stand_ins: list[tuple[float, float]] = []
    tries: list[tuple[float, float]] = []
    for record in w.records:
        wanted = now.groups.get("rollout")
        e = record.event
        if isinstance(e, LaunchIntended) and e.group == "rollout" and wanted is not None:
            since_s = wanted.spot_refused_since_s
            if e.fallback:
                assert since_s is not None
                stand_ins.append((since_s, record.t_s))
            elif e.market == "spot" and since_s is not None and record.t_s - since_s >= PATIENCE.give_up_s:
                tries.append((since_s, record.t_s))
        now = apply(now, record)
    return stand_ins, tries


@settings(deadline=None)
@given(
    st.floats(0, 1e5), st.floats(0, 1e5), st.floats(0, 1e5), st.integers(0, 3), st.integers(0, 3),
    st.sampled_from([MIXED, SPOT]),
)  # fmt: skip
def test_a_choice_is_a_function_of_its_arguments(
    since_s: float, later_s: float, now_s: float, on_demand: int, starting: int, g: Any
) -> None:
    wanted = state(since_s, since_s + later_s)
    first = market_for(g, wanted, on_demand, starting, now_s, PATIENCE)
    assert first == market_for(g, wanted, on_demand, starting, now_s, PATIENCE)
    if g.market == "mixed" and on_demand < g.on_demand_base:
        assert first == MarketChoice("on_demand")


# ---------------------------------------------------------------- what SkyPilot is told


@pytest.mark.parametrize(
    ("resources", "market", "told"),
    [
        ({"infra": "aws/r", "use_spot": False}, "spot", {"infra": "aws/r", "use_spot": True}),
        ({"infra": "aws/r", "use_spot": True}, "on_demand", {"infra": "aws/r"}),
        ({"cpus": 4}, "spot", {"cpus": 4, "use_spot": True}),
        ({"infra": "k8s/ctx/with/slashes"}, "spot", {"infra": "k8s/ctx/with/slashes"}),
        ({"cloud": "Lambda"}, "spot", {"cloud": "Lambda"}),
        ({"infra": "slurm/hpc/gpu"}, "spot", {"infra": "slurm/hpc/preempt"}),
        ({"infra": "slurm/hpc"}, "spot", {"infra": "slurm/hpc/preempt"}),
        ({"infra": "slurm/hpc/gpu"}, "on_demand", {"infra": "slurm/hpc/gpu"}),
        (
            {"any_of": [{"infra": "aws"}, {"infra": "lambda"}]},
            "spot",
            {"any_of": [{"infra": "aws", "use_spot": True}, {"infra": "lambda"}]},
        ),
        (
            {"infra": "lambda", "ordered": [{"cpus": 1, "use_spot": True}]},
            "spot",
            {"infra": "lambda", "ordered": [{"cpus": 1}]},
        ),
    ],
)
def test_what_skypilot_is_told(resources: dict[str, Any], market: str, told: dict[str, Any]) -> None:
    before = repr(resources)
    assert with_market(resources, market, "preempt") == told
    assert repr(resources) == before


def test_slurm_without_a_partition_for_spot_stays_where_it_is() -> None:
    assert with_market({"infra": "slurm/hpc/gpu"}, "spot") == {"infra": "slurm/hpc/gpu"}


def test_a_person_may_say_the_market() -> None:
    w = world(1, spot=False)
    w.record(GroupDesired("rollout", 2, "asked for", "user", market="on_demand"))
    w.settle(5)
    assert w.markets() == ["on_demand", "on_demand"]
    assert not any(e.fallback for e in w.launched())
