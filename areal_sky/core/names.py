"""Two clusters whose replicas would get the same SkyPilot names: `a` with group `b-c`, and `a-b` with group `c`."""

from __future__ import annotations

from collections.abc import Iterable

from areal_sky.core.model import HEAD_GROUP, LaunchPlan, replica_name


def prefixes(cluster: str, groups: Iterable[str]) -> dict[str, str]:
    """Group by the part of its replicas' names that stands before the slot; the head is a group, too."""
    return {replica_name(cluster, g, 0).rpartition("-")[0]: g for g in (HEAD_GROUP, *groups)}


def collision(launch: LaunchPlan, cluster: str, groups: Iterable[str]) -> str:
    """Why that other cluster and the planned one cannot live side by side, in words; empty if they can.

    A slot is a number after the last `-`, so names are equal only where what stands before it is.
    """
    mine = prefixes(launch.cluster, (g.name for g in launch.groups))
    theirs = prefixes(cluster, groups)
    shared = sorted(mine.keys() & theirs.keys()) if cluster != launch.cluster else []
    if not shared:
        return ""
    name = shared[0]
    return (
        f"group {mine[name]!r} of {launch.cluster!r} and group {theirs[name]!r} of {cluster!r}, which is not down, "
        f"would both have SkyPilot clusters {name}-0, {name}-1, ...: give this one another `name`"
    )
