"""Spot policies on any trace: deadlines are met where they can be, and nobody beats who knows the future."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_sky.core.spot_policies import POLICIES, SpotContext, optimum
from areal_sky.run.simulation.result import SimResult
from areal_sky.run.simulation.spot import NAMES, SpotJob, replay

GAP_S = 600.0
SAFE = ("on_demand", "greedy", "time_sliced", "uniform_progress", "optimum")
traces = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 12)), min_size=12, max_size=30).map(
    lambda runs: [there for there, n in runs for _ in range(n)] + [0] * 80
)


def job(work_ticks: int, spare_ticks: int, restart_s: float = 120.0, **more: float) -> SpotJob:
    return SpotJob(work_ticks * GAP_S, (work_ticks + spare_ticks) * GAP_S, restart_s, **more)  # type: ignore[arg-type]


def usd(result: SimResult) -> float:
    return result.points[-1].cost_usd


@settings(max_examples=40, deadline=None)
@given(traces, st.integers(5, 40), st.integers(3, 40), st.sampled_from([0.0, 120.0, 480.0]))
def test_deadlines_are_met_and_knowing_the_future_is_cheapest(
    trace: list[int], work: int, spare: int, restart_s: float
) -> None:
    asked = job(work, spare, restart_s)
    cost: dict[str, float] = {}
    for name in SAFE:
        result = replay(name, asked, GAP_S, trace)
        (row,) = result.tasks
        assert row.ended_s is not None and row.ended_s <= asked.deadline_s + 1e-6, name
        assert row.ended_s >= asked.work_s
        cost[name] = usd(result)
    # It counts the last tick whole.
    assert cost["optimum"] <= min(cost.values()) + asked.on_demand_usd * GAP_S / 3600


@pytest.mark.parametrize("name", SAFE)
def test_without_spot_all_work_is_on_demand(name: str) -> None:
    result = replay(name, job(20, 10), GAP_S, [0] * 60)
    least = 3.06 * (20 * GAP_S + 120) / 3600
    assert least - 1e-6 <= usd(result) <= 1.1 * least  # with pauses where a policy waits for spot


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("on_demand", "static_split")])
def test_with_spot_always_there_nothing_else_is_used(name: str) -> None:
    points = replay(name, job(20, 10), GAP_S, [1] * 60).points
    usual = 3.06 if name == "skyserve" else 0.0  # it bridges the start of its spot nodes
    assert points[-1].cost_by_market["on_demand"] <= usual * GAP_S / 3600


def test_greedy_waits_where_uniform_progress_works() -> None:
    trace = [0] * 40 + [1] * 200
    greedy, uniform = (replay(n, job(60, 60), GAP_S, trace) for n in ("greedy", "uniform_progress"))
    assert usd(greedy) < usd(uniform)
    assert greedy.tasks[0].started_s == 40 * GAP_S and uniform.tasks[0].started_s <= GAP_S


def test_ours_goes_on_demand_after_its_patience_and_comes_back() -> None:
    trace = [1] * 10 + [0] * 20 + [1] * 60
    points = replay("ours", SpotJob(math.inf, math.inf, 120.0), GAP_S, trace).points
    held = ["".join(m[0] for m in ("spot", "on_demand") if p.gpus_by_market[m]) for p in points[:-1]]
    assert held[:12] == ["s"] * 10 + ["", "o"]  # refused for ten minutes: given up
    back = held.index("s", 30)
    assert 30 <= back <= 34 and set(held[back:]) <= {"s"}  # tried again within half an hour
    assert set(held[11:back]) == {"o"}


def test_a_gang_runs_whole_or_not_at_all_and_a_fleet_on_what_it_has() -> None:
    trace = [3] * 10 + [4] * 30
    gang, fleet = (replay("all_spot", job(8, 90, 0.0, nodes=4, gang=g), GAP_S, trace) for g in (True, False))
    assert gang.tasks[0].started_s == 10 * GAP_S and gang.tasks[0].ended_s == 18 * GAP_S
    assert fleet.tasks[0].started_s == 0 and fleet.tasks[0].ended_s == 10 * GAP_S + GAP_S / 2
    assert usd(gang) == pytest.approx(usd(fleet))


def test_a_fleet_that_knows_the_future_meets_its_deadline_with_little_on_demand() -> None:
    trace = [n for n in (4, 1, 3, 0, 2, 4) for _ in range(20)]
    asked = SpotJob(70 * GAP_S, 120 * GAP_S, 120.0, nodes=4)
    results = {name: replay(name, asked, GAP_S, trace) for name in ("optimum", "uniform_progress", "on_demand")}
    assert all(r.tasks[0].ended_s <= asked.deadline_s for r in results.values())
    assert usd(results["optimum"]) < usd(results["uniform_progress"]) < usd(results["on_demand"])


def test_what_cannot_be_met_is_said() -> None:
    ctx = SpotContext(0, GAP_S, 1, 1, 0, 0, 0, 0, 10 * GAP_S, 9 * GAP_S, 60, 1, 3)
    with pytest.raises(ValueError, match="not even on demand"):
        optimum([1] * 20, ctx)


def test_every_policy_says_why() -> None:
    ctx = SpotContext(0, GAP_S, 4, 2, 0, 0, 0, 0, 10 * GAP_S, 90 * GAP_S, 60, 1, 3)
    assert all(policy(ctx).reason for policy in POLICIES.values())
