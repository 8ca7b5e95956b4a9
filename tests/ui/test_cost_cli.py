"""`areal-sky cost` over a state folder, as a user runs it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from areal_sky.adapters.store import EventStore
from areal_sky.core.events import (
    ClusterCreated,
    ClusterDown,
    DownRequested,
    Event,
    GroupDesired,
    LaunchAccepted,
    LaunchIntended,
    ReplicaGone,
    TerminateIntended,
)
from areal_sky.core.usage import Hold, Usage, usage_to_json
from areal_sky.home import ClusterHome
from areal_sky.run.usage import usage_file
from areal_sky.ui.cli.cost import COLUMNS
from areal_sky.ui.cli.main import cli

HOUR = 3600.0
HEAD, REPLICA = "c-head-0", "c-rollout-0"


def run(*args: str) -> str:
    done = CliRunner().invoke(cli, ["cost", *args], standalone_mode=False)
    assert done.exception is None, done.exception
    return done.output


def rows(*args: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(run("--csv", *args))))


def make(name: str = "c", spot_usd: float | None = 3.0) -> ClusterHome:
    """A head for three hours, a spot replica for one of them, half of which a task held; then down."""
    home = ClusterHome(name)
    home.create("{}")
    store = EventStore(home.events_db)
    head, replica = f"{name}-head-0", f"{name}-rollout-0"
    steps: list[tuple[float, Event]] = [
        (0, ClusterCreated(name)), (0, GroupDesired("rollout", 1, "", "spec")),
        (0, LaunchIntended(head, "head", 0, 1, "on_demand", 0.5, "", 0.5)), (0, LaunchAccepted(head, "a")),
        (1, LaunchIntended(replica, "rollout", 0, 1, "spot", spot_usd, "", 10.0)), (1, LaunchAccepted(replica, "b")),
        (2, TerminateIntended(replica, "")), (2, ReplicaGone(replica)), (3, DownRequested("", 0)),
        (3, TerminateIntended(head, "")), (3, ReplicaGone(head)), (3, ClusterDown()),
    ]  # fmt: skip
    for hours, event in steps:
        store.append(hours * HOUR, event)
    store.close()
    held = Hold("t1", 1, "grpo", "rollout", replica, 0, 8, 8, 8, 16, HOUR, 1.5 * HOUR)
    usage_file(home).write_text(json.dumps(usage_to_json(Usage(3 * HOUR, (held,)))))
    return home


@pytest.fixture(autouse=True)
def home(private_home: Path) -> Path:
    return private_home


def test_the_columns_are_those_of_the_help() -> None:
    make()
    text = run("c", "--csv")
    assert text.splitlines()[0] == ",".join(COLUMNS)
    described = CliRunner().invoke(cli, ["cost", "--help"]).output
    for column in COLUMNS:
        assert f"    {column}" in described or f", {column} " in described, column


def test_by_group_task_role_and_replica_after_the_end() -> None:
    make()
    expected = {
        "group": [("head", "1.5000", "1.5000"), ("rollout", "3.0000", "10.0000")],
        "replica": [(HEAD, "1.5000", "1.5000"), (REPLICA, "3.0000", "10.0000")],
        "role": [("head", "1.5000", "1.5000"), ("rollout", "1.5000", "5.0000"), ("idle", "1.5000", "5.0000")],
        "task": [("head", "1.5000", "1.5000"), ("t1", "1.5000", "5.0000"), ("idle", "1.5000", "5.0000")],
    }
    for by, lines in expected.items():
        assert [(r[by], r["usd"], r["on_demand_usd"]) for r in rows("c", "--by", by)] == lines
    (task,) = [r for r in rows("c", "--by", "task") if r["task"] == "t1"]
    assert (task["task_name"], task["role"], task["market"], task["node_hours"]) == (
        "grpo", "rollout", "spot", "0.500000"
    )  # fmt: skip


def test_json_and_the_table_have_the_same_total() -> None:
    make()
    raw = json.loads(run("--json", "--by", "task"))
    assert (raw["cluster"], raw["usd"], raw["on_demand_usd"], raw["complete"]) == ("c", 4.5, 11.5, True)
    table = run("--by", "task")
    assert "$4.5000" in table and "$11.5000" in table and "grpo" in table
    assert "spot against on-demand so far: -$7.0000" in table


def test_an_unknown_price_is_said_everywhere() -> None:
    make(spot_usd=None)
    (_, line) = rows("c")
    assert (line["usd"], line["unpriced_node_hours"], line["on_demand_usd"]) == ("", "1.000000", "10.0000")
    table = run("c")
    assert "unknown" in table and "1.0000 node-hours have no known price" in table
    assert "spot against" not in table


def test_all_shows_past_lives_of_a_name_and_their_sum() -> None:
    make().archive(9e8)
    make()
    make("d")
    names = {r["cluster"] for r in rows("--all")}
    assert len(names) == 3 and {"c", "d"} < names and any(n.startswith("c (until 1970-01-01") for n in names)
    assert {r["cluster"] for r in rows("d", "--all")} == {"d"}
    assert "all 3 clusters: $13.5000" in run("--all")
    assert len(json.loads(run("--all", "--json"))) == 3


def test_without_usage_the_time_is_unattributed_not_idle() -> None:
    usage_file(make()).unlink()
    assert [r["role"] for r in rows("c", "--by", "role")] == ["head", "unattributed"]
    assert "never told" in run("c", "--by", "role")
