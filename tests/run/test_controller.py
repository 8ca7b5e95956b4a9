from __future__ import annotations

from pathlib import Path

import pytest

from areal_sky.adapters.catalog import shipped_offers
from areal_sky.adapters.fakes import FakeClock, FakeCloud, FakeHead
from areal_sky.adapters.store import EventStore
from areal_sky.core.events import (
    CloudAnswers,
    CloudSilent,
    ClusterCreated,
    DownRequested,
    GroupDesired,
    LaunchAccepted,
    LaunchFailed,
    LaunchIntended,
    ReplicaGone,
    ReplicaLost,
    ScalingHeld,
)
from areal_sky.core.launch import plan
from areal_sky.core.model import MOST_FAULTS, Bundle, GangDemand, ReplicaState
from areal_sky.core.reconcile import Patience
from areal_sky.errors import StateError
from areal_sky.run.controller import Controller, first_wishes
from areal_sky.run.plugins import scaling_policy
from areal_sky.spec import load_text

SPEC = """
name: c
infra: local
node_groups:
  trainer: {resources: {accelerators: "V100:8", cpus: 8, memory: 32}, replicas: 1}
  rollout: {resources: {accelerators: "V100:8", cpus: 8, memory: 32}, min_replicas: 1, max_replicas: 3}
scaling: {cooldown: 5s}
"""
ROLLOUTS = [f"c-rollout-{i}" for i in range(4)]
PATIENCE = Patience(vanish_s=5, join_s=60, lost_s=5, drain_s=20, backoff_s=2, backoff_max_s=30)


class Bench:
    """A controller over a real store, a fake cloud and a fake head."""

    def __init__(self, folder: Path, extra: str = ""):
        self.spec = load_text(SPEC + extra, "c.yaml", now_s=0.0)
        self.plan = plan(self.spec, shipped_offers())
        self.clock = FakeClock(1000.0)
        self.store = EventStore(folder / "events.db")
        self.cloud = FakeCloud(self.clock, boot_s=2.0, stop_s=1.0)
        self.head = FakeHead(self.cloud, utilization=dict.fromkeys(ROLLOUTS, 0.5))
        if not self.store.read():
            self.store.append(self.clock.now(), ClusterCreated("c"), *first_wishes(self.plan))
        self.restart()

    def restart(self) -> None:
        self.controller = Controller(
            self.spec, self.plan, self.store, self.cloud, self.head, self.clock,
            scaling_policy(self.spec.scaling), PATIENCE,
        )  # fmt: skip

    def run(self, seconds: float, step_s: float = 0.5) -> None:
        for _ in range(int(seconds / step_s)):
            self.clock.advance(step_s)
            self.controller.tick()

    def ready(self, group: str) -> list[str]:
        replicas = self.controller.state.replicas.values()
        return sorted(r.name for r in replicas if r.group == group and r.state is ReplicaState.READY)

    def launched(self) -> list[str]:
        return sorted(name for what, name in self.cloud.calls if what == "launch")

    def events(self, kind: type) -> list:  # type: ignore[type-arg]
        return [r.event for r in self.store.read() if isinstance(r.event, kind)]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    bench.run(10)
    return bench


def gang(gpus: float = 8.0, bundles: int = 1, task_id: str = "t1") -> GangDemand:
    return GangDemand(task_id, "rollout", bundles, Bundle(gpus=gpus, cpus=1), (), 5.0, 10.0)


def test_comes_up_and_then_rests(bench: Bench) -> None:
    assert bench.ready("trainer") == ["c-trainer-0"] and bench.ready("rollout") == ["c-rollout-0"]
    version = bench.controller.state.version
    bench.run(3)
    assert [type(r.event) for r in bench.store.read(version) if not isinstance(r.event, ScalingHeld)] == []


def test_grows_because_work_waits_and_says_so(bench: Bench) -> None:
    bench.head.running = {"c-rollout-0": 1}
    bench.head.demand = (gang(),)
    bench.run(10)
    assert len(bench.ready("rollout")) == 2
    (grown,) = [e for e in bench.events(GroupDesired) if e.by == "policy"]
    assert grown.desired == 2 and "wait" in grown.reason


def test_a_silent_cloud_is_said_and_nothing_is_decided_until_it_answers(bench: Bench) -> None:
    bench.cloud.vanish("c-rollout-0")
    bench.cloud.silent = "no API server"
    calls = len(bench.cloud.calls)
    bench.run(5)
    assert not bench.events(CloudSilent)
    bench.run(30)
    assert bench.events(CloudSilent) == [CloudSilent("no API server")]
    assert bench.controller.state.cloud_problem == "no API server"
    assert len(bench.cloud.calls) == calls and not bench.events(ReplicaLost)
    bench.cloud.silent = ""
    bench.run(10)
    assert len(bench.events(CloudAnswers)) == 1 and bench.controller.state.cloud_problem == ""
    assert len(bench.events(ReplicaLost)) == 1 and len(bench.ready("rollout")) == 1


def test_a_launch_is_accepted_only_once_its_request_is_known(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    known = FakeCloud.launch
    monkeypatch.setattr(FakeCloud, "launch", lambda self, request: "")
    bench.store.append(bench.clock.now(), GroupDesired("rollout", 2, "test", by="user"))
    accepted = len(bench.events(LaunchAccepted))
    bench.run(5)
    assert len(bench.events(LaunchAccepted)) == accepted
    assert [r.state for r in bench.controller.state.replicas.values()].count(ReplicaState.QUEUED) == 1
    monkeypatch.setattr(FakeCloud, "launch", known)
    bench.run(10)
    assert len(bench.events(LaunchAccepted)) == accepted + 1 and len(bench.ready("rollout")) == 2


def test_a_replica_that_misses_nodes_is_looked_at_anew(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeHead, "_nodes", lambda self, replica, plan: [])
    bench.run(2)
    assert ("doubt", "c-rollout-0") in bench.cloud.calls


def test_never_above_max_however_much_waits(bench: Bench) -> None:
    bench.head.demand = tuple(gang(task_id=f"t{i}") for i in range(50))
    bench.head.running = {"c-rollout-0": 1}
    bench.run(120)
    assert len(bench.ready("rollout")) == 3


def test_shrinks_the_idle_one_and_keeps_min(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "")
    bench.store.append(bench.clock.now(), GroupDesired("rollout", 3, "by hand", "user"))
    bench.run(20)
    bench.head.running = {"c-rollout-2": 1}
    bench.head.utilization = {"c-rollout-0": 0.0, "c-rollout-1": 0.0, "c-rollout-2": 0.9}
    bench.run(900, step_s=1.0)
    assert bench.ready("rollout") == ["c-rollout-2"]
    assert ("terminate", "c-rollout-2") not in bench.cloud.calls


def test_unknown_telemetry_never_shrinks(bench: Bench) -> None:
    bench.store.append(bench.clock.now(), GroupDesired("rollout", 2, "by hand", "user"))
    bench.head.utilization = {}
    bench.run(900, step_s=1.0)
    assert len(bench.ready("rollout")) == 2


def test_budget_holds_growth(tmp_path: Path) -> None:
    trial = Bench(tmp_path / "a")
    one = sum(g.offer.price_usd_per_hour or 0 for g in (trial.plan.head, *trial.plan.groups))
    bench = Bench(tmp_path / "b", f"budget: {{max_hourly_usd: {one + 1:.2f}}}\n")
    bench.run(10)
    bench.head.running = {"c-rollout-0": 1}
    bench.head.demand = (gang(),)
    bench.run(60)
    assert bench.ready("rollout") == ["c-rollout-0"]
    assert any("budget.max_hourly_usd" in e.reason for e in bench.events(ScalingHeld))


def test_reclaimed_replica_is_replaced(bench: Bench) -> None:
    bench.cloud.vanish("c-rollout-0")
    bench.run(15)
    assert len(bench.ready("rollout")) == 1
    assert ReplicaGone("c-rollout-0") in bench.events(ReplicaGone)


def test_a_replica_that_somebody_evicts_is_ended_and_replaced(bench: Bench) -> None:
    """The head gives it no new work, so it would be paid for nothing for ever."""
    bench.head.drain("c-rollout-0", "reclaim notice", 0.0)
    bench.run(20)
    assert bench.ready("rollout") == ["c-rollout-1"]
    assert ("terminate", "c-rollout-0") in bench.cloud.calls


def test_work_of_a_lost_node_waits_for_the_replacement_and_grows_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray sees a death before the cloud does: meanwhile the work waits beside a replica that counts as ready."""
    bench.head.demand = (gang(),)
    seen = FakeHead._nodes
    monkeypatch.setattr(FakeHead, "_nodes", lambda self, replica, plan: (
        [] if replica == "c-rollout-0" else seen(self, replica, plan)
    ))  # fmt: skip
    bench.run(3)
    bench.cloud.vanish("c-rollout-0")
    bench.run(3)
    bench.head.demand = ()
    bench.run(15)
    assert not [e for e in bench.events(GroupDesired) if e.by == "policy"]
    assert bench.ready("rollout") == ["c-rollout-1"]


def test_no_capacity_is_retried_later_not_every_tick(bench: Bench) -> None:
    bench.cloud.refuse = "no on_demand capacity"
    bench.store.append(bench.clock.now(), GroupDesired("rollout", 2, "by hand", "user"))
    bench.run(120)
    failures = bench.events(LaunchFailed)
    assert MOST_FAULTS < len(failures) <= 12, "not every tick, and want of capacity is never given up"
    assert "no on_demand capacity" in failures[0].reason
    bench.cloud.refuse = ""
    bench.run(60)
    assert len(bench.ready("rollout")) == 2


def test_restart_at_every_tick_launches_nothing_twice(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.head.demand = (gang(),)
    bench.head.running = {"c-rollout-0": 1}
    for _ in range(60):
        bench.run(0.5)
        bench.restart()
    assert bench.launched() == sorted(set(bench.launched()))
    assert len(bench.ready("rollout")) == 2


def test_down_from_another_process(bench: Bench) -> None:
    EventStore(bench.store._db.path).append(bench.clock.now(), DownRequested("asked for", 5.0))
    bench.run(30)
    assert bench.controller.done and bench.cloud.machines() == ()


def test_without_a_record_there_is_no_launch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.store.append(bench.clock.now(), GroupDesired("rollout", 2, "by hand", "user"))

    def full(*_: object) -> None:
        raise StateError("disk full")

    monkeypatch.setattr(bench.store, "append_if", full)
    with pytest.raises(StateError):
        bench.run(5)
    assert bench.launched() == ["c-head-0", "c-rollout-0", "c-trainer-0"]
    assert "c-rollout-1" not in {e.replica for e in bench.events(LaunchIntended)}
