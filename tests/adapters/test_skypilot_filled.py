"""A group's task as one replica gets it: its market, its mark, its secrets; the group's own task stays as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from areal_sky.adapters.ports import LaunchRequest
from areal_sky.adapters.skypilot.filled import filled
from areal_sky.core.model import GroupPlan, NodeShape, Offer
from areal_sky.errors import Refused

ON_DEMAND = Offer("slurm", "here", "gpu", "", NodeShape(), "on_demand", None, "")
SPOT = replace(ON_DEMAND, zone="spot", market="spot")
PLAN = GroupPlan("r", True, 1, 4, 1, "spot", 0, NodeShape(), SPOT, ON_DEMAND, SPOT)


def fill(task: dict[str, Any], market: str = "on_demand", plan: GroupPlan = PLAN, **secrets: str) -> dict[str, Any]:
    return filled(task, LaunchRequest("c", "c-r-3", plan, market), owner="me", envs={"A": "new"}, secrets=secrets)


def test_it_gets_its_name_environment_and_mark() -> None:
    task = {"name": "c-r", "resources": {"labels": {"k": "v"}}, "envs": {"A": "old", "B": "b"}}
    own = fill(task)
    assert own["name"] == "c-r-3" and own["envs"] == {"A": "new", "B": "b"}
    assert own["resources"]["labels"] == {"k": "v", "areal-sky-owner": "me"}
    assert task == {"name": "c-r", "resources": {"labels": {"k": "v"}}, "envs": {"A": "old", "B": "b"}}


def test_secrets_are_given_by_name_and_a_missing_one_is_refused() -> None:
    task: dict[str, Any] = {"resources": {}, "secrets": {"T": None}}
    assert fill(task, T="hush", OTHER="x")["secrets"] == {"T": "hush"}
    with pytest.raises(Refused, match="secret T has no value"):
        fill(task, OTHER="x")


@pytest.mark.parametrize(
    ("market", "rendered", "launched"),
    [
        ("spot", "slurm/here/gpu", "slurm/here/spot"),
        ("spot", "slurm/here/spot", "slurm/here/spot"),
        ("on_demand", "slurm/here/spot", "slurm/here/gpu"),  # the fall-back of a group whose file says spot
        ("on_demand", "slurm/here/gpu", "slurm/here/gpu"),
    ],
)
def test_a_slurm_partition_stands_for_spot(market: str, rendered: str, launched: str) -> None:
    own = fill({"resources": {"infra": rendered}}, market)["resources"]
    assert own["infra"] == launched and "use_spot" not in own


def test_every_choice_is_marked_and_has_the_market() -> None:
    on_aws = replace(PLAN, spot_offer=replace(SPOT, cloud="aws", zone=None))
    entries: list[dict[str, Any]] = [{"infra": "aws", "labels": {}}, {"infra": "gcp", "use_spot": False}]
    for key in ("any_of", "ordered"):
        own = fill({"resources": {key: entries}}, "spot", on_aws)["resources"][key]
        assert [(e["use_spot"], e["labels"]) for e in own] == [(True, {"areal-sky-owner": "me"})] * 2
        own = fill({"resources": {key: entries}}, "on_demand", on_aws)["resources"][key]
        assert ["use_spot" in e for e in own] == [False, False]
