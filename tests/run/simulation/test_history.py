"""`simulate --from CLUSTER`: what a cluster has recorded, under another policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from areal_sky.core.events import (
    ClusterCreated,
    ClusterDown,
    DownRequested,
    LaunchAccepted,
    LaunchIntended,
    ReplicaGone,
    ReplicaLost,
    ReplicaProvisioned,
    ReplicaReady,
    TerminateIntended,
)
from areal_sky.core.model import Bundle
from areal_sky.core.taskevents import Ended, Place, Placed, Started, Starting, Submitted, TaskEvent
from areal_sky.core.taskmodel import TaskSpec, TaskState
from areal_sky.core.usage import Hold, Usage, usage_to_json
from areal_sky.home import ClusterHome
from areal_sky.run.journal import Journal
from areal_sky.run.simulation import study
from areal_sky.run.supervise import SpecSource
from areal_sky.ui.cli.simulate import simulate

SPEC = """
name: night
infra: aws/us-east-1
node_groups:
  rollout: {resources: {accelerators: "A100-80GB:8"}, min_replicas: 1, max_replicas: 3, market: spot}
"""
T0 = 1_760_000_000.0


@pytest.fixture
def night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterHome:
    """A cluster that ran for two hours; its spot machine took 100 s to come up and was lost once."""
    monkeypatch.setenv("AREAL_SKY_HOME", str(tmp_path / "home"))
    (tmp_path / "night.yaml").write_text(SPEC)
    cluster = ClusterHome("night")
    cluster.create(SpecSource.read(tmp_path / "night.yaml", None).to_json())
    from areal_sky.adapters.store import EventStore

    store = EventStore(cluster.events_db)
    store.append(T0, ClusterCreated("night"))
    for at_s in (T0, T0 + 3600):
        store.append(at_s, LaunchIntended("r0", "rollout", 0, 1, "spot", 10.0, "", 30.0), LaunchAccepted("r0", "x"))
        store.append(at_s + 100, ReplicaProvisioned("r0"))
        store.append(at_s + 120, ReplicaReady("r0"))
        store.append(at_s + 3000, ReplicaLost("r0", "gone"), TerminateIntended("r0", ""), ReplicaGone("r0"))
    store.append(T0 + 7200, DownRequested("", 0.0), ClusterDown())
    store.close()
    return cluster


def test_the_journal_gives_tasks_as_they_came_and_the_events_the_luck(night: ClusterHome) -> None:
    journal = Journal(night.head_dir / "journal.db")
    spec = TaskSpec(kind="train", command="x", bundles=1, bundle=Bundle(8, 1, 0), deadline_s=T0 + 5000)
    place = (Place("n", "r0", 0, ((0, 1.0),)),)
    journal.append([
        TaskEvent(T0 + 10, "t1", Submitted(1, spec)), TaskEvent(T0 + 130, "t1", Placed(1, place)),
        TaskEvent(T0 + 130, "t1", Starting()), TaskEvent(T0 + 140, "t1", Started()),
        TaskEvent(T0 + 1140, "t1", Ended(TaskState.SUCCEEDED, "")),
    ])  # fmt: skip
    made = study.of_cluster("night", 0)  # while the head has its journal open
    journal.close()
    (task,) = made.scenario.tasks
    assert (task.submitted_s, task.duration_s, task.gpus, task.deadline_s) == (10, 1000, 8, 5000)
    world = made.scenario.world
    assert world.launch_median_s == 100 and world.launch_sigma == 0
    assert world.reclaims_per_hour == pytest.approx(2 / (6000 / 3600))
    truth = made.truth[0]
    assert truth.points[-1].cost_usd == pytest.approx(10 * 6000 / 3600)
    assert max(p.gpus["busy"] for p in truth.points) == 8 and truth.points[100].gpus["idle"] in (0, 8)
    replayed = made.run("on_demand")
    assert replayed.tasks[0].outcome == "succeeded" and replayed.reclaims == 0


def test_without_a_journal_who_held_what_is_enough(night: ClusterHome) -> None:
    with pytest.raises(Exception, match="there is nothing to replay"):
        study.of_cluster("night", 0)
    hold = Hold("t7", 1, "sweep", "eval", "r0", 0, 4.0, 2.0, 8.0, 96.0, T0 + 200, T0 + 800)
    (night.dir / "usage.json").write_text(json.dumps(usage_to_json(Usage(T0 + 900, (hold,)))))
    (task,) = study.of_cluster("night", 0).scenario.tasks
    assert (task.submitted_s, task.duration_s, task.gpus, task.kind) == (200, 600, 4, "eval")
    done = CliRunner().invoke(simulate, ["--from", "night", "--compare", "spec,on_demand", "--json"])
    assert done.exit_code == 0 and [json.loads(x)["policy"] for x in done.output.splitlines()] == ["spec", "on_demand"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["x.yaml", "--policy", "fifi"], "did you mean `fifo`"),
        (["x.yaml", "--world", "clam"], "did you mean `calm`"),
        ([], "expected a spec FILE, or --from CLUSTER"),
        (["x.yaml", "--policy", "spot", "--compare", "spec"], "name all policies with --compare"),
        (["--from", "nobody"], "no cluster 'nobody'"),
        (["x.yaml", "--workload", "missing.csv"], "cannot be read"),
    ],
)
def test_wrong_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AREAL_SKY_HOME", str(tmp_path))
    (tmp_path / "x.yaml").write_text(SPEC.replace("night", "x"))
    done = CliRunner().invoke(simulate, arguments)
    assert done.exit_code != 0 and told in str(done.exception)
