"""A group's task dict -> what is launched for one replica: its name, the head's address, ports, market and secrets.

Pure. The result holds secrets, so it lives in memory only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from areal_sky.adapters.ports import LaunchRequest
from areal_sky.core.market import with_market
from areal_sky.core.model import GroupPlan
from areal_sky.core.orphans import OWNER_LABEL
from areal_sky.errors import Refused


def filled(
    task: Mapping[str, Any],
    request: LaunchRequest,
    *,
    owner: str,
    envs: Mapping[str, str],
    secrets: Mapping[str, str],
) -> dict[str, Any]:
    """The replica's own task. `secrets` are the values by name.

    `owner` marks our clusters, so that one of the same name that somebody else made is never taken for ours.
    Raises Refused when a secret has no value.
    """
    own = copy.deepcopy(dict(task))
    own["name"] = request.replica
    own["resources"] = _resources(own["resources"], request, owner)
    own["envs"] = {**(own.get("envs") or {}), **envs}
    wanted = own.get("secrets") or {}
    missing = [name for name in wanted if not secrets.get(name)]
    if missing:
        raise Refused(
            f"secret {missing[0]} has no value: give it in the spec's `secrets`, or export it where `areal-sky up` runs"
        )
    own["secrets"] = {name: secrets[name] for name in wanted}
    return own


def _resources(resources: dict[str, Any], request: LaunchRequest, owner: str) -> dict[str, Any]:
    for entry in (*(resources.get("any_of") or ()), *(resources.get("ordered") or ())):
        _mark(entry, request, owner)
    if not (resources.get("any_of") or resources.get("ordered")):
        _mark(resources, request, owner)
    return resources


def _mark(entry: dict[str, Any], request: LaunchRequest, owner: str) -> None:
    entry["labels"] = {**(entry.get("labels") or {}), OWNER_LABEL: owner}
    told = with_market(entry, request.market, request.plan.spot_partition)
    if request.market != "spot":
        told = _out_of_spot_partition(told, request.plan)
    entry.clear()
    entry.update(told)


def _out_of_spot_partition(resources: dict[str, Any], plan: GroupPlan) -> dict[str, Any]:
    """The group's file may name the partition that stands for spot, since its first replica was meant for that."""
    cloud, *rest = str(resources.get("infra") or "").split("/")
    if cloud.lower() != "slurm" or len(rest) != 2 or rest[1] != plan.spot_partition:
        return resources
    usual = plan.on_demand_offer.zone if plan.on_demand_offer is not None else None
    return {**resources, "infra": "/".join(x for x in (cloud, rest[0], usual) if x)}
