"""Looks for what no state knows, and ends it: SkyPilot, EC2, this machine's pretend nodes, and the heads' Ray nodes.

Each place is asked on its own, side by side. One that cannot be asked is said, and never hides what others show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from areal_sky.adapters import aws, localsweep
from areal_sky.adapters.skypilot import sweep as skysweep
from areal_sky.core import orphans
from areal_sky.core.names import prefixes
from areal_sky.core.orphans import Finding, InstanceFound, KnownCluster, NodeFound, Orphan, RayFound, SkyFound, World
from areal_sky.errors import ArealSkyError, NotFound, StateError
from areal_sky.home import ClusterHome, clusters, past_clusters
from areal_sky.run.skyside import owner
from areal_sky.run.supervise import controller_runs

T = TypeVar("T")


class SkyPort(Protocol):
    def clusters(self) -> tuple[SkyFound, ...]: ...

    def end(self, name: str) -> None: ...


class Ec2Port(Protocol):
    def instances(self) -> tuple[tuple[InstanceFound, ...], tuple[str, ...]]: ...

    def end(self, instance_id: str, region: str) -> None: ...


@dataclass(frozen=True)
class Places:
    """Where to look. None: not here at all (not installed, never used), which is no failure."""

    sky: SkyPort | None = None
    ec2: Ec2Port | None = None
    nodes: Callable[[], tuple[NodeFound, ...]] = localsweep.pretend_nodes


@dataclass(frozen=True)
class Swept:
    """What was found; `unasked` says in words which places could not be asked, `sky_told`: SkyPilot was no such."""

    finding: Finding
    unasked: tuple[str, ...]
    sky_told: bool = True


def usual_places() -> Places:
    """SkyPilot where it is in use, EC2 where boto3 is installed, and this machine."""
    return Places(
        skysweep.SkyRecords() if skysweep.in_use() else None,
        aws.Ec2() if aws.installed() else None,
    )


def sweep(places: Places) -> Swept:
    """Looks everywhere, the world first and the state afterwards (see core/orphans). Takes seconds."""
    unasked: list[str] = []

    def asked(what: str, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except ArealSkyError as e:
            unasked.append(f"{what}: {e}")
            return otherwise

    sky, ec2 = places.sky, places.ec2
    nothing: tuple[tuple[InstanceFound, ...], tuple[str, ...]] = ((), ())
    with ThreadPoolExecutor(max_workers=4) as pool:
        sky_found = pool.submit(asked, "SkyPilot", sky.clusters, None) if sky else None
        ec2_found = pool.submit(asked, "EC2", ec2.instances, nothing) if ec2 else None
        ray_found = pool.submit(_ray_nodes)
        nodes = places.nodes()
        # Without SkyPilot there are no records at all, so every tagged instance is one that none knows.
        records = () if sky_found is None else sky_found.result()
        instances, problems = ec2_found.result() if ec2_found else nothing
        ray = ray_found.result()
    unasked += [f"EC2: {p}" for p in problems]
    if records is None and instances:
        unasked.append(f"EC2: {len(instances)} tagged instances cannot be judged without SkyPilot's records")
    world = World(records, nodes, instances, ray)
    finding = orphans.find(known_clusters(), world, _owners(), time.time())
    return Swept(finding, tuple(unasked), records is not None)


def end(orphan: Orphan, places: Places) -> str:
    """Ends one orphan and says what was done. Nothing can be drained: nobody knows what ran there.

    Raises ArealSkyError when it could not be ended.
    """
    match orphan.kind:
        case "skypilot" if places.sky is not None:
            places.sky.end(orphan.id)
            return "ended by `sky down`; SkyPilot lists it no more"
        case "ec2" if places.ec2 is not None:
            places.ec2.end(orphan.id, orphan.where)
            return "termination accepted by EC2"
        case "process":
            if left := localsweep.end_marked(orphan.handle):
                raise StateError(f"processes {', '.join(map(str, left))} would not end")
            return "every process of it is gone"
        case "ray":
            with ClusterHome(orphan.handle[0]).gateway("operate") as client:
                client.evict(orphan.id, "orphan: neither the state nor the cloud knows it")
            return "takes no more work; its machine is not ours to end: end it where it runs"
        case _:
            raise StateError(f"no way to end {orphan.kind} {orphan.id} from here")


def known_clusters() -> list[KnownCluster]:
    """The clusters of the state folder. One whose state cannot be read raises StateError: nothing may be ended then."""
    return [_known(c) for c in clusters()]


def _owners() -> set[str]:
    found: set[str] = set()
    for cluster in (*clusters(), *past_clusters()):
        with suppress(NotFound):  # a past one may have lost its tokens
            found.add(owner(cluster))
    return found


def _known(cluster: ClusterHome) -> KnownCluster:
    state = cluster.state()
    return KnownCluster(
        name=cluster.name,
        folder=str(cluster.dir),
        replicas=frozenset(state.replicas),
        prefixes=frozenset(prefixes(cluster.name, state.groups)),
        down_s=state.down_s,
        controller_runs=controller_runs(cluster),
    )


def _ray_nodes() -> tuple[RayFound, ...]:
    """Live Ray nodes of all heads that answer; the others' nodes are their controllers' business."""
    return tuple(n for c in clusters() for n in _ray_nodes_of(c))


def _ray_nodes_of(cluster: ClusterHome) -> Sequence[RayFound]:
    try:
        if cluster.state().down_s is not None:
            return ()
        with cluster.gateway("read") as client:
            return [RayFound(cluster.name, n.replica, n.node_id) for n in client.view().nodes]
    except ArealSkyError:
        return ()
