"""When a waiting task may push running ones out, and what it gets for it: a claim on what they free.

A task may preempt by rank (`OrderPolicy.may_preempt`, with a margin) or because its pool is within its guarantee and
others borrow (core/pools.py). Only preemptible tasks are victims, only once they have run for their minimum time, and
only when the whole gang fits then (core/victims.py says whom). The claim is the gang's placement: nobody else gets
that capacity, and the gang is placed once all of it is free. Equals never preempt each other, so a victim cannot push
its preemptor out in turn.

Bounds on the cost of a decision: a round of searches begins every `SEARCH_EVERY_S`, for the first `MOST_SEARCHES`
shapes, each among the `MOST_VICTIMS` weakest tasks of a shelf; once so many have been weighed, the round goes on with
the next decision.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import replace
from math import inf

from areal_sky.core.decisions import Decision, Preempt, Shrink
from areal_sky.core.gangs import Ask, Placement
from areal_sky.core.leases import Hold, Leases, left_on
from areal_sky.core.placement import find, placement_on
from areal_sky.core.queueing import OrderByService, OrderPolicy
from areal_sky.core.quotas import Quotas
from areal_sky.core.room import UNIT, how_many
from areal_sky.core.roomindex import Node, RoomIndex, Shelf, room_with
from areal_sky.core.shapes import Item, MayUse, Shape
from areal_sky.core.victims import Room, Unit, choose, choose_weakest, cost, freed, with_more
from areal_sky.core.waiting import WaitingTasks

SEARCH_EVERY_S = 1.0
MOST_SEARCHES = 16
MOST_VICTIMS = 48
MOST_SCANNED = 128

Cost = tuple[int, int, float, int]
ShelfKey = tuple[str, str, bool]
Standing = tuple[float, int, int, Hold]  # (- standing, - submit number, counter, lease)
FEW = 16  # what is less than a 16th of a line is put into it one by one, more by sorting it anew


class Preemption:
    """See the module."""

    def __init__(self, index: RoomIndex, leases: Leases, waiting: WaitingTasks, order: OrderPolicy, quotas: Quotas):
        self._index = index
        self._leases = leases
        self._waiting = waiting
        self._order = order
        self._quotas = quotas
        self._pools = quotas.pools
        # Preemptible leases per shelf, the weakest first. Those that have ended, or stand otherwise now, are found out
        # when they are looked at.
        self._lines: dict[Shelf, list[Standing]] = {}
        self._watched = 0
        # Not in a line yet: most leases end before anybody looks for victims.
        self._begun: dict[tuple[Hold, Shelf], None] = {}
        self.began_s = -inf
        self.round: list[Shape] = []  # shapes still to be searched for, the next last
        self._weakest: dict[Shelf, list[Hold]] = {}  # in this round
        self._weighed = 0  # victims, in this decision
        self._choose = choose_weakest if isinstance(order, OrderByService) else choose

    # ---------------------------------------------------------------- who may be a victim

    def begun(self, lease: Hold) -> None:
        """A lease of a preemptible task has begun."""
        for site, _ in lease.parts:
            if site.node is not None:
                self._begun[lease, site.node.shelf] = None
        if len(self._begun) > 2 * len(self._leases.running) + 64:
            self._line_up()

    def moved(self, lease: Hold) -> None:
        """It stands otherwise than before."""
        place = self._place(lease)
        for shelf in {site.node.shelf for site, _ in lease.parts if site.node is not None}:
            insort(self._lines.setdefault(shelf, []), place)

    # ---------------------------------------------------------------- the search

    def search(self, now_s: float, may_use: MayUse) -> list[Decision]:
        """Claims for waiting tasks that may push others out, with the decisions to do so.

        Asked while there is a `round`, and when one is due.
        """
        if not 0 <= now_s - self.began_s < SEARCH_EVERY_S:
            self.began_s = now_s
            shapes = self._waiting.in_order() if self._lines or self._begun else []
            self.round = shapes[:MOST_SEARCHES][::-1]
            self._weakest = {}
        out: list[Decision] = []
        self._weighed = 0
        while self.round and self._weighed < MOST_VICTIMS:
            shape = self.round[-1]
            may = shape.first is not None and (not shape.open or shape.barred)
            if not may or not self._claim_for(shape, now_s, may_use, out):
                self.round.pop()
        return out

    def _line_up(self) -> None:
        """What has begun and still runs."""
        new: dict[Shelf, list[Standing]] = {}
        for lease, shelf in self._begun:
            if self._leases.running.get(lease.task_id) is lease:
                new.setdefault(shelf, []).append(self._place(lease))
        self._begun.clear()
        for shelf, places in new.items():
            line = self._lines.setdefault(shelf, [])
            if len(places) * FEW > len(line):
                line += places
                line.sort()
            else:
                for place in places:
                    insort(line, place)

    def _place(self, lease: Hold) -> Standing:
        entry = lease.item.entry
        lease.standing = self._order.standing(entry, lease.item.key)
        self._watched += 1
        return -lease.standing, -entry.number, self._watched, lease

    def _claim_for(self, shape: Shape, now_s: float, may_use: MayUse, out: list[Decision]) -> bool:
        assert shape.first is not None
        item = shape.first[2]
        allowed = self._quotas.allowed(shape)
        own = allowed < shape.least  # its pool is used up: only the pool's own tasks can make room
        if own:
            allowed = shape.least
            if any(claim.item.entry.pool == shape.pool for claim in self._leases.claims.values()):
                return False  # what is on its way out for that one is not known to be enough for two
        best: tuple[tuple[Cost, ShelfKey], Shelf, list[Unit], dict[str, Room]] | None = None
        for _, shelf in self._index.eligible(shape.ask):
            victims = list(self._victims(shape, item, shelf, now_s, own=own))
            if not victims:
                continue
            self._weighed += len(victims)
            units = [unit for lease in victims for unit in _units(lease, now_s)]
            nodes = {n: self._index.nodes.get(n) for unit in units for n in unit.node_ids()}
            usable = [n for n, node in nodes.items() if _usable(node, shape, shelf, may_use)]
            rooms = {n: left_on(self._leases.sites[n]) for n in usable}
            elsewhere = sum(
                b.capacity(shape.need) * len(b.members)
                for b in shelf.fitting(shape.need, shape.ask.market, lambda g: may_use(shape, g))
            )
            nodes_now = (self._index.nodes[n] for n in rooms)
            elsewhere -= sum(how_many(n.devices.free, n.cpus, n.memory, shape.need) for n in nodes_now)
            found = self._choose(shape.need, shape.least, 0 if shape.ask.nodes else elsewhere, rooms, units)
            if found is not None and own:
                found = with_more(found, units, self._quotas.lacks_gpus(shape) * UNIT)
            if found is not None and (best is None or (cost(found), shelf.key) < best[0]):
                best = ((cost(found), shelf.key), shelf, found, rooms)
        if best is None:
            return False
        _, shelf, found, rooms = best
        placement = self._placement(shape, allowed, shelf, found, rooms, may_use)
        if placement is None:
            return False
        self._waiting.remove(item)
        self._leases.claim(Hold(item, placement, now_s))
        self._quotas.use(item, len(placement.node_ids))
        out += self._told(found, item, now_s)
        return True

    def _victims(self, shape: Shape, item: Item, shelf: Shelf, now_s: float, *, own: bool) -> Iterator[Hold]:
        """Leases on that shelf that the task may end, weakest first. `own`: of its own pool alone."""
        gpus = shape.need.gpus / UNIT * shape.least
        n = 0
        for lease in self._weakest_on(shelf, now_s):
            entry = lease.item.entry
            if lease.ending or self._leases.running.get(entry.task_id) is not lease:
                continue
            if own and entry.pool != shape.pool:
                continue
            may = self._pools.may_take(shape.pool, gpus, entry.pool) if self._pools else None
            if may is None:
                may = self._order.may_preempt(item.entry, item.key, entry, lease.item.key, now_s)
                if not may and not self._pools:
                    return  # all others stand better still
            if may:
                yield lease
                n += 1
                if n >= MOST_VICTIMS:
                    return

    def _weakest_on(self, shelf: Shelf, now_s: float) -> list[Hold]:
        """Leases that have run for their minimum time, weakest first: not all, but enough."""
        found = self._weakest.get(shelf)
        if found is not None:
            return found
        self._line_up()
        most = MOST_SCANNED if self._pools else MOST_VICTIMS
        found = self._weakest[shelf] = []
        line, seen = self._lines.get(shelf, []), dict[Hold, Standing]()
        running, looked_at = self._leases.running, 0
        for place in line:
            looked_at, lease = looked_at + 1, place[3]
            if running.get(lease.task_id) is lease and lease.standing == -place[0] and lease not in seen:
                seen[lease] = place
                if now_s >= lease.since_s + lease.item.entry.min_runtime_s:
                    found.append(lease)
                if len(found) >= most or len(seen) >= MOST_SCANNED:
                    break
        line[:looked_at] = seen.values()
        if len(line) > 2 * len(running) + 64:
            line[:] = [x for x in line if running.get(x[3].task_id) is x[3] and x[3].standing == -x[0]]
        return found

    def _placement(
        self, shape: Shape, most: int, shelf: Shelf, found: list[Unit], rooms: dict[str, Room], may_use: MayUse
    ) -> Placement | None:
        """Where the gang goes once the units are gone."""
        then = RoomIndex()
        for node_id, room in rooms.items():
            then.put(room_with(self._index.nodes[node_id], *freed(room, node_id, found)))
        if not shape.ask.nodes:
            for bucket in shelf.fitting(shape.need, shape.ask.market, lambda g: may_use(shape, g)):
                for node in bucket.first(shape.ask.count + len(rooms)):
                    if node.node_id not in rooms:
                        then.put(room_with(node, node.devices.free, node.cpus, node.memory))
        ask: Ask = replace(shape.ask, count=most, nodes=(), ordered=False)
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
