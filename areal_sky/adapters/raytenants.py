"""What others hold in our Ray cluster: read from the tables of its control plane.

A placement group or actor knows the Ray job that made it, and a job of a program that one of our tasks started carries
that gang's name in its metadata, since every task gets `job_environment`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from areal_sky.core.model import Bundle
from areal_sky.core.tenancy import GANG_KEY, Foreign, ForeignUse

GIB = 2**30
_INTERNAL = "_ray_internal"  # namespaces of Ray's own jobs


def job_environment(gang_id: str) -> dict[str, str]:
    """What makes `ray.init` in a task's program say whose it is. Read by Ray itself (ray/_private/worker.py)."""
    return {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"metadata": {GANG_KEY: gang_id}})}


def foreign(accessor: Any, own_job: str, own_groups: str) -> Foreign:
    """One look, through Ray's state accessor. `own_job` is our job's id in hex, `own_groups` begins our groups' names.

    What runs inside our own placement groups is ours, and what runs inside others' is theirs already.
    """
    from ray.core.generated import gcs_pb2

    owners: dict[bytes, str] = {}
    gangs: set[str] = set()
    strangers = False
    for raw in accessor.get_job_table(skip_submission_job_info_field=True, skip_is_running_tasks_field=True):
        job = gcs_pb2.JobTableData.FromString(raw)
        gang = job.config.metadata.get(GANG_KEY)
        if gang:
            owners[job.job_id] = gang
        if job.is_dead or job.job_id.hex() == own_job or job.config.ray_namespace.startswith(_INTERNAL):
            continue
        gangs |= {gang} if gang else set()
        strangers = strangers or not gang
    uses: list[ForeignUse] = []
    for raw in accessor.get_placement_group_table():
        group = gcs_pb2.PlacementGroupTableData.FromString(raw)
        if group.name.startswith(own_groups) or group.state == gcs_pb2.PlacementGroupTableData.REMOVED:
            continue
        # Bundles have a node once their resources are taken there, which for a pending group they are not.
        placed = [b for b in group.bundles if b.node_id.strip(b"\xff")]
        owner = owners.get(group.creator_job_id)
        if group.state != gcs_pb2.PlacementGroupTableData.PENDING:
            uses += [ForeignUse(b.node_id.hex(), _bundle(b.unit_resources), owner) for b in placed]
    for raw in accessor.get_actor_table(None, "ALIVE"):
        actor = gcs_pb2.ActorTableData.FromString(raw)
        bundle = _bundle(actor.required_resources)
        # A name of the form `resource_group_...` says that it sits in a placement group.
        if actor.placement_group_id or any("_group_" in key for key in actor.required_resources):
            continue
        if bundle.gpus or bundle.cpus or bundle.memory_gib:
            uses.append(ForeignUse(actor.node_id.hex(), bundle, owners.get(actor.job_id)))
    return Foreign(tuple(uses), frozenset(gangs), strangers)


def _bundle(resources: Mapping[str, float]) -> Bundle:
    return Bundle(resources.get("GPU", 0.0), resources.get("CPU", 0.0), resources.get("memory", 0.0) / GIB)
