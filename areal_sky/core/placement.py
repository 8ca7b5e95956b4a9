"""Where a gang can run: the one packing rule, for admission, backfill, what-ifs and scale-in alike.

`fit` answers for a list of rooms with a Placement or with the reasons why not; `find` is the same for an index of
rooms that is kept up to date. Pure and deterministic, whatever the order in which nodes came:

- all bundles of a gang are placed or none (an elastic one at least with its least number);
- a gang stays within one node group, and on one accelerator type where it can (mixed types only as second choice);
- fewest nodes first, then (one bundle) where fewest GPUs get stranded without CPUs (core/fragmentation.py), then the
  tightest fit, so that large holes stay whole; `spread`: most nodes first;
- work without GPUs keeps off GPU nodes while any other node has room;
- the first accelerator that fits where the ask gives an order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

from areal_sky.core.fragmentation import UsualAsk
from areal_sky.core.gangs import (
    Ask,
    DeviceShare,
    NoFit,
    Placement,
    accelerator_matches,
    describe,
    describe_bundle,
)
from areal_sky.core.model import HEAD_GROUP
from areal_sky.core.room import (
    EPS,
    Held,
    Need,
    NodeRoom,
    bundles_on,
    describe_free,
    empty_room,
    foreign_use,
    need_of,
    occupy,
    room_of,
    take,
)
from areal_sky.core.roomindex import Allow, Bucket, Node, RoomIndex, Shelf

__all__ = [
    "EPS", "Ask", "DeviceShare", "Held", "NoFit", "NodeRoom", "Placement", "accelerator_matches", "bundles_on",
    "describe", "describe_bundle", "empty_room", "find", "fit", "foreign_use", "occupy", "placement_on",
    "room_of", "take",
]  # fmt: skip

MOST_LOOKS = 256  # kinds of free room per shelf that are compared: a bound on the cost of a decision

Nodes = list[tuple[Node, int]]  # so many bundles on that node


def fit(ask: Ask, rooms: Iterable[NodeRoom]) -> Placement | NoFit:
    """Place the whole gang into `rooms`, or say why it does not fit. Raises InvalidInput for amounts that are none."""
    rooms = list(rooms)
    found = find(RoomIndex(rooms), ask)
    return NoFit(reasons(ask, rooms)) if isinstance(found, dict) else placement_on(found, need_of(ask.bundle))


def find(index: RoomIndex, ask: Ask, allow: Allow | None = None, least: int = 0) -> Nodes | dict[str, int]:
    """The nodes for the gang, or how many of its bundles would fit at most into each group (fewer than asked for).

    `allow`: which guarded nodes it may use. `least`: an elastic gang is content with so many bundles.
    """
    if ask.nodes:
        index = _only(index, set(ask.nodes))
    return _find(index, ask, allow, least)


def placement_on(nodes: Nodes, need: Need) -> Placement:
    """Which devices each bundle gets."""
    node_ids: tuple[str, ...] = ()
    devices: tuple[tuple[DeviceShare, ...], ...] = ()
    for node, n in nodes:
        taken, _ = node.devices.choose(need, n)
        node_ids += (node.node_id,) * n
        devices += taken.bundles
    return Placement(node_ids, devices)


def reasons(ask: Ask, rooms: Sequence[NodeRoom]) -> tuple[str, ...]:
    """Why the gang does not fit into the rooms, a sentence per group."""
    eligible = [r for r in rooms if _eligible(ask, r)]
    if not eligible:
        where = f"group {ask.group}" if ask.group else "the cluster"
        what = f" with {' or '.join(ask.accelerators)}" if ask.accelerators else ""
        what += f" on {ask.market}" if ask.market else ""
        what += f" named {' or '.join(ask.nodes)}" if ask.nodes else ""
        return (f"{where} has no node{what} that takes work now",)
    told: list[str] = []
    for group in sorted({r.group for r in eligible}):
        members = [r for r in eligible if r.group == group]
        n = sum(bundles_on(r, ask.bundle, ask.count) for r in members)
        told.append(
            f"group {group}: {min(n, ask.count)} of {ask.count} fit now ({describe_bundle(ask.bundle)} each; "
            f"free on {len(members)} node{'s' if len(members) > 1 else ''}: {describe_free(ask.bundle, members)})"
        )
    return tuple(told)


# ---------------------------------------------------------------- how


def _eligible(ask: Ask, room: NodeRoom) -> bool:
    if (ask.group is None and room.group == HEAD_GROUP) or ask.group not in (None, room.group):
        return False
    if ask.market not in (None, room.market) or (ask.nodes and not {room.name, room.node_id} & set(ask.nodes)):
        return False
    return accelerator_matches(ask, room.accelerator)


def _only(index: RoomIndex, names: set[str]) -> RoomIndex:
    """An index of the nodes with these names or ids alone."""
    some = RoomIndex()
    some.usual = index.usual
    for node in index.nodes.values():
        if node.node_id in names or node.order[0] in names:
            shelf = some.shelves.setdefault(node.shelf.key, Shelf(*node.shelf.key))
            twin = some.nodes[node.node_id] = Node.__new__(Node)
            for slot in Node.__slots__:
                setattr(twin, slot, getattr(node, slot))
            twin.shelf, twin.stands_in = shelf, None
            shelf.changed[twin] = None
    return some


def _find(index: RoomIndex, ask: Ask, allow: Allow | None, least: int) -> Nodes | dict[str, int]:
    need = need_of(ask.bundle)
    shelves = index.eligible(ask)
    if ask.count == 1:
        return _find_one(shelves, need, ask, allow, index.usual)
    groups: dict[str, list[tuple[int, Shelf]]] = {}
    for preference, shelf in shelves:
        groups.setdefault(shelf.group, []).append((preference, shelf))
    most = dict.fromkeys(groups, 0)
    alone = [[s] for s in shelves]
    together = [members for members in groups.values() if len(members) > 1]
    for sets in (alone, together):
        best: tuple[tuple[object, ...], Nodes] | None = None
        for shelf_set in sets:
            on = [(shelf, b) for _, shelf in shelf_set for b in shelf.fitting(need, ask.market, allow)]
            if len(shelf_set) > 1:
                on.sort(key=lambda x: (need.gpus == 0 and x[0].is_gpu, x[1].key))
            found = _pack([b for _, b in on], need, ask)
            if isinstance(found, int):
                group = shelf_set[0][1].group
                most[group] = max(most[group], found)
                continue
            rank = _rank(found, shelf_set, need, ask)
            if best is None or rank < best[0]:  # type: ignore[operator]
                best = (rank, found)
        if best is not None:
            return best[1]
    fewer = max(most.values(), default=0)
    if least and fewer >= least:
        return _find(index, replace(ask, count=fewer), allow, 0)
    return most


def _rank(found: Nodes, shelf_set: Sequence[tuple[int, Shelf]], need: Need, ask: Ask) -> tuple[object, ...]:
    """Lower is better, among sets of nodes that all hold the gang."""
    preferences = {shelf.key: preference for preference, shelf in shelf_set}
    used = {node.shelf.key for node, _ in found}
    return (
        # work without GPUs first looks for nodes without GPUs
        need.gpus == 0 and any(is_gpu for _, _, is_gpu in used),
        max(preferences[key] for key in used),
        len({accelerator for _, accelerator, _ in used}),
        -len(found) if ask.strategy == "spread" else len(found),
        sum(node.devices.total for node, _ in found),
        sum(node.cpus for node, _ in found),
        shelf_set[0][1].key,
    )


def _find_one(
    shelves: Iterable[tuple[int, Shelf]], need: Need, ask: Ask, allow: Allow | None, usual: UsualAsk
) -> Nodes | dict[str, int]:
    best: tuple[tuple[object, ...], Bucket] | None = None
    for preference, shelf in shelves:
        for bucket in islice(shelf.fitting(need, ask.market, allow), MOST_LOOKS if usual.cpus and shelf.is_gpu else 1):
            breaks = bool(need.part) and bucket.partial < need.part
            strands = usual.grows_by(bucket.total, bucket.cpus, need.gpus, need.cpus)
            rank = (
                need.gpus == 0 and shelf.is_gpu, preference, strands, breaks, bucket.total, bucket.cpus, shelf.key,
            )  # fmt: skip
            if best is None or rank < best[0]:  # type: ignore[operator]
                best = (rank, bucket)
    return [(best[1].first()[0], 1)] if best else {}


def _pack(buckets: Sequence[Bucket], need: Need, ask: Ask) -> Nodes | int:
    """Like bundles into nodes, tightest first; how many fit at most when that is too few.

    Packed: the tightest node that takes all that is left, else the one that takes most.
    """
    room = [(b.capacity(need), b) for b in buckets]
    most = sum(capacity * len(b.members) for capacity, b in room)
    left = ask.count
    if most < left:
        return most
    if ask.strategy == "spread":
        return _spread(room, left)
    taken: dict[int, int] = {}  # nodes per bucket, in the order of their first use
    full: list[tuple[int, int, int]] = []  # (bucket, nodes, bundles on each)
    while left:
        best = -1
        for i, (capacity, b) in enumerate(room):
            if taken.get(i, 0) == len(b.members):
                continue
            if capacity >= left:
                best = i
                break
            if best < 0 or capacity > room[best][0]:
                best = i
        capacity, b = room[best]
        each = min(capacity, left)
        n = min(left // each, len(b.members) - taken.get(best, 0))
        full.append((best, n, each))
        taken[best] = taken.get(best, 0) + n
        left -= n * each
    nodes = {i: iter(room[i][1].first(n)) for i, n in taken.items()}
    return [(next(nodes[i]), each) for i, n, each in full for _ in range(n)]


def _spread(room: Sequence[tuple[int, Bucket]], count: int) -> Nodes:
    nodes = [(node, capacity) for capacity, b in room for node in b.first(count)]
    bundles = [0] * len(nodes)
    left = count
    while left:
        for i, (_, capacity) in enumerate(nodes):
            if left and bundles[i] < capacity:
                bundles[i] += 1
                left -= 1
    return [(node, n) for (node, _), n in zip(nodes, bundles, strict=True) if n]
