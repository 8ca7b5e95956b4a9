"""Policies by name: presets, built-ins, the user's own; and the guide to writing one works as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from areal_sky.core.model import GroupPlan, NodeShape, Offer
from areal_sky.core.scaling import ScalingContext, decide
from areal_sky.core.telemetry import Validity
from areal_sky.core.view import ReplicaLoad
from areal_sky.data import data_dir
from areal_sky.errors import InvalidInput
from areal_sky.run.plugins import policy_names, scaling_policy
from areal_sky.spec.cluster import ScalingSpec

NOW_S = 1000.0
PRESETS = sorted((data_dir("policies") / "scaling").glob("*.yaml"))


def context(idle: int = 0, busy: int = 0, starting: int = 0, idle_s: float = 999.0, **more) -> ScalingContext:
    shape = NodeShape(gpus=8, cpus=8)
    group = GroupPlan("g", True, 0, 9, 1, "spot", 0, shape, Offer("aws", None, None, "x", shape, "spot", 1.0, "test"))
    loads = [ReplicaLoad(f"c-g-{i}", "g", 1, 0, 0.0, Validity.KNOWN, 1.0, NOW_S - idle_s) for i in range(idle)]
    loads += [ReplicaLoad(f"c-g-{9 + i}", "g", 1, 1, 0.9, Validity.KNOWN, 1.0, None) for i in range(busy)]
    fields = {
        "desired": idle + busy + starting, "demand": (), "target_utilization": 0.85, "cooldown_s": 60.0,
        "idle_s": 300.0, "last_grow_s": None, "last_shrink_s": None,
    } | more  # fmt: skip
    return ScalingContext(
        now_s=NOW_S, group=group, ready=idle + busy, starting=starting, loads=tuple(loads), **fields
    )


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_every_preset_is_a_policy_and_comments_each_number(path: Path):
    scaling_policy(ScalingSpec(policy=path.stem))
    for line in path.read_text().splitlines():
        key = line.partition(":")[0]
        if line and not line.startswith("#") and key != "kind":
            assert "#" in line, f"{path.name}: no comment on {key}"
    assert "kind" in yaml.safe_load(path.read_text())


def test_all_names_can_be_loaded():
    assert {"balance", "frugal", "fixed", "demand_and_utilization", "demand_only"} <= set(policy_names())
    for name in policy_names():
        scaling_policy(ScalingSpec(policy=name))


def test_the_default_policy_shrinks_what_is_idle():
    assert decide(scaling_policy(ScalingSpec()), context(idle=2)).desired == 0
    assert decide(scaling_policy(ScalingSpec(policy="fixed")), context(idle=2)).desired == 2


def test_options_of_the_spec_go_over_the_presets_numbers():
    policy = scaling_policy(ScalingSpec(policy="balance", options={"shrink_at_most": 1}))
    assert decide(policy, context(idle=3)).desired == 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"policy": "balanse"}, "scaling.policy: there is no policy 'balanse'; did you mean `balance`?"),
        ({"policy": "../spot/x"}, "scaling.policy: there is no policy '../spot/x'; known are balance"),
        ({"policy": "balance", "options": {"speed": 3}}, "scaling.policy balance: unknown option `speed`"),
        ({"policy": "fixed", "options": {"x": 1}}, "unknown option `x`; options: none"),
        ({"policy": "nowhere_at_all:f"}, "cannot import 'nowhere_at_all': ModuleNotFoundError"),
        ({"policy": "os:getcwdd"}, "'os' has no 'getcwdd'; did you mean `getcwd`?"),
        ({"policy": "os:sep"}, "'os:sep' is a str, not a function"),
        ({"policy": "os:"}, "must read module:function"),
        ({"policy": "shutil:which", "options": {"x": 1}}, "cannot be called with (context, x=)"),
    ],
)
def test_mistakes_have_words(spec, message):
    with pytest.raises(InvalidInput) as e:
        scaling_policy(ScalingSpec(**spec))
    assert message in str(e.value)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder for the user's modules; what was imported from it is forgotten."""
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_module_that_does_not_import_is_the_users_mistake(here):
    (here / "broken_policy.py").write_text("raise RuntimeError('no such table')")
    with pytest.raises(InvalidInput, match="cannot import 'broken_policy': RuntimeError: no such table"):
        scaling_policy(ScalingSpec(policy="broken_policy:f"), here)


def test_the_guides_policy_works_as_written(here):
    guide = (data_dir("policies") / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", guide, re.DOTALL).group(1)
    block = re.search(r"```yaml\n(.*?)```", guide, re.DOTALL).group(1)
    (here / "spare.py").write_text(code)
    scaling = yaml.safe_load(block)["scaling"]
    assert scaling["options"] == {"spare": 2}
    one = scaling_policy(ScalingSpec(policy=scaling["policy"]), here)
    two = scaling_policy(ScalingSpec(policy=scaling["policy"], options=scaling["options"]), here)
    assert decide(one, context(busy=3)).desired == 4
    assert decide(two, context(busy=3)).desired == 5
    assert decide(two, context(busy=3, idle=1, starting=1)).desired == 5  # as it is: one empty, one on its way
    assert decide(one, context(busy=1, idle=3)).victims == ("c-g-0", "c-g-1")
    assert decide(one, context(busy=1, idle=3, idle_s=1)).desired == 4  # not idle for long enough
    assert decide(one, context(busy=9)).desired == 9  # held at max by the guards
    assert len(code.strip().splitlines()) <= 20
