"""`kill -9` of the controller between intent and launch, between launch and record, during drain and termination."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest
from ending import end_everything

from areal_sky.adapters import processes
from areal_sky.cluster import Cluster
from areal_sky.core.events import LaunchAccepted, LaunchIntended
from areal_sky.run import supervise

pytestmark = pytest.mark.e2e
GONE = -1
CRASHER = Path(__file__).with_name("crashing_controller.py")

SPEC = """
name: crash
infra: local
head: {resources: {cpus: 1, memory: 2}}
resources: {accelerators: "V100:2", cpus: 2, memory: 4}
node_groups:
  rollout: {min_replicas: 1, max_replicas: 3}
scaling: {policy: fixed}
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("AREAL_SKY_HOME", str(tmp_path / "home"))
    spec = tmp_path / "crash.yaml"
    spec.write_text(SPEC)
    cluster = Cluster.create(spec)
    yield cluster
    end_everything(tmp_path / "home")


def crash(point: str, replica: str) -> None:
    """Runs a controller until it has killed itself there."""
    done = subprocess.run(
        [sys.executable, str(CRASHER), "crash", point, replica], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == -9, f"{point} {replica}: {done.stderr[-2000:]}"


def shells(cluster: Cluster) -> Counter[str]:
    """How many supervising shells each node has: launching twice would make two."""
    found: dict[int, str] = {}
    for mark, pids in processes.marked(f"{cluster.home.dir}::").items():
        for pid in pids:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if command.startswith(b"/bin/sh\0-c\0while"):
                found[pid] = mark.partition("::")[2]
    # A shell that is about to start its command is two for a moment: itself and the child that it has forked.
    return Counter(node for pid, node in found.items() if _parent(pid) not in (*found, GONE))


def _parent(pid: int) -> int:
    try:
        return psutil.Process(pid).ppid()
    except psutil.NoSuchProcess:
        return GONE


def test_a_crash_at_any_point_leaks_and_repeats_nothing(cluster: Cluster) -> None:
    crash("before-launch", "crash-head-0")
    assert shells(cluster) == {}
    crash("after-launch", "crash-head-0")
    assert shells(cluster) == {"crash-head-0/0": 1}
    crash("after-launch", "crash-rollout-0")
    assert shells(cluster) == {"crash-head-0/0": 1, "crash-rollout-0/0": 1}

    supervise.start_controller(cluster.home)
    cluster.wait_ready(timeout_s=60)
    events = [r.event for r in cluster.events()]
    intended = Counter(e.replica for e in events if isinstance(e, LaunchIntended))
    assert intended == {"crash-head-0": 1, "crash-rollout-0": 1}
    adopted = {e.replica for e in events if isinstance(e, LaunchAccepted) and e.adopted}
    assert adopted == {"crash-head-0", "crash-rollout-0"}
    assert set(shells(cluster).values()) == {1}

    cluster.grow("rollout")
    cluster.wait_ready(timeout_s=60)
    stop_controller(cluster)
    cluster._append(_fewer())
    crash("after-drain", "crash-rollout-1")
    crash("before-terminate", "crash-rollout-1")
    assert "crash-rollout-1/0" in shells(cluster)
    crash("after-terminate", "crash-rollout-1")
    supervise.start_controller(cluster.home)
    cluster.wait_ready(timeout_s=60)
    assert shells(cluster) == {"crash-head-0/0": 1, "crash-rollout-0/0": 1}
    lines = [x for x in cluster.state().ledger if x.replica == "crash-rollout-1"]
    assert len(lines) == 1

    assert cluster.down(drain_s=0, timeout_s=60) == []
    assert processes.marked(f"{cluster.home.dir}::") == {}
    assert all(x.until_s is not None for x in cluster.state().ledger)


def _fewer():  # type: ignore[no-untyped-def]
    from areal_sky.core.events import GroupDesired

    return GroupDesired("rollout", 1, "test", "user", victims=("crash-rollout-1",))


def stop_controller(cluster: Cluster) -> None:
    """SIGKILL to the running controller, by the pid in its own event."""
    from areal_sky.core.events import ControllerStarted

    pid = [r.event.pid for r in cluster.events() if isinstance(r.event, ControllerStarted)][-1]
    processes.kill([pid])
    while supervise.controller_runs(cluster.home):
        pass
