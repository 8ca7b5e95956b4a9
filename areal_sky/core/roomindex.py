"""The free room of many nodes, ordered so that the tightest fit is found without looking at every node.

Nodes of one group, with the same accelerator, stand on one shelf. On a shelf, nodes with exactly the same free room are
one bucket; buckets are sorted by free GPUs, then CPUs. A change of one node moves it from one bucket to another. Most
nodes change twice, as one task ends and another starts, before anybody looks for nodes: they are sorted in only then.

A node may be guarded: then it is only given to those whom the guard's name admits (reserved for another, or lent).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from areal_sky.core.devices import Devices, Taken, devices_of
from areal_sky.core.fragmentation import UsualAsk
from areal_sky.core.gangs import Ask, accelerator_matches
from areal_sky.core.model import HEAD_GROUP
from areal_sky.core.room import UNIT, Need, NodeRoom, how_many, units
from areal_sky.errors import InvalidInput

Allow = Callable[[str], bool]  # whether who asks may use nodes with that guard
Order = tuple[str, str]  # (name, node id): which of equal nodes goes first


Free = tuple[Devices, int, int, str]  # (devices, CPUs, memory, guard) of a node at one time


class Node:
    """One node's free room now, in units. `stands_in`: the bucket where it has been sorted in last."""

    __slots__ = ("cpus", "devices", "guard", "market", "memory", "node_id", "order", "shelf", "site", "stands_in")

    def __init__(self, room: NodeRoom, shelf: Shelf):
        self.node_id = room.node_id
        self.order: Order = (room.name, room.node_id)
        self.shelf = shelf
        self.market = room.market
        self.guard = ""
        self.site: Any = None  # core/leases.py: what is on it
        self.stands_in: Bucket | None = None
        self.set_free([units(g) for g in room.gpus], units(room.cpus), units(room.memory_gib))

    def set_free(self, devices: Sequence[int], cpus: int, memory: int) -> None:
        """What is below nothing counts as nothing."""
        self.devices = devices_of(tuple([max(0, d) for d in devices]))
        self.cpus, self.memory = max(0, cpus), max(0, memory)
        self.shelf.changed[self] = None

    def take(self, taken: Taken) -> None:
        """Bundles start on it."""
        self.devices = self.devices.without(taken)
        self.cpus -= taken.cpus
        self.memory -= taken.memory
        self.shelf.changed[self] = None

    def free(self) -> Free:
        return self.devices, self.cpus, self.memory, self.guard


class Bucket:
    """The nodes with exactly this free room. `total` is that of all devices, `whole` counts untouched ones."""

    __slots__ = (
        "capacities", "cpus", "devices", "guard", "heap", "key", "market", "members", "memory", "partial", "row",
        "total", "whole",
    )  # fmt: skip

    def __init__(self, key: tuple[int, int, int, tuple[int, ...], str, str], devices: Devices):
        self.key = key
        self.total, self.cpus, self.memory, self.devices, self.market, self.guard = key
        self.whole, self.partial = devices.whole, devices.partial
        self.row = (*key[1:], self)  # how it stands among those with the same total
        self.members: dict[Order, Node] = {}
        self.heap: list[Order] | None = None  # built when it is first asked for
        self.capacities: dict[Need, int] = {}

    def capacity(self, need: Need) -> int:
        """Like bundles that fit together on one of its nodes."""
        n = self.capacities.get(need)
        if n is None:
            n = self.capacities[need] = how_many(self.devices, self.cpus, self.memory, need)
        return n

    def first(self, n: int = 1) -> list[Node]:
        """Its first `n` nodes by order, fewer where it has fewer."""
        if self.heap is None or len(self.heap) > 2 * len(self.members) + 64:
            self.heap = list(self.members)
            heapify(self.heap)
        heap, members = self.heap, self.members
        found: list[Order] = []
        while len(found) < n and heap:
            order = heappop(heap)
            if order in members and (not found or found[-1] != order):
                found.append(order)
        for order in found:
            heappush(heap, order)
        return [members[order] for order in found]


class Shelf:
    """Nodes that differ in nothing but their free room and their market."""

    def __init__(self, group: str, accelerator: str, is_gpu: bool):
        self.group = group
        self.accelerator = accelerator
        self.is_gpu = is_gpu
        self.key = (group, accelerator, is_gpu)
        self.buckets: dict[tuple[int, int, int, tuple[int, ...], str, str], Bucket] = {}
        self.line: Any = None  # core/waiting.py: who may use its nodes
        self.nodes = 0  # how many it has
        # Nodes to be sorted in before anybody looks for nodes; those apart of which no GPU is free and was none before.
        self.changed: dict[Node, None] = {}
        self._full: dict[Node, None] = {}
        self._totals: list[int] = []
        self._rows: dict[int, list[tuple[int, int, tuple[int, ...], str, str, Bucket]]] = {}

    def drop(self, node: Node) -> None:
        """Off the shelf."""
        self.nodes -= 1
        self.changed.pop(node, None)
        self._full.pop(node, None)
        if node.stands_in is not None:
            self._take_out(node, node.stands_in)

    def _sort_in(self, gpus: int) -> None:
        """All that has changed, as far as it matters to who looks for nodes with so much of GPUs free."""
        buckets = self.buckets
        if not gpus and self._full:
            self.changed.update(self._full)
            self._full.clear()
        for node in self.changed:
            devices = node.devices
            if gpus and not devices.total and node.stands_in is not None and not node.stands_in.total:
                self._full[node] = None
                continue
            key = (devices.total, node.cpus, node.memory, devices.kind, node.market, node.guard)
            new, old = buckets.get(key), node.stands_in
            if new is None:
                new = buckets[key] = Bucket(key, devices)
                row = self._rows.get(new.total)
                if row is None:
                    row = self._rows[new.total] = []
                    insort(self._totals, new.total)
                insort(row, new.row)
            elif new is old:
                continue
            new.members[node.order] = node
            if new.heap is not None:
                heappush(new.heap, node.order)
            if old is not None:
                self._take_out(node, old)
            node.stands_in = new
        self.changed.clear()

    def _take_out(self, node: Node, bucket: Bucket) -> None:
        del bucket.members[node.order]
        if not bucket.members:
            del self.buckets[bucket.key]
            row = self._rows[bucket.total]
            del row[bisect_left(row, bucket.row)]
            if not row:
                del self._rows[bucket.total]
                del self._totals[bisect_left(self._totals, bucket.total)]

    def freest(self, n: int) -> list[Node]:
        """The `n` nodes with the most free GPUs, then CPUs."""
        found: list[Node] = []
        for gpus in (1, 0):
            self._sort_in(gpus)
            found.clear()
            for total in reversed(self._totals[bisect_left(self._totals, gpus) :]):
                for row in reversed(self._rows[total]):
                    found += row[5].first(n - len(found))
                    if len(found) >= n:
                        return found
        return found

    def fitting(self, need: Need, market: str | None, allow: Allow | None) -> Iterator[Bucket]:
        """Buckets whose nodes take at least one such bundle, tightest first.

        Tight: few free GPUs, then few CPUs, then little memory; for a share of a GPU first of all those nodes that
        need not break a whole device for it.
        """
        self._sort_in(need.gpus)
        breaking: list[Bucket] = []
        for total in self._totals[bisect_left(self._totals, need.gpus) :]:
            row = self._rows[total]
            for i in range(bisect_left(row, (need.cpus,)), len(row)):
                bucket = row[i][5]
                if (
                    bucket.memory < need.memory
                    or (need.whole and bucket.whole < need.whole)
                    or (market is not None and bucket.market != market)
                    or (bucket.guard and (allow is None or not allow(bucket.guard)))
                ):
                    continue
                if need.part and bucket.partial < need.part:
                    if bucket.whole:
                        breaking.append(bucket)
                    continue
                yield bucket
        yield from breaking


class RoomIndex:
    """See the module. `rooms` may be changed later by `put` and `drop`, and its nodes."""

    def __init__(self, rooms: Iterable[NodeRoom] = ()):
        self.usual = UsualAsk()
        self.nodes: dict[str, Node] = {}
        self.shelves: dict[tuple[str, str, bool], Shelf] = {}
        self.guarded = 0  # nodes with a guard
        self.version = 0  # counts shelves: what depends on them is looked up again
        self._eligible: dict[tuple[object, ...], tuple[tuple[int, Shelf], ...]] = {}
        for room in rooms:
            self.put(room)

    def put(self, room: NodeRoom) -> Node:
        """Adds the node or replaces its room. Raises InvalidInput for figures that are no amounts."""
        if not all(map(math.isfinite, (*room.gpus, room.cpus, room.memory_gib))):
            raise InvalidInput(f"node {room.node_id[:40]!r}: its free room is not a number")
        self.drop(room.node_id)
        key = (room.group, room.accelerator or "", room.is_gpu_node)
        shelf = self.shelves.get(key)
        if shelf is None:
            shelf = self.shelves[key] = Shelf(*key)
            self._eligible.clear()
            self.version += 1
        node = self.nodes[room.node_id] = Node(room, shelf)
        shelf.nodes += 1
        return node

    def rooms(self) -> list[NodeRoom]:
        """What every node has free now."""
        return [room_with(n, n.devices.free, n.cpus, n.memory) for n in self.nodes.values()]

    def drop(self, node_id: str) -> None:
        node = self.nodes.pop(node_id, None)
        if node is not None:
            self.guarded -= bool(node.guard)
            node.shelf.drop(node)

    def set_guard(self, node: Node, guard: str) -> None:
        """Empty: anybody may have it."""
        if node.guard != guard:
            self.guarded += bool(guard) - bool(node.guard)
            node.guard = guard
            node.shelf.changed[node] = None

    def eligible(self, ask: Ask) -> tuple[tuple[int, Shelf], ...]:
        """(preference, shelf) of all shelves that the gang may use, whatever is free there; 0 is preferred most."""
        key = (ask.group, ask.accelerators, ask.ordered, ask.bundle.gpus > 0)
        found = self._eligible.get(key)
        if found is None:
            wanted = [a.lower() for a in ask.accelerators] if ask.ordered else []
            found = self._eligible[key] = tuple(
                (wanted.index(shelf.accelerator.lower()) if wanted else 0, shelf)
                for _, shelf in sorted(self.shelves.items())
                if _may_use(ask, shelf)
            )
        return found


def same_room(a: Free, b: Free) -> bool:
    """Whichever devices are free."""
    return a[0].kind == b[0].kind and a[1:] == b[1:]


def room_with(node: Node, devices: Sequence[int], cpus: int, memory: int) -> NodeRoom:
    """The node with so much free."""
    shelf = node.shelf
    return NodeRoom(
        node.node_id, shelf.group, tuple(max(0, d) / UNIT for d in devices), max(0, cpus) / UNIT,
        max(0, memory) / UNIT, shelf.accelerator or None, shelf.is_gpu, node.order[0], node.market,
    )  # fmt: skip


def _may_use(ask: Ask, shelf: Shelf) -> bool:
    if ask.group is None and shelf.group == HEAD_GROUP:
        return False  # the head keeps the cluster: work goes there only when it is asked for by name
    if ask.group is not None and shelf.group != ask.group:
        return False
    if ask.bundle.gpus > 0 and not shelf.is_gpu:
        return False
    return accelerator_matches(ask, shelf.accelerator)
