"""Names that two clusters would share, and names that are taken, are refused before anything is launched."""

from __future__ import annotations

from areal_sky.adapters.skypilot import sweep as skysweep
from areal_sky.adapters.skypilot.sweep import NamesAhead, Taken
from areal_sky.core.model import LaunchPlan
from areal_sky.core.names import collision, prefixes
from areal_sky.core.orphans import CLUSTER_LABEL, slot_prefix
from areal_sky.errors import AlreadyExists, ArealSkyError
from areal_sky.home import ClusterHome, clusters
from areal_sky.run.supervise import SpecSource
from areal_sky.spec import load_text
from areal_sky.spec.cluster import ClusterSpec


def names_ahead(spec: ClusterSpec) -> NamesAhead | None:
    """Begins to ask SkyPilot which names are taken, which takes seconds; None where that does not matter."""
    return None if spec.is_local or not skysweep.in_use() else NamesAhead()


def check_names(spec: ClusterSpec, launch: LaunchPlan, ahead: NamesAhead | None) -> None:
    """Raises AlreadyExists when a cluster that is not down has, or may get, SkyPilot clusters of the planned names,
    or when such a SkyPilot cluster exists: a new cluster has none yet, so it is somebody else's.

    SkyPilot's silence is no reason to refuse: each name is looked up again just before it is launched. Pretend
    machines are told apart by their state folder: on `infra: local` no two clusters collide.
    """
    if spec.is_local:
        return
    for other in clusters():
        state = other.state()
        if state.down_s is None and (why := collision(launch, other.name, state.groups)) and not _is_local(other):
            raise AlreadyExists(why)
    planned = prefixes(launch.cluster, (g.name for g in launch.groups))
    for taken in (ahead.get() if ahead else None) or ():
        if slot_prefix(taken.name) in planned:
            raise AlreadyExists(_whose(taken))


def _whose(taken: Taken) -> str:
    if CLUSTER_LABEL in taken.labels:
        return (
            f"SkyPilot cluster {taken.name} exists and carries areal_sky's labels, but no state here knows it: "
            f"`areal-sky status --orphans` says more, `areal-sky down --orphans {taken.name}` ends it; "
            "or choose another `name`"
        )
    whose = f" (user {taken.user})" if taken.user else ""
    return (
        f"a SkyPilot cluster {taken.name}{whose} exists that areal_sky did not make: choose another `name`, "
        f"or end it with `sky down {taken.name}` if it is yours"
    )


def _is_local(cluster: ClusterHome) -> bool:
    try:
        source = SpecSource.saved(cluster)
        return source.infra == "local" or load_text(source.text, source.path, now_s=source.read_s).is_local
    except ArealSkyError:
        return False
