"""Drivers as the admission engine sees them: programs that make placement groups of their own (core/tenancy.py).

A driver waits in the engine with like bundles, as large as its largest placement group, and holds its claim there in
bundles of one GPU. Where no node group alone has room, it is placed over several.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from areal_sky.core.gangs import DeviceShare
from areal_sky.core.model import Bundle
from areal_sky.core.nodeenv import HeadEnv
from areal_sky.core.placement import Ask, NodeRoom, NoFit, Placement, empty_room
from areal_sky.core.tasklife import TaskRecord
from areal_sky.core.taskmodel import TaskSpec
from areal_sky.core.tenancy import DriverNeed, driver_need, fit_driver

ONE_GPU = Bundle(1.0, 0.0, 0.0)
DEFAULT_GPUS_PER_NODE = 8


def gpus_per_node(env: HeadEnv) -> int:
    """Of the largest nodes that the cluster may have."""
    return int(max((g.shape.gpus for g in env.groups), default=0)) or DEFAULT_GPUS_PER_NODE


def need_of(spec: TaskSpec, env: HeadEnv) -> DriverNeed | None:
    """What a driver takes by itself; None for a task that takes nothing but its bundles."""
    return None if spec.backends is None else driver_need(spec.backends, gpus_per_node(env))


def waiting_ask(r: TaskRecord, need: DriverNeed) -> Ask:
    """What it waits for in the engine: each bundle has room for the driver itself, too."""
    bundle, count = need.uniform
    return Ask(
        Bundle(bundle.gpus, r.bundle.cpus, r.bundle.memory_gib), count, r.spec.group, r.accelerators
    )


def held_ask(r: TaskRecord, gpus: int) -> Ask:
    """What it holds in the engine."""
    return Ask(ONE_GPU, gpus, r.spec.group, r.accelerators)


def single_gpus(placement: Placement, gpus: int) -> Placement:
    """The first so many GPUs of a placement, one a bundle: what like bundles had too much is given back."""
    nodes: list[str] = []
    devices: list[tuple[DeviceShare, ...]] = []
    for node_id, shares in zip(placement.node_ids, placement.devices, strict=True):
        nodes += [node_id] * len(shares)
        devices += [(share,) for share in shares]
    return Placement(tuple(nodes[:gpus]), tuple(devices[:gpus]))


def over_groups(r: TaskRecord, need: DriverNeed, rooms: Sequence[NodeRoom]) -> Placement | NoFit:
    """Where it fits on nodes of any groups, the node for the driver itself first."""
    if sum(room.free_gpus for room in rooms) < need.gpus:
        return NoFit((f"it takes {need.gpus} GPUs and {sum(x.free_gpus for x in rooms):g} are free",))
    found = fit_driver(need, rooms, r.spec.group, r.accelerators)
    if isinstance(found, NoFit):
        return found
    able = {x.node_id for x in rooms if x.cpus >= r.bundle.cpus and x.memory_gib >= r.bundle.memory_gib}
    home = next((n for n in found.node_ids if n in able), None)
    if home is None:
        return NoFit(("no node of those that have its GPUs has the CPUs and the memory of the driver itself",))
    pairs = sorted(zip(found.node_ids, found.devices, strict=True), key=lambda p: p[0] != home)
    return Placement(tuple(n for n, _ in pairs), tuple(d for _, d in pairs))


def to_keep_free(r: TaskRecord, need: DriverNeed, rooms: Sequence[NodeRoom]) -> tuple[str, ...]:
    """The nodes that shall become free for it: the first of `rooms`, as if they were, that hold all of it. () if none.

    To be given the freest first.
    """

    def fits(first: int) -> bool:
        return isinstance(over_groups(r, need, rooms[:first]), Placement)

    enough = bisect_left(range(len(rooms) + 1), True, key=fits)
    found = over_groups(r, need, rooms[:enough])
    return () if isinstance(found, NoFit) else tuple(dict.fromkeys(found.node_ids))


def why_never(spec: TaskSpec, need: DriverNeed, rooms: Sequence[NodeRoom], env: HeadEnv) -> str | None:
    """Why a driver can never run: neither on `rooms` (live nodes as if empty) nor in the cluster at its largest."""
    if not env.groups or isinstance(fit_driver(need, rooms, spec.group, spec.accelerators), Placement):
        return None
    largest = [
        empty_room(f"{g.name}/{i:06d}", g.name, g.shape)
        for g in env.groups
        for i in range(min(g.max_replicas * g.nodes_per_replica, need.gpus))
    ]
    found = fit_driver(need, largest, spec.group, spec.accelerators)
    return None if isinstance(found, Placement) else f"{spec.backends} can never fit: {found} at the cluster's largest"
