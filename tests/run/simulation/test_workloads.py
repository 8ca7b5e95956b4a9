"""Work for simulations: public formats are read, mistakes are told in one line with their place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_sky.adapters import traces
from areal_sky.adapters.catalog import shipped_offers
from areal_sky.core.launch import draft
from areal_sky.errors import InvalidInput, SpecError
from areal_sky.run.simulation.workloads import gang_of, made_up, profile_of, read_workload
from areal_sky.run.simulation.world import SpotTrace
from areal_sky.spec import load_text

SPEC = load_text(
    """
name: w
infra: aws/us-east-1
node_groups:
  trainer: {resources: {accelerators: "A100-80GB:8"}, replicas: 1}
  rollout: {resources: {accelerators: "A100-80GB:8"}, min_replicas: 0, max_replicas: 4}
""",
    "w.yaml",
    None,
)
PLAN = draft(SPEC, shipped_offers())


def test_philly_and_alibaba_give_the_same_kind_of_tasks(tmp_path: Path) -> None:
    philly = tmp_path / "vc.csv"
    philly.write_text(
        "timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-01 00:00:10,60.0,1,60,v\n"
        "2017-10-01 00:00:00,30.0,16,480,v\n2017-10-03 00:00:00,30.0,8,240,v\n"
    )
    first = read_workload(philly, PLAN, 1.0, 0).tasks
    assert [(t.submitted_s, t.duration_s, t.bundles, t.bundle.gpus) for t in first] == [(0, 30, 2, 8), (10, 60, 1, 1)]
    assert len(read_workload(philly, PLAN, None, 0).tasks) == 3

    pods = tmp_path / "pods.csv"
    pods.write_text(
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time,scheduled_time\n"
        "a,4000,1024,1,500,,100,400,200\nb,8000,1024,2,1000,,150,450,150\nc,1000,1024,0,0,,160,160,160\n"
    )
    found = read_workload(pods, PLAN, None, 0).tasks
    assert [(t.submitted_s, t.duration_s, t.gpus) for t in found] == [(0, 200, 0.5), (50, 300, 2)]


def test_a_task_that_could_never_run_is_refused_before_it_waits_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "vc.csv"
    path.write_text("timestamp,duration,num_gpus\n2017-10-01 00:00:00,30.0,64\n")
    with pytest.raises(InvalidInput, match=r"1 of 1 tasks could never run .* 8 x 8 GPUs"):
        read_workload(path, PLAN, None, 0)


def test_a_synthetic_workload_is_drawn_from_its_seed_and_its_mistakes_have_a_place(tmp_path: Path) -> None:
    path = tmp_path / "work.yaml"
    path.write_text(
        "runs:\n  - {name: math, model: 1.5b, steps: 20, eta: 0, rollouts: 2, every: 6h, deadline: 2d}\n"
        "tasks:\n  - {name: evals, kind: eval, gpus: 2, median: 10m, every: 1h, count: 5}\n"
    )
    work = read_workload(path, PLAN, 2.0, 1)
    assert work == read_workload(path, PLAN, 2.0, 1) != read_workload(path, PLAN, 2.0, 2)
    assert len(work.tasks) == 5 and len(work.runs) > 2
    assert all(r.setup.eta == 0 and (r.train_group, r.rollout_group) == ("trainer", "rollout") for r in work.runs)
    path.write_text("runs:\n  - {model: 8b, step: 20, rollouts: 0}\n")
    with pytest.raises(SpecError) as e:
        read_workload(path, PLAN, 1.0, 0)
    told = str(e.value)
    assert told.count("work.yaml:2:") == 3 and "did you mean `steps`" in told


def test_without_a_workload_the_models_of_the_spec_run() -> None:
    assert {r.setup.profile.name for r in made_up(SPEC, PLAN, 1.0, 0).runs} == {"7b"}
    small = load_text("resources: {accelerators: 'V100:8'}\ninfra: aws/us-east-1\nname: s\n", "s.yaml", None)
    run = made_up(small, draft(small, shipped_offers()), 0.1, 0).runs[0]
    assert run.train_bundle_gpus + run.rollouts * run.rollout_gpus <= 8, "they would wait for each other"
    assert [profile_of(m) for m in ("qwen2.5-1.5b", "qwen3-30b-a3b", "qwen3-8b", "tiny-moe")] == [
        "1.5b", "32b", "7b", "7b",
    ]  # fmt: skip
    assert [gang_of(n, PLAN) for n in (3, 8, 24, 12)] == [(1, 3), (1, 8), (3, 8), (12, 1)]


def test_spot_traces_count_machines_or_say_only_whether_there_are_any(tmp_path: Path) -> None:
    path = tmp_path / "zone.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": [3, 3, 0, 16]}))
    trace = SpotTrace("zone", *traces.read_spot(path))
    assert [trace.room(t) for t in (0.0, 599.0, 600.0, 901.0, 1200.0)] == [3, 3, 0, 16, 3]
    assert [trace.next_change_s(t) for t in (0.0, 600.0, 1100.0)] == [600, 900, 1200]
    assert SpotTrace("z", 60.0, (0, 1)).room(60.0) == float("inf")
    assert SpotTrace("z", 60.0, (1, 1)).next_change_s(0.0) == float("inf")
    nothing, no_step = '{"metadata": {"gap_seconds": 9}, "data": []}', '{"metadata": {"gap_seconds": 0}, "data": [1]}'
    for wrong in ("{}", no_step, nothing):
        path.write_text(wrong)
        with pytest.raises(InvalidInput, match=r"zone\.json: expected"):
            traces.read_spot(path)
