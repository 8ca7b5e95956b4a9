"""A launch that fails after its machines exist: said with its reason, cleaned up, tried again later, and all gone."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from areal_sky.core.events import LaunchFailed, ReplicaGone
from areal_sky.home import ClusterHome
from tests.testbed.testbed import Testbed, until

SPEC = """\
name: broken
infra: {infra}
head:
  resources: {{cpus: 1}}
resources: {{accelerators: "{gpu}:1", cpus: 1}}
num_nodes: 2
setup: '[ "$SKYPILOT_SETUP_NODE_RANK" = 0 ] || {{ echo no disk here; exit 3; }}'
"""


@pytest.mark.timeout(1800)
def test_a_setup_that_fails_on_one_of_two_machines(clean_testbed: Testbed, tmp_path: Path) -> None:
    bed, spec = clean_testbed, tmp_path / "broken.yaml"
    spec.write_text(SPEC.format(infra=bed.infra, gpu=bed.accelerators.partition(":")[0]))
    state = tmp_path / "areal_sky_home"
    home = ClusterHome("broken", state / "clusters/broken")
    areal_sky = functools.partial(bed.areal_sky, state)

    def events(kind: type) -> list[str]:
        return [r.event.replica for r in home.records() if isinstance(r.event, kind)]

    areal_sky("up", str(spec), "-d")
    try:
        until(lambda: events(LaunchFailed) and events(ReplicaGone), 600, what=lambda: areal_sky("events", "broken"))
        failed = next(r.event for r in home.records() if isinstance(r.event, LaunchFailed))
        assert failed.replica == "broken-main-0" and "FAILED_SETUP" in failed.reason
        assert "FAILED_SETUP" in areal_sky("events", "broken") and "broken-main-0" in events(ReplicaGone)
    finally:
        areal_sky("down", "broken", "--drain", "1s")
