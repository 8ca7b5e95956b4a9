from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from areal_sky.adapters.catalog import shipped_offers
from areal_sky.adapters.skypilot.sweep import NamesAhead, Taken
from areal_sky.adapters.store import EventStore
from areal_sky.core.events import ClusterCreated, ClusterDown, DownRequested
from areal_sky.core.launch import plan
from areal_sky.core.model import LaunchPlan
from areal_sky.errors import AlreadyExists
from areal_sky.home import ClusterHome
from areal_sky.run.controller import first_wishes
from areal_sky.run.names import check_names, names_ahead
from areal_sky.run.supervise import SpecSource
from areal_sky.spec import load_text
from areal_sky.spec.cluster import ClusterSpec


def text(name: str, group: str, infra: str = "aws/us-east-1") -> str:
    return (
        f"name: {name}\ninfra: {infra}\nnode_groups:\n  {group}: {{resources: {{accelerators: V100:8}}, replicas: 1}}\n"
    )


def up(name: str, group: str, infra: str = "aws/us-east-1", down: bool = False) -> None:
    source = SpecSource("x.yaml", text(name, group, infra), None, 0.0)
    _, launch = planned(name, group, infra)
    home = ClusterHome(name)
    home.create(json.dumps(asdict(source)))
    store = EventStore(home.events_db)
    store.append(1.0, ClusterCreated(name), *first_wishes(launch))
    if down:
        store.append(2.0, DownRequested("", 0), ClusterDown())
    store.close()


def planned(name: str, group: str, infra: str = "aws/us-east-1") -> tuple[ClusterSpec, LaunchPlan]:
    spec = load_text(text(name, group, infra), "x.yaml", now_s=0.0)
    return spec, plan(spec, shipped_offers())


class Ahead(NamesAhead):
    def __init__(self, *taken: Taken, silent: bool = False):
        self._taken = None if silent else taken

    def get(self, timeout_s: float = 60.0) -> tuple[Taken, ...] | None:
        return self._taken


@pytest.fixture(autouse=True)
def home(private_home: Path) -> Path:
    return private_home


def test_two_clusters_whose_replicas_would_have_one_name() -> None:
    up("a", "b-c")
    with pytest.raises(AlreadyExists, match=r"'c' of 'a-b' and group 'b-c' of 'a', .* a-b-c-0"):
        check_names(*planned("a-b", "c"), None)
    check_names(*planned("a-b", "d"), None)
    check_names(*planned("a-b", "c", infra="local"), None)


def test_names_at_the_limit_still_collide_and_still_differ() -> None:
    long = "a" * 12
    up(long, f"{'b' * 13}-{'c' * 12}")  # both 26 characters at most
    with pytest.raises(AlreadyExists, match="would both have"):
        check_names(*planned(f"{long}-{'b' * 13}", "c" * 12), None)
    check_names(*planned(f"{long}-{'b' * 13}", "c" * 13), None)


def test_a_cluster_that_is_down_or_local_is_in_nobodys_way() -> None:
    up("a", "b-c", down=True)
    check_names(*planned("a-b", "c"), None)
    up("x", "y-z", infra="local")
    check_names(*planned("x-y", "z"), None)


@pytest.mark.parametrize("name", ["a-head-0", "a-main-0", "a-main-17"])
def test_a_skypilot_cluster_that_has_the_name(name: str) -> None:
    with pytest.raises(AlreadyExists, match=rf"{name} \(user eve\) exists that areal_sky did not make"):
        check_names(*planned("a", "main"), Ahead(Taken(name, {}, "eve")))
    with pytest.raises(AlreadyExists, match=f"down --orphans {name}"):
        check_names(*planned("a", "main"), Ahead(Taken(name, {"areal-sky-cluster": "a"}, "me")))


def test_other_names_and_silence_are_no_reason_to_refuse() -> None:
    others = [Taken(n, {}, "") for n in ("a-main", "a-mainly-0", "a-main-0-1", "b-main-0", "a-other-0")]
    check_names(*planned("a", "main"), Ahead(*others))
    check_names(*planned("a", "main"), Ahead(silent=True))


def test_skypilot_is_not_asked_where_it_was_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names_ahead(planned("a", "main")[0]) is None
    assert names_ahead(planned("a", "main", infra="local")[0]) is None


def test_a_child_that_breaks_tells_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("areal_sky.adapters.skypilot.sweep.sys.executable", "/bin/false")
    assert NamesAhead().get() is None
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr("areal_sky.adapters.skypilot.sweep.sys.executable", str(sleeper))
    ahead = NamesAhead()
    assert ahead.get(timeout_s=0.2) is None
    assert ahead._child.poll() is not None
