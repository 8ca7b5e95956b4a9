"""How many replicas a group needs for the gangs that wait: packing of gangs into free and into future nodes.

Built on `placement.take`, so that what is grown for a gang is what the gang is later placed on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from areal_sky.core.model import Bundle, GangDemand, GroupPlan, NodeShape, NodeView
from areal_sky.core.placement import EPS, NodeRoom, empty_room, room_of, take

MAX_BUNDLES_PER_NODE = 4096  # far above any real node; ends the counting of tiny bundles


def free_rooms(nodes: Iterable[NodeView], group: str) -> tuple[NodeRoom, ...]:
    """What the live nodes of a group would still take; draining ones take nothing."""
    return tuple(
        _room(n.node_id, n.group, n.shape, (n.free_gpus, n.free_cpus, n.free_memory_gib))
        for n in nodes
        if n.group == group and not n.draining
    )


def empty_rooms(group: GroupPlan, replicas: int) -> tuple[NodeRoom, ...]:
    """The nodes of so many replicas on which nothing runs."""
    return (empty_room("", group.name, group.shape),) * (replicas * group.nodes_per_replica)


def replicas_for(gang: GangDemand, group: GroupPlan) -> int | None:
    """How many empty replicas of the group hold the gang; None when it could never run there.

    Never: it names another group, wants another accelerator, one bundle is larger than a node, or all replicas
    together are too small.
    """
    if gang.group not in (None, group.name):
        return None
    wanted = {a.lower() for a in gang.accelerators}
    if wanted and (group.shape.accelerator or "").lower() not in wanted:
        return None
    needed = _replicas(gang.bundles, gang.bundle, group)
    return needed if needed is not None and needed <= group.max_replicas else None


class Packing:
    """Gangs put one after the other into a group's free rooms, and into new replicas, `limit` at most.

    `extra` is how many new replicas that has taken so far. Every gang must be one that `replicas_for` allows.
    """

    def __init__(self, group: GroupPlan, free: Sequence[NodeRoom], limit: int):
        self._group = group
        self._rooms = list(free)
        self._limit = limit
        self._too_large: set[tuple[Bundle, int]] = set()  # room only shrinks, so these need no second try
        self.extra = 0

    def add(self, gang: GangDemand) -> bool:
        """Put the whole gang in, with new replicas where needed; False (and nothing is changed) beyond `limit`."""
        bundle, key = gang.bundle, (gang.bundle, gang.bundles)
        if key in self._too_large:
            return False
        after: dict[int, NodeRoom] = {}
        left = gang.bundles
        for i, room in enumerate(self._rooms):
            if not left:
                break
            if room.free_gpus < bundle.gpus - EPS:
                continue  # most of a busy group's; looking closer costs ten times as much
            left -= (count := _count(room, bundle, left))
            if count:
                after[i] = _less(room, bundle, count)
        missing = 0
        if left:
            missing = _replicas(left, bundle, self._group) or self._limit + 1
        if self.extra + missing > self._limit:
            self._too_large.add(key)
            return False
        for i, room in after.items():
            self._rooms[i] = room
        self._rooms = [r for r in self._rooms if r.free_gpus > 0 or not r.is_gpu_node]  # full ones only cost time
        for room in empty_rooms(self._group, missing):
            left -= (count := _count(room, bundle, left))
            self._rooms.append(_less(room, bundle, count))
        self.extra += missing
        return True


@lru_cache(maxsize=8192)
def _room(node_id: str, group: str, shape: NodeShape, free: tuple[float, float, float]) -> NodeRoom:
    return room_of(node_id, group, shape, free)  # from tick to tick, few nodes of a thousand have changed


def _replicas(bundles: int, bundle: Bundle, group: GroupPlan) -> int | None:
    per_replica = _per_node(group.shape, bundle) * group.nodes_per_replica
    return math.ceil(bundles / per_replica) if per_replica else None


@lru_cache(maxsize=1024)
def _per_node(shape: NodeShape, bundle: Bundle) -> int:
    if bundle.gpus <= 0 and bundle.cpus <= 0 and bundle.memory_gib <= 0:
        return 1  # asks for nothing: any number fits, one is enough to reason with
    return _count(empty_room("", "", shape), bundle, MAX_BUNDLES_PER_NODE)


def _count(room: NodeRoom, bundle: Bundle, limit: int) -> int:
    count = 0
    while count < limit and (taken := take(room, bundle)):
        room, count = taken[0], count + 1
    return count


def _less(room: NodeRoom, bundle: Bundle, count: int) -> NodeRoom:
    for _ in range(count):
        taken = take(room, bundle)
        assert taken is not None
        room = taken[0]
    return room
