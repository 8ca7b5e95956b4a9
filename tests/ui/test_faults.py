"""State folders that cannot be used, names that cannot be had: one clear error each, and nothing launched or lost."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from areal_sky.adapters.store import EventStore
from areal_sky.core.events import ClusterCreated, ClusterDown

SPEC = "name: {name}\ninfra: local\nresources: {{accelerators: 'V100:1', cpus: 1, memory: 1}}\n"


class Cli:
    def __init__(self, folder: Path):
        self.folder = folder
        self.home = folder / "home"

    def __call__(self, *args: str, code: int = 0, home: Path | None = None) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "areal_sky.ui.cli.main", *args],
            env={**os.environ, "AREAL_SKY_HOME": str(home or self.home)}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        said = done.stdout + done.stderr
        assert "Traceback" not in said and "internal error" not in said, said
        assert done.returncode == code, said
        return said

    def spec(self, name: str) -> str:
        file = self.folder / f"{name}.yaml"
        file.write_text(SPEC.format(name=name))
        return str(file)

    def store(self, name: str) -> EventStore:
        return EventStore(self.home / "clusters" / name / "events.db")


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def test_a_state_folder_that_cannot_be_written(cli: Cli) -> None:
    said = cli("up", cli.spec("c"), code=1, home=Path("/proc/nowhere"))
    assert "cannot write /proc/nowhere" in said and "AREAL_SKY_HOME" in said


def test_a_file_where_the_state_folder_should_be(cli: Cli) -> None:
    cli.home.write_text("")
    assert "cannot" in cli("up", cli.spec("c"), code=1)


@pytest.mark.parametrize("command", [("status", "c"), ("down", "c"), ("events", "c"), ("why", "c", "-c", "c")])
def test_damaged_state_is_refused_copied_and_left_alone(cli: Cli, command: tuple[str, ...]) -> None:
    db = cli.home / "clusters" / "c" / "events.db"
    db.parent.mkdir(parents=True)
    db.write_bytes(b"rubbish" * 2000)
    said = cli(*command, code=1)
    assert "damaged" in said and "events.db.refused" in said
    assert db.read_bytes() == b"rubbish" * 2000
    assert "damaged" in cli("up", cli.spec("c"), code=1)
    assert db.read_bytes() == b"rubbish" * 2000


def test_newer_state_is_refused_and_left_alone(cli: Cli) -> None:
    cli.store("c").append(0.0, ClusterCreated("c"))
    db = cli.home / "clusters" / "c" / "events.db"
    with sqlite3.connect(db) as connection:
        connection.execute("PRAGMA user_version=99")
    assert "upgrade areal_sky" in cli("up", cli.spec("c"), code=1)
    with sqlite3.connect(db) as connection:
        assert connection.execute("SELECT count(*) FROM events").fetchone() == (1,)


def test_one_damaged_cluster_does_not_hide_the_others(cli: Cli) -> None:
    bad = cli.home / "clusters" / "bad" / "events.db"
    bad.parent.mkdir(parents=True)
    bad.write_bytes(b"rubbish" * 2000)
    also_bad = cli.home / "clusters" / "worse" / "events.db"
    also_bad.parent.mkdir(parents=True)
    also_bad.write_bytes(b"nonsense" * 2000)
    reports = json.loads(cli("status", "--json"))
    assert [(r["cluster"], r["state"]) for r in reports] == [("bad", "UNREADABLE"), ("worse", "UNREADABLE")]
    assert "no cluster is up" in cli("queue", code=1)


def test_names_that_no_cluster_can_have(cli: Cli) -> None:
    assert "at most 26 characters" in cli("up", cli.spec("a" * 27), code=2)
    assert "no cluster name" in cli("status", "../../etc", code=2)
    assert not cli.home.exists()


def test_a_spec_that_only_a_cloud_could_run_says_so_and_makes_nothing(cli: Cli) -> None:
    file = cli.folder / "cloud.yaml"
    file.write_text("resources: {accelerators: 'V100:8'}\n")
    assert "--infra local" in cli("up", str(file), code=3)
    assert not list(cli.home.glob("clusters/*/events.db"))


@pytest.mark.parametrize("block", ["scaling: {policy", "scheduling: {strategy"])
def test_a_policy_that_does_not_load_is_said_before_anything_exists(cli: Cli, block: str) -> None:
    file = cli.folder / "own.yaml"
    file.write_text(SPEC.format(name="own") + block + ": 'nowhere:at_all'}\n")
    assert "cannot import 'nowhere'" in cli("up", str(file), code=2)
    assert not list(cli.home.glob("clusters/*/events.db"))


def test_reading_goes_on_after_the_end(cli: Cli) -> None:
    cli.store("c").append(0.0, ClusterCreated("c"), ClusterDown())
    assert "cluster is down" in cli("events")
    assert "no cluster is up" in cli("queue", code=1)
    assert "is not down" not in cli("why", "c", "-c", "c")
