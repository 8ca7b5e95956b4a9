"""The bill: every breakdown adds up to the same, to a hundredth of a cent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sky.core.cost import BREAKDOWNS, SLACK_S, bill
from areal_sky.core.events import (
    ClusterCreated,
    Event,
    LaunchAccepted,
    LaunchIntended,
    Record,
    ReplicaGone,
    TerminateIntended,
    decode,
    encode,
    fold,
)
from areal_sky.core.model import HEAD_GROUP, ClusterState, LedgerLine
from areal_sky.core.usage import Hold, Usage
from tests.core.worlds import group, plan

HOUR = 3600.0
PLAN = plan(group("rollout", market="mixed"), group("trainer", nodes=2))


def line(replica: str = "c-rollout-0", *, price: float | None = 10.0, hours: float | None = 1.0, start: float = 0.0,
         market: str = "on_demand", nodes: int = 1, on_demand: float | None = 10.0) -> LedgerLine:  # fmt: skip
    name = replica.split("-")[1]
    until = None if hours is None else start + hours * HOUR
    return LedgerLine(replica, name, market, nodes, price, start, until, on_demand)


def hold(task: str, start_h: float, end_h: float | None, gpus: float = 8, *, replica: str = "c-rollout-0",
         index: int = 0, kind: str = "rollout", cpus: float = 1,
         node: tuple[float, float] = (8, 16)) -> Hold:  # fmt: skip
    until = None if end_h is None else end_h * HOUR
    return Hold(task, 1, f"name of {task}", kind, replica, index, gpus, cpus, *node, start_h * HOUR, until)


def rows(state: ClusterState, usage: Usage, by: str, now_h: float = 10.0) -> dict[str, float | None]:
    b = bill(state, PLAN, now_h * HOUR, usage, by)  # type: ignore[arg-type]
    key = {"group": "group", "role": "role", "replica": "replica", "task": "task"}[by]
    return {f"{getattr(x, key) or x.role}/{x.market}": x.usd for x in b.lines}


def known(*holds: Hold, until_h: float = 10.0) -> Usage:
    return Usage(until_h * HOUR, holds)


def test_hours_times_the_price_at_launch_spot_and_on_demand_apart() -> None:
    state = ClusterState(ledger=(
        line("c-head-0", price=0.5, hours=4),
        line(price=10.0, hours=1),
        line(price=12.0, hours=0.5, start=2 * HOUR),  # the price had gone up
        line("c-rollout-1", price=3.0, hours=2, market="spot"),
        line("c-trainer-0", price=10.0, hours=1, nodes=2),
    ))  # fmt: skip
    b = bill(state, PLAN, 10 * HOUR)
    got = {(x.group, x.market): (x.replicas, x.node_hours, x.usd, x.on_demand_usd) for x in b.lines}
    assert got == {
        ("head", "on_demand"): (1, 4.0, 2.0, 2.0),
        ("rollout", "on_demand"): (1, 1.5, 16.0, 16.0),
        ("rollout", "spot"): (1, 2.0, 6.0, 20.0),
        ("trainer", "on_demand"): (1, 2.0, 20.0, 20.0),
    }
    assert (b.usd, b.on_demand_usd, b.complete, b.usd_per_hour_now) == (44.0, 58.0, True, 0.0)
    assert b.lines[0].group == "head"


def test_what_runs_now_is_billed_until_now() -> None:
    b = bill(ClusterState(ledger=(line(hours=None), line("c-trainer-0", hours=None, nodes=2))), PLAN, 3 * HOUR)
    assert (b.usd, b.usd_per_hour_now) == (90.0, 30.0)


def test_a_task_pays_for_its_share_of_the_gpus_and_the_rest_is_idle() -> None:
    state = ClusterState(ledger=(line("c-head-0", price=1.0, hours=2), line(price=16.0, hours=2)))
    usage = known(hold("t1", 0, 1, gpus=4), hold("t2", 0.5, 2, gpus=2, kind="eval"))
    assert rows(state, usage, "task") == {
        "head/on_demand": 2.0, "t1/on_demand": 8.0, "t2/on_demand": 6.0, "idle/on_demand": 18.0
    }  # fmt: skip
    assert rows(state, usage, "role") == {
        "head/on_demand": 2.0, "eval/on_demand": 6.0, "rollout/on_demand": 8.0, "idle/on_demand": 18.0
    }  # fmt: skip


def test_on_a_cpu_node_the_share_is_of_its_cpus_and_cpus_of_a_gpu_node_are_free() -> None:
    state = ClusterState(ledger=(line(hours=1), line("c-trainer-0", price=8.0, hours=1)))
    usage = known(
        hold("t1", 0, 1, gpus=0, cpus=8),
        hold("t2", 0, 1, gpus=0, cpus=4, replica="c-trainer-0", node=(0, 16)),
    )
    got = rows(state, usage, "task")
    assert (got["t1/on_demand"], got["t2/on_demand"], got["idle/on_demand"]) == (0.0, 2.0, 16.0)


def test_a_gang_pays_on_every_node_and_a_task_in_both_markets() -> None:
    ledger = (line("c-trainer-0", hours=1, nodes=2), line("c-rollout-1", price=3.0, hours=1, market="spot"))
    usage = known(
        *(hold("t1", 0, 1, replica="c-trainer-0", index=i, kind="train") for i in (0, 1)),
        hold("t1", 0, 0.5, replica="c-rollout-1", kind="train"),
    )
    got = rows(ClusterState(ledger=ledger), usage, "task")
    assert got == {"t1/on_demand": 20.0, "t1/spot": 1.5, "idle/spot": 1.5}


def test_shares_that_come_to_more_than_the_node_are_cut_in_proportion() -> None:
    usage = known(hold("t1", 0, 1, gpus=8), hold("t2", 0, 1, gpus=8))
    got = rows(ClusterState(ledger=(line(hours=1),)), usage, "task")
    assert got == {"t1/on_demand": 5.0, "t2/on_demand": 5.0}


def test_a_slot_that_was_used_twice_bills_each_task_in_its_own_life() -> None:
    ledger = (line(price=10.0, hours=1), line(price=20.0, hours=1, start=2 * HOUR))
    usage = known(hold("t1", 0, 5), hold("t2", 2, None))  # t1's release was never seen: it ends with the machine
    got = rows(ClusterState(ledger=ledger), usage, "task")
    assert got == {"t1/on_demand": 20.0, "t2/on_demand": 10.0}


def test_what_nobody_knows_is_neither_idle_nor_free() -> None:
    state = ClusterState(ledger=(line("c-head-0", price=1.0, hours=4), line(price=10.0, hours=4)))
    assert rows(state, Usage(), "role") == {"head/on_demand": 4.0, "unattributed/on_demand": 40.0}
    seen_s = HOUR - SLACK_S
    usage = Usage(seen_s, (hold("t1", 0, None),))  # it was running when the head fell silent
    assert rows(state, usage, "role") == {
        "head/on_demand": 4.0, "rollout/on_demand": 10.0, "unattributed/on_demand": 30.0
    }  # fmt: skip


def test_an_unknown_price_is_said_and_never_counted_as_zero() -> None:
    state = ClusterState(ledger=(line(price=None, on_demand=None, hours=2), line("c-rollout-1", hours=1)))
    b = bill(state, None, 10 * HOUR)
    (row,) = b.lines
    assert (row.usd, row.unpriced_node_hours, row.on_demand_usd) == (10.0, 2.0, None)
    assert (b.usd, b.complete, b.unpriced_node_hours, b.on_demand_usd) == (10.0, False, 2.0, None)
    alone = bill(ClusterState(ledger=(line(price=None, hours=2),)), None, 10 * HOUR)
    assert alone.lines[0].usd is None and not alone.complete


def test_spot_without_a_recorded_on_demand_price_takes_the_plans() -> None:
    old = line("c-rollout-1", price=3.0, hours=1, market="spot", on_demand=None)
    assert bill(ClusterState(ledger=(old,)), PLAN, 10 * HOUR).on_demand_usd == 10.0
    assert bill(ClusterState(ledger=(old,)), None, 10 * HOUR).on_demand_usd is None


def test_the_ledger_keeps_the_prices_of_the_launch_through_the_store() -> None:
    events: list[Event] = [
        ClusterCreated("c"),
        LaunchIntended("c-rollout-0", "rollout", 0, 2, "spot", 3.0, "why", on_demand_usd_per_hour=11.0),
        LaunchAccepted("c-rollout-0", "r"),
        TerminateIntended("c-rollout-0", "why"),
        ReplicaGone("c-rollout-0"),
    ]
    records = [Record(i, i * HOUR, decode(*encode(e))) for i, e in enumerate(events, 1)]
    b = bill(fold(records), None, 99 * HOUR)
    assert (b.usd, b.on_demand_usd) == (12.0, 44.0)


def test_events_of_an_earlier_version_have_no_on_demand_price() -> None:
    name, fields = encode(LaunchIntended("c-rollout-0", "rollout", 0, 1, "spot", 3.0, "why"))
    del fields["on_demand_usd_per_hour"]
    assert decode(name, fields) == LaunchIntended("c-rollout-0", "rollout", 0, 1, "spot", 3.0, "why")


# ---------------------------------------------------------------- sums

prices = st.none() | st.floats(0, 120, allow_nan=False)
times = st.floats(0, 100 * HOUR, allow_nan=False)


@st.composite
def ledgers(draw: st.DrawFn) -> ClusterState:
    lines: list[LedgerLine] = []
    for name in draw(st.lists(st.sampled_from(["head", "rollout", "trainer"]), max_size=6)):
        replica = f"c-{name}-{draw(st.integers(0, 2))}"
        start, lasts = draw(times), draw(st.none() | st.floats(0, 50 * HOUR))
        market = "on_demand" if name == HEAD_GROUP else draw(st.sampled_from(["on_demand", "spot"]))
        lines.append(
            LedgerLine(
                replica, name, market, draw(st.integers(1, 3)), draw(prices), start,
                None if lasts is None else start + lasts, draw(prices),
            )
        )  # fmt: skip
    return ClusterState(ledger=tuple(lines))


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    holds = [
        Hold(
            f"t{draw(st.integers(1, 4))}", 1, "", draw(st.sampled_from(["train", "rollout", "reward"])),
            f"c-{draw(st.sampled_from(['head', 'rollout', 'trainer']))}-{draw(st.integers(0, 2))}",
            draw(st.integers(0, 3)), draw(st.sampled_from([0, 0.1, 0.25, 1, 3, 8])), draw(st.floats(0, 32)),
            draw(st.sampled_from([0, 8])), draw(st.sampled_from([0, 16])), start := draw(times),
            draw(st.none() | st.floats(start, 200 * HOUR)),
        )
        for _ in range(draw(st.integers(0, 12)))
    ]  # fmt: skip
    return Usage(draw(st.just(0.0) | times), tuple(holds))


@given(ledgers(), usages(), times)
def test_every_breakdown_adds_up_to_the_cent(state: ClusterState, usage: Usage, now_s: float) -> None:
    bills = [bill(state, PLAN, now_s, usage, by) for by in BREAKDOWNS]
    first = bills[0]
    for b in bills:
        # Whole hundredths of a cent: equal, not nearly equal.
        assert sum(round((x.usd or 0.0) * 10_000) for x in b.lines) == round(first.usd * 10_000)
        assert b.usd == first.usd and b.on_demand_usd == first.on_demand_usd and b.complete == first.complete
        if first.on_demand_usd is not None:
            told = sum(round((x.on_demand_usd or 0.0) * 10_000) for x in b.lines)
            assert told == round(first.on_demand_usd * 10_000)
        assert all(x.node_hours >= 0 and (x.usd or 0.0) >= 0 for x in b.lines)
        for market in ("on_demand", "spot"):
            mine = [x.node_hours for x in b.lines if x.market == market]
            whole = [x.hours(now_s) for x in state.ledger if x.market == market]
            assert sum(mine) == pytest.approx(sum(whole), abs=1e-6)
        hours_without = sum(x.hours(now_s) for x in state.ledger if x.price_usd_per_hour is None)
        assert b.unpriced_node_hours == pytest.approx(hours_without, abs=1e-6)
    true = sum(x.usd(now_s) or 0.0 for x in state.ledger)
    assert first.usd == pytest.approx(true, abs=0.5e-4 * len(state.ledger) + 1e-9)


@given(ledgers(), usages(), times)
def test_no_task_is_billed_for_more_than_it_held(state: ClusterState, usage: Usage, now_s: float) -> None:
    b = bill(state, PLAN, now_s, usage, "task")
    for x in b.lines:
        if x.task.startswith("t"):
            held_s = sum(max(0.0, (h.until_s or 1e9) - h.from_s) for h in usage.holds if h.task_id == x.task)
            lives = len(state.ledger)
            assert x.node_hours * HOUR <= held_s * max(1, lives) + 1e-3
