"""What a plan, and the head at a submit, make of memory: fits, is warned of, is refused; corrected by what was seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sky.adapters.catalog import shipped_offers
from areal_sky.core.launch import draft, head_env
from areal_sky.core.memory_check import Level, check, check_task, judge, refuse, usable_gib
from areal_sky.core.memory_peaks import ENOUGH, LEAST, MOST, Peak, correction, corrections
from areal_sky.core.memory_terms import MemoryReport, ModelNeed
from areal_sky.core.model import LaunchPlan, NodeShape
from areal_sky.core.model_table import find_model
from areal_sky.core.nodeenv import HeadEnv
from areal_sky.errors import Refused
from areal_sky.spec import ClusterSpec, load_text

H100 = NodeShape(8, 100, 1000, "H100", 80)
NEED = ModelNeed("m", "train", "fsdp:d8", 8, 8, 40.0, 20.0, 6.0)


def spec_of(models: str, gpu: str = "H100:8", nodes: int = 1, infra: str = "aws/us-east-1") -> ClusterSpec:
    text = f"infra: {infra}\nresources: {{accelerators: '{gpu}'}}\nnum_nodes: {nodes}\nmodels:\n  - {models}\n"
    return load_text(text, "x.yaml", 0.0)


def planned(models: str, **more: Any) -> LaunchPlan:
    return draft(spec_of(models, **more), shipped_offers())


def report(models: str, **more: Any) -> MemoryReport:
    return planned(models, **more).memory


def test_what_fits_is_said_with_its_numbers() -> None:
    found = report("{name: qwen2.5-7b, train: 'fsdp:d8', rollout: 'vllm:d8'}")
    assert not found.warnings and not found.refusals
    assert found.lines[0].startswith("qwen2.5-7b train fsdp:d8: 44 GiB a GPU (14 at the least) of 79 on H100: fits")
    assert [(n.stage, n.gpus, n.gpus_per_replica) for n in found.needs] == [("train", 8, 8), ("rollout", 8, 1)]
    refuse(found)


def test_host_memory_is_held_against_the_nodes() -> None:
    found = report("{name: llama-3.1-70b, train: 'fsdp:d64'}", nodes=8)
    assert found.lines and not found.warnings
    small = "{name: qwen2.5-7b, train: 'fsdp:d8', memory: {offload: optimizer}}"
    groups = [replace(g, shape=replace(g.shape, memory_gib=64.0)) for g in planned(small).groups]
    spec = spec_of(small)
    assert "but takes 147 GiB of a node" in check(spec, groups, {}).warnings[0]


def test_what_can_never_fit_is_refused_with_the_nearest_that_does() -> None:
    found = report("{name: qwen3-235b-a22b, train: 'fsdp:d8'}")
    assert len(found.refusals) == 1
    assert "of 79 on H100: cannot fit, fsdp:" in found.refusals[0] and found.refusals[0].endswith(" would")
    with pytest.raises(Refused, match=r"qwen3-235b-a22b train fsdp:d8: .*\n.*check: warn"):
        refuse(found)


@pytest.mark.parametrize(("more", "infra"), [(", memory: {check: warn}", "aws"), ("", "local")])
def test_a_refusal_is_a_warning_where_one_asks_for_it_or_the_machines_are_pretended(more: str, infra: str) -> None:
    found = report(f"{{name: qwen3-235b-a22b, train: 'fsdp:d8'{more}}}", infra=infra)
    assert not found.refusals and "cannot fit" in found.warnings[0]


def test_the_check_can_be_switched_off() -> None:
    assert report("{name: qwen3-235b-a22b, train: 'fsdp:d8', memory: {check: skip}}") == MemoryReport()


def test_what_does_not_fit_as_assumed_is_warned_of_and_settings_count() -> None:
    found = report("{name: qwen2.5-32b, train: 'fsdp:d8'}")
    assert not found.refusals and "does not fit as assumed" in found.warnings[0]
    leaner = "memory: {optimizer: adam_bf16, micro_batch_tokens: 4096}"
    assert report(f"{{name: qwen2.5-32b, train: 'fsdp:d8', {leaner}}}").lines


def test_more_gpus_than_the_cluster_ever_has_are_refused() -> None:
    found = report("{name: qwen2.5-7b, train: 'fsdp:d16'}")
    assert found.refusals == ("qwen2.5-7b train fsdp:d16: it takes 16 GPUs and the cluster has 8 at its largest",)
    assert not report("{name: qwen2.5-7b, train: 'fsdp:d16'}", nodes=2).refusals


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("{name: my-model, train: 'fsdp:d8'}", "`my-model` is not in the table of common models: give it a `config`"),
        ("{name: a, config: qwen3-30b, train: 'fsdp:d8'}", "did you mean `qwen3-30b-a3b`"),
        ("{name: a, config: qwen2.5-7b, rollout: 'vllm:t8'}", "t8 does not divide its 28 attention heads"),
    ],
)
def test_what_cannot_be_checked_is_said(model: str, reason: str) -> None:
    found = report(model)
    assert not found.refusals and reason in found.warnings[0]


def test_a_config_read_from_a_file_counts_before_the_table() -> None:
    text = "infra: aws\nresources: {accelerators: 'H100:8'}\nmodels: [{name: a, config: c.json, train: 'fsdp:d8'}]\n"
    found = draft(load_text(text, "x.yaml", 0.0), shipped_offers(), {"a": find_model("qwen2.5-7b").architecture})
    assert found.memory.lines


def test_the_head_is_told_what_models_need() -> None:
    text = "infra: aws\nresources: {accelerators: 'H100:8'}\nmodels: [{name: qwen2.5-7b, train: 'fsdp:d8'}]\n"
    spec = load_text(text, "x.yaml", 0.0)
    launch = draft(spec, shipped_offers())
    env = head_env(spec, launch, state_dir="/s")
    assert env.needs == launch.memory.needs != ()
    assert HeadEnv.from_env(env.to_env()) == env


@pytest.mark.parametrize(
    ("name", "memory_gib", "usable"),
    [("H100", 80, 79.2), ("L40S", 48, 44.42), ("A10G", 24, 22.1), ("V100", 16, 15.77), ("H200", 141, 139.8)],
)
def test_programs_see_less_than_the_name_says(name: str, memory_gib: float, usable: float) -> None:
    """As engines print it: vllm pull request 10511 (H100), issue 15815 (L40S)."""
    assert usable_gib(NodeShape(8, 1, 1, name, memory_gib)) == pytest.approx(usable, rel=0.01)
    assert usable_gib(NodeShape(8, 1, 1, name)) == pytest.approx(usable, rel=0.01)


def test_no_memory_is_made_up() -> None:
    assert usable_gib(NodeShape(8, 1, 1, "my-gpu")) is None
    assert usable_gib(NodeShape(0, 1, 1)) is None


@pytest.mark.parametrize(
    ("usable", "factor", "level"),
    [(44, 1, Level.FITS), (42, 1, Level.TIGHT), (39, 1, Level.OVER), (19.5, 1, Level.OVER), (19, 1, Level.IMPOSSIBLE),
     (44, 1.2, Level.OVER)],
)  # fmt: skip
def test_levels(usable: float, factor: float, level: Level) -> None:
    assert judge(NEED, usable, factor) is level


# ---------------------------------------------------------------- submit


def test_a_task_that_cannot_fit_is_refused_and_a_tight_one_warned_of() -> None:
    small = NodeShape(8, 1, 1, "V100", 16)
    refusal, warning = check_task([NEED], "m", "train", 8, [small])
    assert "m cannot fit: 40 GiB a GPU (20 at the least) of 16 on V100" in refusal and not warning
    assert check_task([NEED], "m", "train", 8, [small, H100]) == ("", "")  # the H100 will do
    refusal, warning = check_task([NEED], "m", "train", 8, [NodeShape(8, 1, 1, "L40S", 48)], {("m", "train"): 1.2})
    assert not refusal and "m may not fit: 48 GiB" in warning


@pytest.mark.parametrize(
    ("model", "kind", "gpus"), [("other", "train", 8), (None, "train", 8), ("m", "rollout", 8), ("m", "train", 0)]
)
def test_other_tasks_are_not_judged(model: str | None, kind: str, gpus: float) -> None:
    assert check_task([NEED], model, kind, gpus, [NodeShape(8, 1, 1, "T4", 16)]) == ("", "")


def test_a_driver_is_judged_by_every_stage_and_fewer_gpus_than_a_replica_are_told() -> None:
    assert "cannot fit" in check_task([NEED], "m", "driver", 1, [NodeShape(8, 1, 1, "T4", 16)])[0]
    assert check_task([NEED], "m", "train", 4, [H100])[1] == "m: train as fsdp:d8 takes 8 GPUs, the task asks for 4"


# ---------------------------------------------------------------- what was seen


def peak(ratio: float, stage: str = "train", oom: bool = False) -> Peak:
    return Peak("m", stage, 40.0, 40.0 * ratio, oom)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("peaks", "factor"),
    [
        ([], 1.0),
        ([peak(1.2)], 1.2),  # one run above is enough to raise
        ([peak(0.8)], 1.0),  # one below is not enough to lower
        ([peak(0.8)] * ENOUGH, 0.8),
        ([peak(0.8), peak(0.9), peak(0.85)], 0.9),  # never below what was seen
        ([peak(1.0, oom=True)], 1.1),
        ([peak(0.5, oom=True)], 1.1),  # whatever it held, it wanted more
        ([peak(1.9, "rollout")] * 5, 1.0),  # an engine takes all that it is given
        ([peak(1.2, "rollout", oom=True)], 1.32),
        ([peak(1.0), peak(1.0), peak(40.0)], 1.5),  # someone else's process
        ([peak(0.1)] * 9, LEAST),
        ([peak(9.0)] * 9, MOST),
        ([peak(float("nan")), peak(0.0), peak(-1.0)], 1.0),
    ],
)
def test_observed_peaks_correct(peaks: list[Peak], factor: float) -> None:
    assert correction(peaks) == pytest.approx(factor)


@given(st.lists(st.builds(peak, st.floats(allow_nan=True), st.sampled_from(["train", "rollout"]), st.booleans())))
def test_a_correction_is_always_bounded(peaks: list[Peak]) -> None:
    assert LEAST <= correction(peaks) <= MOST


def test_corrections_are_kept_apart_by_model_and_stage() -> None:
    other = Peak("n", "train", 10, 15)
    assert corrections([peak(1.2), other, peak(1.1, "inference")]) == {
        ("m", "train"): pytest.approx(1.2), ("n", "train"): 1.5, ("m", "inference"): pytest.approx(1.1)
    }  # fmt: skip
