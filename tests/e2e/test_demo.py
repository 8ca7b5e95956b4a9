"""The demo for real: real Ray, real tasks, a real SIGKILL. Milestones are read from what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from areal_sky.adapters.processes import marked

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]
AREAL_SKY = str(Path(sys.executable).with_name("areal-sky"))


def events(env: dict[str, str]) -> list[dict[str, Any]]:
    out = subprocess.run([AREAL_SKY, "events", "demo", "--json"], env=env, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in out.stdout.splitlines()]


def position(story: list[dict[str, Any]], event: str, after: int = 0, **fields: Any) -> int:
    """Where that event stands in the story; the test fails when it does not."""
    for index, e in enumerate(story[after:], after):
        if e["event"] == event and all(e.get(k) == v for k, v in fields.items()):
            return index
    pytest.fail(f"no {event} {fields} after event {after} of {[e['event'] for e in story]}")


def test_demo_tells_its_story_and_leaves_nothing(private_home: Path) -> None:
    env = {**os.environ, "AREAL_SKY_HOME": str(private_home), "COLUMNS": "80"}
    done = subprocess.run([AREAL_SKY, "demo", "--fast"], env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert not marked(str(private_home)), "processes of the demo are left"

    story = events(env)
    grown = position(story, "GroupDesired", group="rollout", by="policy")
    assert story[grown]["desired"] > 1 and "waiting" in story[grown]["reason"]
    lost = position(story, "ReplicaLost", after=grown)
    assert story[lost]["replica"].startswith("demo-rollout-")
    relaunched = position(story, "LaunchIntended", after=lost, group="rollout")
    shrunk = position(story, "GroupDesired", after=relaunched, group="rollout", desired=1, by="policy")
    position(story, "DrainStarted", after=shrunk)
    position(story, "ClusterDown", after=shrunk)

    out = done.stdout
    resumed = re.search(r"in its own words: resumed after batch (\d+)", out)
    assert resumed and int(resumed[1]) >= 3, "the killed rollout went on from its checkpoint"
    accuracies = [float(x) for x in re.findall(r"^eval .* accuracy ([\d.]+)$", out, re.M)]
    assert len(accuracies) == 2 and min(accuracies) > 0.3, "both models are far better than guessing"
    bill = subprocess.run([AREAL_SKY, "cost", "demo", "--json"], env=env, capture_output=True, text=True, check=True)
    assert json.loads(bill.stdout)["usd"] > 0
    too_wide = [line for line in out.splitlines() if len(line) > 80 and str(private_home) not in line]
    assert not too_wide, too_wide


def test_interrupted_demo_tears_down(private_home: Path) -> None:
    env = {**os.environ, "AREAL_SKY_HOME": str(private_home)}
    process = subprocess.Popen(
        [AREAL_SKY, "demo"], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    until_s = time.monotonic() + 60
    while not marked(str(private_home)):  # in the middle of `up`
        assert process.poll() is None and time.monotonic() < until_s
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130, out
    assert "tearing everything down" in out and "Traceback" not in out
    assert not marked(str(private_home)), out
    assert events(env)[-1]["event"] == "ClusterDown"


def test_demo_leaves_a_cluster_of_that_name_alone(private_home: Path) -> None:
    from areal_sky.adapters.store import EventStore
    from areal_sky.core.events import ClusterCreated

    folder = private_home / "clusters/demo"
    folder.mkdir(parents=True)
    EventStore(folder / "events.db").append(time.time(), ClusterCreated("demo"))
    env = {**os.environ, "AREAL_SKY_HOME": str(private_home)}
    done = subprocess.run([AREAL_SKY, "demo"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "areal-sky down demo" in done.stderr
    assert [e["event"] for e in events(env)] == ["ClusterCreated"]
