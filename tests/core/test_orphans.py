from __future__ import annotations

from dataclasses import replace

import pytest

from areal_sky.core.names import collision
from areal_sky.core.orphans import (
    CLUSTER_LABEL,
    GRACE_S,
    OWNER_LABEL,
    Finding,
    InstanceFound,
    KnownCluster,
    NodeFound,
    RayFound,
    SkyFound,
    World,
    find,
)
from tests.core.worlds import group, plan

NOW_S = 10_000.0
HOME = "/home/u/.areal_sky/clusters"
LIVE = KnownCluster(
    "live", f"{HOME}/live", frozenset({"live-head-0", "live-rollout-0"}), frozenset({"live-head", "live-rollout"}),
    down_s=None, controller_runs=True,
)  # fmt: skip
DOWN = replace(LIVE, name="down", folder=f"{HOME}/down", replicas=frozenset(), prefixes=frozenset({"down-rollout"}),
               down_s=5_000.0, controller_runs=False)  # fmt: skip


def sky(name: str, label: str | None, owner: str = "me", mine: bool = True, age_s: float = 3600) -> SkyFound:
    labels = {"team": "rl"} | ({CLUSTER_LABEL: label} if label else {}) | ({OWNER_LABEL: owner} if owner else {})
    return SkyFound(
        name, f"{name}-hash", labels, NOW_S - age_s, mine, "ann", "aws/us-east-1", "1 x p3.2xlarge, UP", 3.0
    )


def ec2(owner: str = "me", label: str | None = "lost", name: str = "lost-rollout-0-hash") -> InstanceFound:
    tags = {"skypilot-cluster-name": name} | ({CLUSTER_LABEL: label} if label else {})
    tags |= {OWNER_LABEL: owner} if owner else {}
    return InstanceFound("i-1", "us-west-2", "p3.2xlarge", "running", "spot", NOW_S - 3600, tags, 1.0)


def node(folder: str, replica: str, exists: bool = True) -> NodeFound:
    return NodeFound(folder, replica, (f"{folder}::{replica}/0",), (11, 12), NOW_S - 3600, exists)


def look(**world: object) -> Finding:
    return find([LIVE, DOWN], World(**{"sky": (), **world}), {"me"}, NOW_S)  # type: ignore[arg-type]


def ids(finding: Finding) -> list[str]:
    return [o.id for o in finding.orphans]


def test_what_the_state_knows_is_no_orphan() -> None:
    finding = look(sky=(sky("live-head-0", "live"), sky("live-rollout-0", "live")))
    assert finding == Finding((), (), ())


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (sky("live-rollout-7", "live"), "cluster live knows no replica live-rollout-7"),
        (sky("down-rollout-0", "down"), "cluster down is down"),
        (sky("lost-rollout-0", "lost"), "no state here knows cluster lost"),
        (sky("lost-rollout-0", "lost", owner=""), "no state here knows cluster lost; it was launched by hand"),
        (sky("any-name", "lost"), "no state here knows cluster lost"),
    ],
)
def test_a_labelled_cluster_that_no_state_knows(found: SkyFound, reason: str) -> None:
    (orphan,) = look(sky=(found,)).orphans
    assert (orphan.kind, orphan.id, orphan.reason) == ("skypilot", found.name, reason)
    assert (orphan.ripe, orphan.certain, orphan.usd_per_hour) == (True, True, 3.0)


def test_one_of_our_name_without_our_label_is_said_and_left() -> None:
    finding = look(sky=(sky("live-rollout-0", None, owner=""), sky("mnist", None, owner="")))
    assert finding.orphans == ()
    (words,) = finding.left_alone
    assert "live-rollout-0 (user ann)" in words and "not touched" in words


def test_another_users_is_left() -> None:
    finding = look(sky=(sky("lost-rollout-0", "lost", mine=False),))
    assert finding.orphans == () and "is of user ann" in finding.left_alone[0]


@pytest.mark.parametrize("name", ["live-rollout-0", "lost-rollout-0"])
def test_another_state_folders_must_be_named_to_be_ended(name: str) -> None:
    (orphan,) = look(sky=(sky(name, name.split("-")[0], owner="other"),)).orphans
    assert not orphan.certain and "another state folder (other)" in orphan.reason


def test_a_young_one_is_not_ripe_nor_is_one_whose_cluster_went_down_just_now() -> None:
    young = sky("lost-rollout-0", "lost", age_s=GRACE_S - 1)
    fresh = replace(DOWN, down_s=NOW_S - GRACE_S + 1)
    finding = find([fresh], World(sky=(young, sky("down-rollout-0", "down"))), {"me"}, NOW_S)
    assert [o.ripe for o in finding.orphans] == [False, False]


def test_pretend_nodes() -> None:
    finding = look(nodes=(
        node(LIVE.folder, "live-rollout-0"),
        node(LIVE.folder, "live-rollout-9"),
        node(DOWN.folder, "down-head-0"),
        node("/tmp/other/clusters/x", "x-main-0"),
        node("/tmp/gone/clusters/x", "x-main-0", exists=False),
    ))  # fmt: skip
    assert [(o.id, o.reason) for o in finding.orphans] == [
        ("live-rollout-9", "cluster live knows no replica live-rollout-9"),
        ("down-head-0", "cluster down is down"),
        ("x-main-0", "its state folder /tmp/gone/clusters/x is gone"),
    ]
    assert finding.orphans[0].handle == (f"{LIVE.folder}::live-rollout-9/0",)


def test_instances_that_no_record_knows() -> None:
    (orphan,) = look(instances=(ec2(),)).orphans
    assert (orphan.kind, orphan.id, orphan.where, orphan.certain) == ("ec2", "i-1", "us-west-2", True)
    assert orphan.what == "p3.2xlarge, spot, running"
    assert look(instances=(ec2(label=None),)).orphans == ()  # SkyPilot's, not ours
    assert look(instances=(ec2(),), sky=(replace(sky("a", None), name_on_cloud="lost-rollout-0-hash"),)).orphans == ()
    assert not look(instances=(ec2(owner="other"),)).orphans[0].certain


def test_without_skypilots_records_no_instance_is_judged() -> None:
    assert look(sky=None, instances=(ec2(),)).orphans == ()


def test_ray_nodes_that_neither_state_nor_cloud_knows() -> None:
    strays = tuple(RayFound("live", r, f"n{i}") for i, r in enumerate(("live-rollout-0", "ghost-0", "ghost-0")))
    (orphan,) = look(ray=strays).orphans
    assert (orphan.kind, orphan.id, orphan.what, orphan.handle) == ("ray", "ghost-0", "2 nodes", ("live",))
    known_to_cloud = look(ray=strays, sky=(sky("ghost-0", "live"),))
    assert [o.kind for o in known_to_cloud.orphans] == ["skypilot"]


def test_a_controller_that_is_gone_while_its_cluster_lives_is_said() -> None:
    finding = find([replace(LIVE, controller_runs=False), DOWN], World(sky=()), {"me"}, NOW_S)
    (words,) = finding.warnings
    assert "cluster live: its controller is gone" in words


def test_clusters_whose_replicas_would_share_names() -> None:
    ours = replace(plan(group("c")), cluster="a-b")
    assert "a-b-c-0" in collision(ours, "a", ["head", "b-c"])
    assert "'head'" in collision(ours, "a", ["head", "b-head"])
    assert collision(ours, "a", ["head", "b", "c", "b-c-0"]) == ""
    assert collision(ours, "a-b", ["head", "c"]) == ""  # itself
