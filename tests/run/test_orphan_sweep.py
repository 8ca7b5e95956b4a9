"""The sweep over real processes and a real state folder; SkyPilot and EC2 as far as their ports go."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from areal_sky.adapters import localsweep, processes
from areal_sky.adapters.store import EventStore
from areal_sky.core.events import ClusterCreated, ClusterDown, DownRequested, GroupDesired, LaunchIntended
from areal_sky.core.model import NodeShape, NodeView
from areal_sky.core.nodeenv import NODE_MARK
from areal_sky.core.orphans import CLUSTER_LABEL, OWNER_LABEL, InstanceFound, Orphan, SkyFound
from areal_sky.core.view import HeadView
from areal_sky.errors import StateError, Unauthorized, Unreachable
from areal_sky.home import ClusterHome
from areal_sky.run import orphans
from areal_sky.run.orphans import Places, end, sweep
from areal_sky.run.skyside import owner
from areal_sky.ui.cli import orphans as cli
from areal_sky.ui.cli.main import cli as areal_sky

SLEEPS = "import subprocess, sys, time; subprocess.Popen(['sleep', '300']); time.sleep(300)"


class FakeSky:
    """Clusters that can be ended, or will not end."""

    def __init__(self, *clusters: SkyFound, stuck: bool = False, down: bool = False):
        self.there = {c.name: c for c in clusters}
        self.stuck, self.down = stuck, down
        self.ended: list[str] = []

    def clusters(self) -> tuple[SkyFound, ...]:
        if self.down:
            raise Unreachable("no API server answers")
        return tuple(self.there.values())

    def end(self, name: str) -> None:
        if self.stuck:
            raise StateError(f"`sky down {name}` ended, and SkyPilot still lists it")
        self.ended.append(name)
        del self.there[name]


class FakeEc2:
    def __init__(self, *instances: InstanceFound, problem: Exception | None = None):
        self.found, self.problem, self.ended = instances, problem, list[tuple[str, str]]()

    def instances(self) -> tuple[tuple[InstanceFound, ...], tuple[str, ...]]:
        if self.problem:
            raise self.problem
        return self.found, ("region ap-east-1: refused",)

    def end(self, instance_id: str, region: str) -> None:
        self.ended.append((instance_id, region))


def labelled(name: str, cluster: str, **more: object) -> SkyFound:
    return SkyFound(name, f"{name}-x", {CLUSTER_LABEL: cluster, **more}, time.time() - 3600, True)  # type: ignore[dict-item]


def nowhere() -> tuple[()]:
    return ()


@pytest.fixture
def live(private_home: Path) -> ClusterHome:
    return cluster("live")


def cluster(name: str, *, is_down: bool = False) -> ClusterHome:
    home = ClusterHome(name)
    home.create("{}")
    store = EventStore(home.events_db)
    events = [ClusterCreated(name), GroupDesired("main", 1, "", "spec")]
    store.append(1.0, *events, LaunchIntended(f"{name}-main-0", "main", 0, 1, "spot", 1.0, "")) if not is_down else (
        store.append(1.0, *events, DownRequested("", 0), ClusterDown())
    )
    store.close()
    return home


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    running: list[subprocess.Popen[bytes]] = []
    yield running
    for p in running:
        processes.kill([c for pids in processes.marked("/").values() for c in pids if os.getpgid(c) == p.pid])
        p.wait()


def node(started: list[subprocess.Popen[bytes]], folder: Path, replica: str, index: int = 0) -> subprocess.Popen[bytes]:
    """A process with a child, both with the mark of a pretend machine."""
    env = {**os.environ, NODE_MARK: f"{folder}::{replica}/{index}"}
    p = subprocess.Popen([sys.executable, "-c", SLEEPS], env=env, start_new_session=True)
    started.append(p)
    mark = env[NODE_MARK]
    until_s = time.monotonic() + 10
    while len(processes.marked(mark).get(mark, ())) < 2:
        assert time.monotonic() < until_s
        time.sleep(0.02)
    return p


def of(found: list[Orphan] | tuple[Orphan, ...], *folders: Path) -> list[Orphan]:
    """This test's own: other tests' leftovers on this machine are none of its business."""
    return [o for o in found if any(str(f) in h for f in folders for h in o.handle)]


def test_real_processes_of_lost_and_downed_clusters_are_found_and_ended(
    live: ClusterHome, tmp_path: Path, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_sky.core.orphans.GRACE_S", 0.0)
    downed, lost = cluster("downed", is_down=True), tmp_path / "gone" / "clusters" / "x"
    kept = node(started, live.dir, "live-main-0")
    node(started, downed.dir, "downed-main-0")
    ended = [node(started, lost, "x-main-0", i) for i in (0, 1)]
    places = Places(nodes=localsweep.pretend_nodes)
    found = of(sweep(places).finding.orphans, live.dir, downed.dir, lost)
    assert {(o.id, o.what, o.ripe) for o in found} == {
        ("downed-main-0", "2 processes", True), ("x-main-0", "4 processes", True)
    }  # fmt: skip
    for o in found:
        assert end(o, places) == "every process of it is gone"
    assert all(p.wait(5) == -9 for p in ended)
    assert kept.poll() is None
    assert of(sweep(places).finding.orphans, live.dir, downed.dir, lost) == []


def test_another_state_folders_nodes_are_its_own_business(
    live: ClusterHome, tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    other = tmp_path / "other" / "clusters" / "theirs"
    other.mkdir(parents=True)
    (other / "events.db").touch()
    node(started, other, "theirs-main-0")
    assert of(sweep(Places()).finding.orphans, other) == []


def test_it_never_ends_itself(tmp_path: Path, private_home: Path) -> None:
    """A task on an orphaned node may run the sweep."""
    mark = f"{tmp_path}/gone/clusters/x::x-main-0/0"
    code = (
        "import sys; from areal_sky.adapters.localsweep import end_marked, pretend_nodes\n"
        f"print(end_marked(({mark!r},)), [n for n in pretend_nodes() if n.folder.startswith({str(tmp_path)!r})])"
    )
    env = {**os.environ, NODE_MARK: mark}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[] []"), done.stderr


def test_a_place_that_cannot_be_asked_hides_nothing(live: ClusterHome) -> None:
    swept = sweep(Places(FakeSky(labelled("lost-main-0", "lost")), FakeEc2(problem=Unauthorized("no keys")), nowhere))
    assert [o.id for o in swept.finding.orphans] == ["lost-main-0"]
    assert swept.unasked == ("EC2: no keys",) and swept.sky_told


def test_without_skypilots_answer_instances_are_not_judged(live: ClusterHome) -> None:
    tags = {"skypilot-cluster-name": "x", CLUSTER_LABEL: "lost"}
    instance = InstanceFound("i-1", "us-east-1", "m5.large", "running", "on_demand", 1.0, tags)
    swept = sweep(Places(FakeSky(down=True), FakeEc2(instance), nowhere))
    assert swept.finding.orphans == () and not swept.sky_told
    assert "cannot be judged" in swept.unasked[-1]
    alone = sweep(Places(None, FakeEc2(instance), nowhere))  # SkyPilot was never here: it has no record for sure
    assert [o.id for o in alone.finding.orphans] == ["i-1"]


class FakeHead:
    """A head whose Ray has a node that nobody knows."""

    def __init__(self) -> None:
        self.evicted: list[str] = []

    def __enter__(self) -> FakeHead:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def view(self) -> HeadView:
        names = ("live-main-0", "ghost-main-0")
        nodes = (NodeView(f"n-{n}", "main", n, 0, NodeShape(), 0, 0, 0) for n in names)
        return HeadView(1.0, tuple(nodes), (), (), 0, 0)

    def evict(self, replica: str, reason: str) -> None:
        self.evicted.append(replica)


def test_a_ray_node_of_an_unknown_replica_takes_no_more_work(
    live: ClusterHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = FakeHead()
    monkeypatch.setattr(ClusterHome, "gateway", lambda self, right: head)
    (stray,) = sweep(Places(None, None, nowhere)).finding.orphans
    assert (stray.kind, stray.id) == ("ray", "ghost-main-0")
    assert "not ours to end" in end(stray, Places(None, None, nowhere))
    assert head.evicted == ["ghost-main-0"]


def test_owners_are_those_of_present_and_past_clusters(live: ClusterHome) -> None:
    past = cluster("past", is_down=True)
    mark = owner(past)
    past.archive(1e9)
    sky = FakeSky(labelled("past-main-0", "past", **{OWNER_LABEL: mark}), labelled("x", "y", **{OWNER_LABEL: "who"}))
    assert [o.certain for o in sweep(Places(sky, None, nowhere)).finding.orphans] == [True, False]


@pytest.fixture
def told(live: ClusterHome, monkeypatch: pytest.MonkeyPatch) -> FakeSky:
    """The command line over a fake SkyPilot: an orphan, one of another folder, one of somebody else, a young one."""
    sky = FakeSky(
        labelled("lost-main-0", "lost"),
        labelled("far-main-0", "far", **{OWNER_LABEL: "who"}),
        SkyFound("live-main-0", "", {}, 1.0, True, "bob"),
        SkyFound("new-main-0", "", {CLUSTER_LABEL: "new"}, time.time(), True),
    )
    monkeypatch.setattr(orphans, "usual_places", lambda: Places(sky, FakeEc2(problem=Unauthorized("no keys")), nowhere))
    return sky


def run(*args: str, answer: str = "") -> tuple[int, str]:
    done = CliRunner().invoke(areal_sky, args, input=answer, standalone_mode=False)
    code = done.exception.code if isinstance(done.exception, SystemExit) else done.exit_code
    return int(code or 0), done.output


def test_status_shows_and_ends_nothing(told: FakeSky) -> None:
    code, out = run("status", "--orphans")
    assert code == 0 and told.ended == []
    for words in (
        "SkyPilot cluster lost-main-0", "no state here knows cluster lost", "somebody else made it",
        "cluster live: its controller is gone", "not looked at: EC2: no keys", "price unknown",
    ):  # fmt: skip
        assert words in out


def test_down_asks_and_ends_what_is_certain(told: FakeSky) -> None:
    code, out = run("down", "--orphans", answer="n\n")
    assert code == 1 and told.ended == []
    code, out = run("down", "--orphans", "--yes")
    assert (code, told.ended) == (0, ["lost-main-0"]), out
    assert "Nothing can be drained" in out and "SkyPilot lists it no more" in out
    assert "far-main-0: left" in out and "new-main-0: younger than" in out


def test_down_ends_a_doubtful_one_that_is_named(told: FakeSky) -> None:
    assert run("down", "--orphans", "far-main-0", "-y")[0] == 0
    assert told.ended == ["far-main-0"]
    code, out = run("down", "--orphans", "live-main-0", "-y")
    assert code == 1 and "no orphan is called live-main-0" in out


def test_what_will_not_end_is_said(told: FakeSky) -> None:
    told.stuck = True
    code, out = run("down", "--orphans", "-y")
    assert code == 1 and "lost-main-0: not ended" in out


def test_json(told: FakeSky) -> None:
    import json

    raw = json.loads(run("status", "--orphans", "--json")[1])
    assert [o["id"] for o in raw["orphans"]] == ["lost-main-0", "far-main-0", "new-main-0"]
    assert raw["not_looked_at"] == ["EC2: no keys"]
    assert set(cli.KINDS) == {"skypilot", "ec2", "process", "ray"}
