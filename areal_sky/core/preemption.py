"""When a waiting task may push running ones out, and what it gets for it: a claim on what they free.

A task may preempt by rank (`OrderPolicy.may_preempt`, with a margin) or because its pool is within its guarantee and
others borrow (core/pools.py). Only preemptible tasks are victims, only once they have run for their minimum time, and
only when the whole gang fits then (core/victims.py says whom). The claim is the gang's placement: nobody else gets
that capacity, and the gang is placed once all of it is free. Equals never preempt each other, so a victim cannot push
its preemptor out in turn.

Searched at most every `SEARCH_EVERY_S`, for the first `MOST_SEARCHES` shapes, among the `MOST_VICTIMS` weakest tasks:
bounds on the cost of a decision.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf

from areal_sky.core.decisions import Decision, Preempt, Shrink
from areal_sky.core.gangs import Ask, Placement
from areal_sky.core.leases import Hold, Leases, left_on
from areal_sky.core.placement import find, placement_on
from areal_sky.core.pools import Pools
from areal_sky.core.queueing import OrderByService, OrderPolicy
from areal_sky.core.room import UNIT, NodeRoom
from areal_sky.core.roomindex import Node, RoomIndex, Shelf
from areal_sky.core.victims import Room, Unit, choose, choose_weakest, cost, freed
from areal_sky.core.waiting import Item, Shape, WaitingTasks

SEARCH_EVERY_S = 1.0
MOST_SEARCHES = 16
MOST_VICTIMS = 64

MayUse = Callable[[Shape, str], bool]


class Preemption:
    """See the module."""

    def __init__(self, index: RoomIndex, leases: Leases, waiting: WaitingTasks, order: OrderPolicy, pools: Pools):
        self._index = index
        self._leases = leases
        self._waiting = waiting
        self._order = order
        self._pools = pools
        # Preemptible leases per shelf, the weakest last: (standing, submit number, lease).
        self._lines: dict[tuple[str, str, bool], list[tuple[float, int, Hold]]] = {}
        self._searched_s = -inf
        self._choose = choose_weakest if isinstance(order, OrderByService) else choose

    # ---------------------------------------------------------------- who may be a victim

    def watch(self, lease: Hold) -> None:
        """A lease has begun."""
        if lease.item.entry.preemptible:
            lease.standing = self._order.standing(lease.item.entry, lease.item.key)
            for line in self._lines_of(lease):
                insort(line, (lease.standing, lease.item.entry.number, lease))

    def forget(self, lease: Hold) -> None:
        """It is over."""
        if lease.item.entry.preemptible:
            at = (lease.standing, lease.item.entry.number)
            for line in self._lines_of(lease):
                i = bisect_left(line, at)
                if i < len(line) and line[i][2] is lease:
                    del line[i]

    # ---------------------------------------------------------------- the search

    def search(self, now_s: float, may_use: MayUse) -> list[Decision]:
        """Claims for waiting tasks that may push others out, with the decisions to do so."""
        if 0 <= now_s - self._searched_s < SEARCH_EVERY_S or not any(self._lines.values()):
            return []
        self._searched_s = now_s
        out: list[Decision] = []
        searches = 0
        for _, _, shape in list(self._waiting.order):
            while shape.first is not None and not shape.open and not shape.barred and searches < MOST_SEARCHES:
                searches += 1
                if not self._claim_for(shape, shape.first[2], now_s, may_use, out):
                    break
            if searches >= MOST_SEARCHES:
                break
        return out

    def _claim_for(self, shape: Shape, item: Item, now_s: float, may_use: MayUse, out: list[Decision]) -> bool:
        best: tuple[object, Shelf, list[Unit], dict[str, Room]] | None = None
        for _, shelf in self._index.eligible(shape.ask):
            victims = list(self._victims(shape, item, shelf, now_s))
            if not victims:
                continue
            units = [unit for lease in victims for unit in _units(lease, now_s)]
            nodes = {n: self._index.nodes.get(n) for unit in units for n in unit.node_ids()}
            usable = [n for n, node in nodes.items() if _usable(node, shape, shelf, may_use)]
            rooms = {n: left_on(self._leases.sites[n]) for n in usable}
            elsewhere = sum(
                b.capacity(shape.need) * len(b.members)
                for b in shelf.fitting(shape.need, shape.ask.market, lambda g: may_use(shape, g))
            )
            for n in rooms:
                node = self._index.nodes[n]
                elsewhere -= node.bucket.capacity(shape.need) if node.bucket else 0
            found = self._choose(shape.need, shape.least, 0 if shape.ask.nodes else elsewhere, rooms, units)
            if found is not None and (best is None or (cost(found), shelf.key) < best[0]):  # type: ignore[operator]
                best = ((cost(found), shelf.key), shelf, found, rooms)
        if best is None:
            return False
        _, shelf, found, rooms = best
        placement = self._placement(shape, shelf, found, rooms, may_use)
        if placement is None:
            return False
        self._waiting.remove(item)
        self._leases.claim(Hold(item, placement, now_s))
        self._pools.use(item.entry.pool, shape.need.gpus / UNIT * len(placement.node_ids))
        out += self._told(found, item, now_s)
        return True

    def _victims(self, shape: Shape, item: Item, shelf: Shelf, now_s: float) -> Iterator[Hold]:
        """Leases on that shelf that the task may end, weakest first."""
        gpus = shape.need.gpus / UNIT * shape.least
        n = 0
        for _, _, lease in reversed(self._lines.get(shelf.key, ())):
            entry = lease.item.entry
            if lease.ending or now_s < lease.since_s + entry.min_runtime_s:
                continue
            may = self._pools.may_take(shape.pool, gpus, entry.pool)
            if may is None:
                may = self._order.may_preempt(item.entry, item.key, entry, lease.item.key, now_s)
                if not may and not self._pools:
                    return  # all others stand better still
            if may:
                yield lease
                n += 1
                if n >= MOST_VICTIMS:
                    return

    def _placement(
        self, shape: Shape, shelf: Shelf, found: list[Unit], rooms: dict[str, Room], may_use: MayUse
    ) -> Placement | None:
        """Where the gang goes once the units are gone."""
        then = RoomIndex()
        for node_id, room in rooms.items():
            then.put(_as_room(self._index.nodes[node_id], freed(room, node_id, found)))
        if not shape.ask.nodes:
            for bucket in shelf.fitting(shape.need, shape.ask.market, lambda g: may_use(shape, g)):
                for node in bucket.first(shape.ask.count + len(rooms)):
                    if node.node_id not in rooms:
                        then.put(_as_room(node, (node.devices, node.cpus, node.memory)))
        ask: Ask = replace(shape.ask, nodes=(), ordered=False)
        nodes = find(then, ask, None, shape.least)
        return None if isinstance(nodes, dict) else placement_on(nodes, shape.need)

    def _told(self, found: list[Unit], item: Item, now_s: float) -> list[Decision]:
        mine = item.entry.task_id
        out: list[Decision] = []
        ended = {u.lease for u in found if u.ends}
        ranks: dict[Hold, list[int]] = {}
        for unit in found:
            if not unit.ends and unit.lease not in ended:
                ranks.setdefault(unit.lease, []).extend(unit.ranks)
        for lease, gone in ranks.items():
            lease.ending = mine
            left = len(lease.placement.node_ids) - len(gone)
            out.append(Shrink(lease.task_id, tuple(sorted(gone)), mine, f"shrunk to {left} bundles for {mine}"))
        for unit in found:
            if unit.ends:
                unit.lease.ending = mine
                minutes = unit.lost_gpu_s / 60.0
                out.append(
                    Preempt(
                        unit.lease.task_id, mine,
                        f"preempted for {mine}, {minutes:.1f} GPU minutes since its last checkpoint",
                    )
                )  # fmt: skip
        return out

    def _lines_of(self, lease: Hold) -> list[list[tuple[float, int, Hold]]]:
        if not lease.shelves:
            nodes = (self._index.nodes.get(n) for n in dict.fromkeys(lease.placement.node_ids))
            lease.shelves = tuple(dict.fromkeys(node.shelf.key for node in nodes if node is not None))
        return [self._lines.setdefault(key, []) for key in lease.shelves]


def _units(lease: Hold, now_s: float) -> Iterator[Unit]:
    """An elastic gang's bundles above its least number one by one, last ranks first; and all of it."""
    n = len(lease.placement.node_ids)
    for rank in range(n - 1, lease.item.entry.least - 1, -1):
        yield Unit(lease, (rank,), 0.0)
    yield Unit(lease, (), lease.lost_s(now_s) * lease.need.gpus / UNIT * n)


def _usable(node: Node | None, shape: Shape, shelf: Shelf, may_use: MayUse) -> bool:
    if node is None or node.shelf is not shelf or shape.ask.market not in (None, node.market):
        return False
    if shape.ask.nodes and node.node_id not in shape.ask.nodes and node.order[0] not in shape.ask.nodes:
        return False
    return not node.guard or may_use(shape, node.guard)


def _as_room(node: Node, room: Room) -> NodeRoom:
    devices, cpus, memory = room
    shelf = node.shelf
    return NodeRoom(
        node.node_id, shelf.group, tuple(max(0, d) / UNIT for d in devices), max(0, cpus) / UNIT,
        max(0, memory) / UNIT, shelf.accelerator or None, shelf.is_gpu, node.order[0], node.market,
    )  # fmt: skip
