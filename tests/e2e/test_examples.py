"""The examples run as written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_sky.adapters.processes import marked

EXAMPLES = Path(__file__).parents[2] / "examples"
AREAL_SKY = str(Path(sys.executable).with_name("areal-sky"))


SPECS = sorted(p for p in EXAMPLES.glob("*.yaml") if not p.name.endswith("-tasks.yaml"))  # those are for `submit`


@pytest.mark.parametrize("spec", SPECS, ids=lambda p: p.name)
def test_every_example_spec_is_right(spec: Path) -> None:
    done = subprocess.run([AREAL_SKY, "check", str(spec)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


@pytest.mark.e2e
def test_python_api_example(private_home: Path) -> None:
    env = {**os.environ, "AREAL_SKY_HOME": str(private_home)}
    script = str(EXAMPLES / "04-python-api.py")
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "t2 succeeded - the numbers up to 1000 add up to 500500" in done.stdout
    assert "replicas: python-api-head-0, python-api-rollout-0, python-api-rollout-1" in done.stdout
    assert done.stdout.endswith("left behind: nothing\n")
    assert not marked(str(private_home))
