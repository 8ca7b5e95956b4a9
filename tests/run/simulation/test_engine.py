"""The simulated cluster: what it leaves out changes nothing, what it says adds up, bad weather loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_sky.adapters.catalog import shipped_offers
from areal_sky.core.cost import bill
from areal_sky.core.model import Bundle, MachineState
from areal_sky.core.offers import Known
from areal_sky.run.simulation.engine import Choice, Scenario, Simulation
from areal_sky.run.simulation.pipeline import PROFILES, Setup
from areal_sky.run.simulation.policies import choose
from areal_sky.run.simulation.rlrun import RlRunSpec
from areal_sky.run.simulation.simtask import SimTask
from areal_sky.run.simulation.workloads import read_workload
from areal_sky.run.simulation.world import WORLDS, SpotTrace, World, lots
from areal_sky.spec import load_text

SPEC = """
name: sim
infra: aws/us-east-1
node_groups:
  rollout:
    resources: {accelerators: "A100-80GB:8"}
    min_replicas: 1
    max_replicas: 5
    market: mixed
    on_demand_base: 1
"""
EXAMPLE = Path(__file__).parents[3] / "examples" / "simulation"
KNOWN = Known(shipped_offers())
RL = RlRunSpec("rl", Setup(PROFILES["7b"], 3, 8.0, batch=64), rollouts=2, eval_every=2)


def policy(name: str = "spec", text: str = SPEC) -> Choice:
    return choose(name, load_text(text, "sim.yaml", None), KNOWN)


def work(seed: int, count: int = 25) -> tuple[SimTask, ...]:
    draw = lots(seed, "test")
    return tuple(
        SimTask(
            f"t{n}", draw.random() * 6000.0, draw.lognormvariate(7.0, 0.8),
            Bundle(float(draw.choice((1, 2, 8))), 0.0, 0.0), draw.choice((1, 1, 2)),
            kind=draw.choice(("train", "eval")), checkpoint_s=draw.choice((None, 0.0, 300.0)),
        )
        for n in range(count)
    )  # fmt: skip


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.sampled_from(("usual", "rough")), st.sampled_from(("spec", "frugal", "attained")))
def test_the_ticks_left_out_would_have_done_nothing(seed: int, world: str, name: str) -> None:
    scenario = Scenario("s", work(seed, 12), (RL,), WORLDS[world], days=0.05, seed=seed)
    some, every = (Simulation(scenario, policy(name), tick_s=10.0, every_tick=all_) for all_ in (False, True))
    short, full = some.run(), every.run()
    assert some.records == every.records
    assert short.tasks == full.tasks
    assert some.ticks < every.ticks


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(0, 10_000))
def test_in_the_worst_weather_everything_ends_and_nothing_is_over_committed_or_forgotten(seed: int) -> None:
    counts = tuple(lots(seed, "trace").choice((0, 1, 2, 4)) for _ in range(50))
    scenario = Scenario(
        "s", work(seed), (RL,), WORLDS["rough"], (SpotTrace("a", 600.0, counts),), days=1.0, seed=seed
    )
    simulation = Simulation(scenario, policy())
    step = simulation._happen

    def checked(now_s: float) -> None:
        step(now_s)
        for node in simulation.tasks.nodes.values():
            assert min(node.free) > -1e-6, "more given than there is"
        spot = [m for m in simulation.cloud.all() if m.market == "spot" and m.counted and not m.leaving]
        alive = [m for m in spot if m.state in (MachineState.STARTING, MachineState.UP)]
        assert len(alive) <= scenario.spot[0].room(now_s - 1_700_000_000.0), "more than could be had"

    simulation._happen = checked  # type: ignore[method-assign]
    result = simulation.run()
    assert {t.outcome for t in result.tasks} == {"succeeded"}
    assert {m.replica for m in simulation.cloud.all()} <= set(simulation.controller.state.replicas)
    for t in result.tasks:
        assert t.started_s is not None and t.ended_s is not None and t.submitted_s <= t.started_s <= t.ended_s
        assert t.ended_s - t.started_s >= t.ideal_s - 0.01


def test_the_bill_is_the_one_that_the_product_would_have_written() -> None:
    simulation = Simulation(Scenario("s", work(3), world=World(), days=0.1, seed=3), policy("frugal"))
    result = simulation.run()
    ours = bill(simulation.controller.state, simulation._choice.plan, simulation.now_s).usd
    late_usd = result.launches * 5.0 / 3600.0 * 45.0  # the controller sees an end at its next tick
    assert result.points[-1].cost_usd == pytest.approx(ours, abs=late_usd)
    assert ours > 10


def test_baselines_keep_their_promises() -> None:
    scenario = Scenario("s", work(5, 60), world=World(), days=0.1, seed=5)
    mean: dict[str, float] = {}
    for name in ("fifo_strict", "fifo_easy", "srtf"):
        result = Simulation(scenario, policy(f"{name}+static")).run()
        mean[name] = sum((t.ended_s or 0.0) - t.submitted_s for t in result.tasks) / len(result.tasks)
        if name != "srtf":
            assert not any(t.preemptions for t in result.tasks)
    assert mean["srtf"] < mean["fifo_easy"] < mean["fifo_strict"]


def test_static_pays_for_what_it_does_not_use() -> None:
    scenario = Scenario("s", work(6, 8), world=World(), days=0.1, seed=6)
    spec, static = (Simulation(scenario, policy(n)).run() for n in ("on_demand", "on_demand+static"))
    assert static.launches == 6 and static.points[-1].cost_usd > spec.points[-1].cost_usd


def test_the_same_seed_gives_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(SPEC)
    (tmp_path / "w.yaml").write_text(
        "runs: [{model: 1.5b, steps: 6, batch: 32, rollouts: 2}]\ntasks: [{gpus: 2, every: 5m, median: 10m}]\n"
    )

    def run(hash_seed: str) -> bytes:
        argv = [sys.executable, "-m", "areal_sky.ui.cli.main", "simulate", "c.yaml", "--workload", "w.yaml", "--json"]
        argv += ["--world", "rough", "--days", "0.1", "--compare", "spec,shortest+spot"]
        env = os.environ | {"PYTHONHASHSEED": hash_seed}
        return subprocess.run(argv, cwd=tmp_path, env=env, check=True, capture_output=True).stdout

    first, second = run("1").splitlines(), run("2").splitlines()
    assert [json.loads(line)["policy"] for line in first] == ["spec", "shortest+spot"]
    differ = [n for n in range(2) if first[n] != second[n]]  # as a list: a diff of such lines takes minutes
    assert not differ


def test_the_example_in_the_guide_runs() -> None:
    spec = load_text((EXAMPLE / "cluster.yaml").read_text(), "cluster.yaml", None)
    work = read_workload(EXAMPLE / "work.yaml", choose("spec", spec, KNOWN).plan, 0.2, 0)
    few = tuple(replace(r, setup=replace(r.setup, steps=3)) for r in work.runs)
    scenario = Scenario("example", work.tasks, few, WORLDS["usual"], days=0.2)
    result = Simulation(scenario, choose("spec", spec, KNOWN)).run()
    assert {t.outcome for t in result.tasks} == {"succeeded"} and result.metrics["versions"] == 6


def test_another_seed_is_another_world() -> None:
    one, other = (Scenario("s", work(1), world=WORLDS["rough"], days=0.1, seed=seed) for seed in (1, 2))
    assert Simulation(one, policy()).run().to_json() == Simulation(one, policy()).run().to_json()
    assert Simulation(one, policy()).run().tasks != Simulation(other, policy()).run().tasks
