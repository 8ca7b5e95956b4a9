"""Whether a gang fits any shape that the cluster may ever have: what never can is refused, not left to wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from areal_sky.core.model import HEAD_GROUP, Bundle, NodeShape
from areal_sky.core.nodeenv import GroupShape
from areal_sky.core.placement import (
    Ask,
    NodeRoom,
    Placement,
    accelerator_matches,
    bundles_on,
    describe,
    describe_bundle,
    empty_room,
    fit,
)


def could_ever_fit(
    ask: Ask, groups: Sequence[GroupShape], head: NodeShape | None = None, least: int = 0
) -> str | None:
    """None when the gang fits the cluster at its largest and empty; else why not, with the nearest fit.

    `least`: an elastic gang is content with so many bundles. Markets and names of nodes are not judged: they are known
    of live nodes only. Without known groups nothing can be said, and None is returned.
    """
    if not groups:
        return None
    ask = replace(ask, count=least or ask.count, market=None, nodes=())
    rooms: list[NodeRoom] = []
    for g in groups:
        # No gang puts bundles on more nodes than it has bundles.
        most = min(g.max_replicas * g.nodes_per_replica, ask.count)
        rooms += [empty_room(f"{g.name}/{i:06d}", g.name, g.shape) for i in range(most)]
    if ask.group == HEAD_GROUP and head is not None:
        rooms.append(empty_room(HEAD_GROUP, HEAD_GROUP, head))
    if isinstance(fit(ask, rooms), Placement):
        return None
    known = [g for g in groups if ask.group in (None, g.name)]
    if not known and ask.group != HEAD_GROUP:
        return f"there is no group {ask.group!r} (known: {', '.join(sorted(g.name for g in groups))})"
    lines = [_nearest(ask, g) for g in known]
    return f"{describe(ask)} can never fit: " + "; ".join(lines)


def _nearest(ask: Ask, group: GroupShape) -> str:
    nodes = group.max_replicas * group.nodes_per_replica
    shape = group.shape
    if not accelerator_matches(ask, shape.accelerator):
        has = shape.accelerator or "no accelerator"
        return f"group {group.name} has {has}, not {' or '.join(ask.accelerators)}"
    each = bundles_on(empty_room("", group.name, shape), ask.bundle, ask.count)
    node = describe_bundle(Bundle(shape.gpus, shape.cpus, shape.memory_gib))
    if each == 0:
        return f"one bundle is more than a whole node of group {group.name} ({node})"
    return f"group {group.name} takes at most {min(each * nodes, ask.count)} of them ({nodes} nodes of {node})"
