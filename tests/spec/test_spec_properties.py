"""Whatever is fed in, the only thing that comes out is a spec or a SpecError that points into the text."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_sky.errors import SpecError
from areal_sky.spec import load_text
from areal_sky.spec.marks import Notes, parse, plain
from tests.spec.test_spec_load import ARTICLE, FULL, NOW_S

WORDS = [
    "resources", "accelerators", "V100:8", "80GB+", "node_groups", "trainer", "replicas", "min_replicas",
    "market", "spot", "scheduling", "priority", "model_type", "weight", "budget", "deadline", "2h", "100ms",
    "alerts", "when", "infra", "aws", "local", "name", "envs", "secrets", "run", "any_of", "ordered", "&a",
    "*a", "<<:", "[", "]", "{", "}", ":", "-", ",", "?", "|", ">", '"', "'", "#", "\t", "\n", "---", "...",
    "!x", "no", "1e9", ".nan", "0x1F", "1:30", "2026-01-01", "~", "null", "-1", "0.5",
]  # fmt: skip


def outcome(text: str) -> object:
    try:
        return load_text(text, "f.yaml", NOW_S)
    except SpecError as e:
        assert e.mistakes
        for m in e.mistakes:
            assert 1 <= m.line <= text.count("\n") + text.count("\r") + 3
            assert m.column >= 1 and "\n" not in m.what and m.what
        return e


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    outcome(text)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=60).map(" ".join))
def test_any_yaml_like_text_is_read_or_refused(text: str) -> None:
    outcome(text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([w for w in WORDS if w.strip()]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS[:24]), inner, max_size=4),
    max_leaves=12,
)
BLOCKS = [
    "name", "infra", "resources", "num_nodes", "node_groups", "models", "scheduling", "scaling", "spot",
    "budget", "telemetry", "alerts", "head", "idle_shutdown", "envs", "secrets", "service", "config",
    "workdir",
]  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.sampled_from(BLOCKS), VALUES, max_size=5))
def test_any_values_in_any_block_are_read_or_refused(data: dict[str, object]) -> None:
    outcome(yaml.safe_dump(data, allow_unicode=True))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, len(FULL) - 1), st.integers(0, 40), st.sampled_from(["", " ", ":", "-", "x", "\n", "}", '"', "é"])
)
def test_a_spec_with_a_slip_of_the_finger_is_read_or_refused(at: int, cut: int, put: str) -> None:
    outcome(FULL[:at] + put + FULL[at + cut :])


@pytest.mark.parametrize("text", [ARTICLE, FULL, "a: {b: [1, 2.5, x, no, ~, 0o7, 0x1F, 1_000, 1:30, '8', on]}"])
def test_plain_data_are_what_skypilot_would_read(text: str) -> None:
    """Timestamps stay text, all else is as `yaml.safe_load` has it."""
    node = parse(text.replace("2026-12-24T08:00:00Z", "'t'"), Notes("x"))
    assert node is not None
    assert plain(node) == yaml.safe_load(text.replace("2026-12-24T08:00:00Z", "'t'"))


def test_the_same_text_gives_the_same_spec() -> None:
    assert load_text(FULL, "f", NOW_S) == load_text(FULL, "f", NOW_S)
