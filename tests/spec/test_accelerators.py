"""Every form in which SkyPilot lets one ask for accelerators."""

from __future__ import annotations

from typing import Any

import pytest

from areal_sky.errors import InvalidInput, SpecError
from areal_sky.spec import load_text
from areal_sky.spec.accelerators import find, known_names, matching, parse_ask
from areal_sky.spec.cluster import AcceleratorAsk, ResourcesSpec


def resources(body: str, infra: str = "") -> ResourcesSpec:
    return load_text(f"{infra}\nresources:\n  {body}\n", "x.yaml").groups[0].resources


FORMS: list[tuple[str, list[tuple[str, float]], bool]] = [
    # what stands after `accelerators:`, (name, count) of each choice, is the order a preference?
    ("V100:8", [("V100", 8)], False),
    ("V100", [("V100", 1)], False),
    ("v100:8", [("V100", 8)], False),
    ("a100-80gb:8", [("A100-80GB", 8)], False),
    ("V100:0.5", [("V100", 0.5)], False),
    ("V100:8.0", [("V100", 8)], False),
    ("{V100: 8}", [("V100", 8)], False),
    ("{V100: 8, H100: 8}", [("V100", 8), ("H100", 8)], False),
    ("{V100:8, H100:8}", [("V100", 8), ("H100", 8)], False),
    ("{V100, H100: 2}", [("V100", 1), ("H100", 2)], False),
    ("[H100:8, V100:8]", [("H100", 8), ("V100", 8)], True),
    ("['H100:8', a100]", [("H100", 8), ("A100", 1)], True),
    ("tpu-v5litepod-8", [("tpu-v5litepod-8", 1)], False),
    ("tpu-v6e-8:1", [("tpu-v6e-8", 1)], False),
    ("TPU-V6E-8", [("tpu-v6e-8", 1)], False),
    ("tpu-v6e:8", [("tpu-v6e-8", 1)], False),
    ("tpu-v5e:8", [("tpu-v5litepod-8", 1)], False),
    ("tpu-v5e-8", [("tpu-v5litepod-8", 1)], False),
    ("{tpu-v5e: 8}", [("tpu-v5litepod-8", 1)], False),
    ("tpu-v6e-slice:4", [("tpu-v6e-slice", 4)], False),
    ("Gaudi HL-205:8", [("Gaudi HL-205", 8)], False),
]


@pytest.mark.parametrize(("form", "asks", "ordered"), FORMS, ids=[f[0] for f in FORMS])
def test_named_forms(form: str, asks: list[tuple[str, float]], ordered: bool) -> None:
    for key in ("accelerators", "gpus"):
        read = resources(f"{key}: {form}")
        assert [(a.name, a.count) for a in read.accelerators] == asks
        assert read.ordered is ordered


@pytest.mark.parametrize(
    ("form", "count", "low", "high", "vendor"),
    [("80GB+:8", 8, 80, None, None), ("80GB:8", 8, 80, 80, None), ("24gb", 1, 24, 24, None),
     ("nvidia:80GB", 1, 80, 80, "nvidia"), ("AMD:192GB+:8", 8, 192, None, "amd")],
)  # fmt: skip
def test_forms_by_memory(form: str, count: float, low: float, high: float | None, vendor: str | None) -> None:
    (ask,) = resources(f"accelerators: {form}").accelerators
    assert ask == AcceleratorAsk(name=None, count=count, min_memory_gib=low, max_memory_gib=high, vendor=vendor)


def test_a_memory_ask_matches_what_the_data_sheets_say() -> None:
    exactly, at_least = (parse_ask(t) for t in ("80GB:8", "80GB+:8"))
    assert {"H100", "A100-80GB"} <= set(matching(exactly))
    assert not {"H200", "B200", "A100", "L40S"} & set(matching(exactly))
    assert {"H100", "H200", "B200", "MI300X"} <= set(matching(at_least))
    assert set(matching(parse_ask("amd:80GB+"))) == {"MI300X", "MI325X", "MI355X"}
    assert matching(parse_ask("h100:8")) == ("H100",)


def test_any_of_is_the_cheapest_and_ordered_the_first_that_can_be_had() -> None:
    entries = "[{accelerators: H100:8, infra: aws}, {accelerators: {A100: 8, L4: 8}, cloud: GCP, region: us-east1}]"
    for key, ordered in (("any_of", False), ("ordered", True)):
        read = resources(f"{key}: {entries}")
        assert [(a.name, a.count, a.infra) for a in read.accelerators] == [
            ("H100", 8, "aws"),
            ("A100", 8, "gcp/us-east1"),
            ("L4", 8, "gcp/us-east1"),
        ]
        assert read.ordered is ordered and read.infra is None


def test_an_entry_without_accelerators_has_the_inherited_ones() -> None:
    read = resources("{accelerators: H100:8, any_of: [{infra: aws}, {infra: gcp}]}".replace("\n", " "), "")
    assert [(a.name, a.infra) for a in read.accelerators] == [("H100", "aws"), ("H100", "gcp")]


def test_the_same_choice_twice_is_one() -> None:
    assert len(resources("accelerators: [H100:8, h100:8]").accelerators) == 1


@pytest.mark.parametrize(
    ("form", "raw"),
    [("tpu-v5e:8", {"tpu-v5litepod-8": 1.0}), ("[tpu-v5e-8, V100:8]", ["tpu-v5litepod-8:1", "V100:8"]),
     ("v100:8", "v100:8"), ("{V100:8, H100:8}", {"V100:8": None, "H100:8": None})],
)  # fmt: skip
def test_skypilot_is_told_what_the_user_wrote_but_for_tpus_that_it_names_otherwise(form: str, raw: Any) -> None:
    assert resources(f"accelerators: {form}").raw == {"accelerators": raw}
    entry = resources(f"any_of: [{{accelerators: {form}}}]").raw
    assert entry == {"any_of": [{"accelerators": raw}]}


def test_accelerator_args_go_with_a_tpu() -> None:
    read = resources("{accelerators: tpu-v5e-8, accelerator_args: {runtime_version: v2-alpha-tpuv5}}")
    assert read.raw["accelerator_args"] == {"runtime_version": "v2-alpha-tpuv5"}


REFUSED: list[tuple[str, str]] = [
    ("V100:0", "count above 0"),
    ("V100:-1", "no number after its `:`"),
    ("{V100: -1}", "count above 0"),
    ("{V100: .nan}", "count above 0"),
    ("{V100: .inf}", "count above 0"),
    ("V100:nan", "no number after its `:`"),
    ("V100:1.5", "a whole count or a fraction below 1"),
    ("V100:800", "at most 64"),
    ("V100:eight", "no number after its `:`"),
    ("'V100:'", "expected NAME"),
    ("V100:8:2", "is not an accelerator"),
    ("{'V100:8': 8}", "count twice"),
    ("{V100: '8'}", "a number without quotes"),
    ("{V100: true}", "expected a count"),
    ("V10O:8", "did you mean `V100`?"),
    ("H100-80GB", "did you mean `H100`?"),
    ("A100-40GB", "did you mean `A100`?"),
    ("RTX-4090", "did you mean `RTX4090`?"),
    ("quantum", "no accelerator that a catalog has"),
    ("81GB", "did you mean `80GB`?"),
    ("80GB:0.5", "a whole count with a memory size"),
    ("nvidea:80GB", "did you mean `nvidia`?"),
    ("tpu-v6e-8:2", "expected one slice"),
    ("tpu-v6e:0.5", "a whole slice"),
    ("tpu-v9-8", "no accelerator that a catalog has"),
    ("8", "accelerators is `8`"),
    ("true", "accelerators is `true`"),
    ("[]", "is empty"),
    ("{}", "is empty"),
    ("[{H100: 8}]", "`any_of` or `ordered`"),
    ("[8]", "accelerators[0] is `8`"),
    ("{H100: {count: 8}}", "is a mapping, expected a count"),
]


@pytest.mark.parametrize(("form", "reason"), REFUSED, ids=[r[0] for r in REFUSED])
def test_other_forms_are_refused_with_a_reason(form: str, reason: str) -> None:
    with pytest.raises(SpecError) as refused:
        resources(f"accelerators: {form}")
    assert reason in str(refused.value)
    assert len(refused.value.mistakes) == 1
    assert refused.value.mistakes[0].line == 3


def test_ones_own_machines_may_name_their_accelerators_and_plan_says_so() -> None:
    for infra in ("k8s", "slurm/mine/gpu", "ssh/pool"):
        spec = load_text(f"infra: {infra}\nresources: {{accelerators: nvidia_h100_nvl_special:4}}", "x.yaml")
        assert spec.groups[0].resources.accelerators[0].name == "nvidia_h100_nvl_special"
        assert any("nvidia_h100_nvl_special" in g for g in spec.guesses)


def test_every_known_name_is_found_in_any_case() -> None:
    for name in known_names():
        if name.startswith("tpu-v") and not name.endswith(("slice", "device")):
            name = f"{name}-8"
        for written in (name, name.lower(), name.upper()):
            found = find(written)
            assert found is not None and found.name == name


@pytest.mark.parametrize("text", ["", ":", "::", ":8", " ", "a:b:c:d"])
def test_a_text_that_is_no_ask(text: str) -> None:
    with pytest.raises(InvalidInput, match="expected NAME"):
        parse_ask(text)
