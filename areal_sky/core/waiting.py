"""Waiting tasks, grouped by shape: what does not fit is not tried again until room that could matter appears.

All tasks of one shape fit or do not fit together, so only the first of each shape is ever looked at. A shape is `open`
while nobody knows whether it fits; after a look in vain it is closed, and from then on only nodes that got room since
are looked at for it (`best_for`). A closed gang of several bundles is looked at once nodes have got as much room as it
missed.

Every shelf of nodes has a line: the shapes that may use it, in the order of their first tasks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush

from areal_sky.core.room import how_many
from areal_sky.core.roomindex import Free, Node, RoomIndex, same_room
from areal_sky.core.shapes import LAST, First, Item, Line, MayUse, Shape


class Change:
    """A node has other room than `before`. `seen`: the room with which gangs have been looked at in vain since."""

    __slots__ = ("before", "seen")

    def __init__(self, before: Free | None):
        self.before = before
        self.seen: dict[Shape, Free] | None = None

    def gain(self, node: Node, shape: Shape, may_use: MayUse) -> int:
        """Bundles that fit on the node now and did not when the gang was looked at last; may be below 0.

        Where guards have come or gone it is rather too many than too few.
        """
        before, guard, need = self.before, node.guard, shape.need
        if self.seen is not None:
            before = self.seen.get(shape, before)
        if guard and not may_use(shape, guard):
            return 0
        now = how_many(node.devices.free, node.cpus, node.memory, need, node.devices.whole)
        if before is None or before[3] not in ("", guard):
            return now
        return now - how_many(before[0].free, before[1], before[2], need, before[0].whole)


class WaitingTasks:
    """See the module. `index`: what is free."""

    def __init__(self, index: RoomIndex):
        self._index = index
        self.shapes: dict[tuple[object, ...], Shape] = {}
        self._lines: dict[tuple[str, str, bool], Line] = {}
        self.lines_version = -1  # RoomIndex.version of which there are lines
        self._shapes_so_far = 0
        self.open: list[tuple[float, int, Shape]] = []

    def in_order(self) -> list[Shape]:
        """All shapes, that of the first task first."""
        return sorted(self.shapes.values(), key=lambda s: s.first[:2] if s.first else (0.0, 0))

    def items(self) -> list[Item]:
        """All tasks, next first."""
        entries = ((x, shape) for shape in self.shapes.values() for x in (*shape.ready, *shape.heap))
        items = {x[2]: None for x, shape in entries if shape.holds(x)}
        return sorted(items, key=lambda i: (i.key, i.entry.number))

    def place_of(self, item: Item) -> tuple[int, int]:
        """(which, of how many), from 1; (0, n) when it does not wait."""
        items = self.items()
        if item.shape is None:
            return 0, len(items)
        mine = (item.key, item.entry.number)
        return sum(1 for i in items if (i.key, i.entry.number) <= mine), len(items)

    def add(self, item: Item) -> None:
        """Its key must be set."""
        entry = item.entry
        longest_s = None if entry.estimate_s is None else _round_up(max(0.0, entry.estimate_s - item.served_s))
        key = (entry.ask, entry.least, entry.pool, entry.preemptible, longest_s)
        shape = self.shapes.get(key)
        if shape is None:
            self._shapes_so_far += 1
            shape = self.shapes[key] = Shape(entry, key, longest_s, self._shapes_so_far)
            self._stand(shape)
        item.shape = shape
        shape.size += 1
        heappush(shape.heap, (item.key, entry.number, item, shape))
        if shape.first is None or (item.key, entry.number) < shape.first[:2]:
            self._sort_in(shape)

    def remove(self, item: Item) -> None:
        """It waits no longer."""
        shape = item.shape
        if shape is None:
            return
        item.shape = None
        shape.size -= 1
        first, ready = shape.first, shape.ready
        if not shape.size:
            shape.ready, shape.heap = [], []
            self._sort_in(shape)
            del self.shapes[shape.key]
            for line in shape.lines:
                _leave_gangs(line, shape)
        elif first is not None and first[2] is item:
            if ready and ready[-1] is first:
                ready.pop()
            if not shape.heap and len(ready) == shape.size:
                shape.first = ready[-1]  # as a rule: none of them has left from the middle
                self._sort_into_lines(shape)
                if shape.open:
                    heappush(self.open, (ready[-1][0], ready[-1][1], shape))
            else:
                self._sort_in(shape)
        elif len(shape.heap) + len(shape.ready) > 2 * shape.size + 64:
            shape.ready, shape.heap = [], [x for x in (*shape.ready, *shape.heap) if shape.holds(x)]
            heapify(shape.heap)

    def reorder(self, item: Item, key: float) -> None:
        """A waiting task's place in the order has changed."""
        shape = item.shape
        item.key = key
        if shape is not None:
            heappush(shape.heap, (key, item.entry.number, item, shape))
            self._sort_in(shape)

    # ---------------------------------------------------------------- which shape next

    def open_shape(self, shape: Shape) -> None:
        """It has to be looked at again."""
        shape.open = True
        self._sort_into_lines(shape)
        if shape.first is not None:
            heappush(self.open, (shape.first[0], shape.first[1], shape))

    def close_shape(self, shape: Shape, fit: dict[str, int], changes: dict[Node, Change]) -> None:
        """It does not fit: only so many bundles do in each node group, with the nodes as they are."""
        shape.open = False
        if shape.is_gang:
            shape.missing = {group: shape.least - n for group, n in fit.items()}
            shape.short = min(shape.missing.values(), default=shape.least)
            self._sort_into_lines(shape)
            for node, change in changes.items():
                if node.shelf.group in fit:
                    if change.seen is None:
                        change.seen = {}
                    change.seen[shape] = node.free()

    def next_open(self) -> First | None:
        """The first task of all open shapes."""
        heap = self.open
        while heap:
            _, number, shape = heap[0]
            first = shape.first
            if shape.open and not shape.barred and first is not None and first[1] == number:
                return first
            heappop(heap)
        return None

    def best_for(
        self, node: Node, change: Change, may_use: MayUse, after: First | None = None
    ) -> First | None:
        """The first of all tasks that may fit now that the node has other room than before.

        `after`: none of those before that one fits.

        A task of one bundle fits on it. A gang has to be looked at: it fits on the node, or may fit on several, since
        this one now takes as many bundles more as the gang missed.
        """
        line = node.shelf.line
        devices = node.devices
        if devices.total < line.least_gpus:
            return None
        cpus, memory, guard = node.cpus, node.memory, node.guard
        orders = line.orders[bisect_left(line.levels, -devices.most) :]
        if after is not None:
            orders = [order[bisect_left(order, after[:2]) :] for order in orders]
        best = LAST
        for order in orders:
            for place in order:
                if best < place:
                    break
                shape = place[3]
                if shape.cpus > cpus or shape.memory > memory:
                    continue
                if shape.barred or (guard and not may_use(shape, guard)):
                    continue
                if shape.special:
                    if shape.picky and not shape.may_use(node):
                        continue
                    # A gang fits on several nodes only if this one has what it misses.
                    if shape.is_gang and not shape.open and change.gain(node, shape, may_use) < shape.missing.get(
                        node.shelf.group, shape.least
                    ):
                        continue
                best = place
                break
        return None if best is LAST else best

    def settle(self, node: Node, change: Change, may_use: MayUse) -> None:
        """The node's room will stay so for now: what gangs miss changes. Opens those that may fit on several nodes."""
        before = change.before
        if before is not None and before[1] == node.cpus and same_room(before, node.free()):
            return
        group = node.shelf.group
        most = max(node.devices.whole, before[0].whole if before else 0)
        for whole, _, shape in node.shelf.line.gangs:
            if whole > most:
                return
            if shape.open:
                continue
            missing = shape.missing[group] = shape.missing.get(group, shape.least) - change.gain(node, shape, may_use)
            if missing <= 0:
                self.open_shape(shape)
            elif missing < shape.short:
                shape.short = missing
                self._sort_into_lines(shape)

    def renew_lines(self) -> None:
        """To be told before nodes are looked at, where there are shelves that have no line yet."""
        self.lines_version = self._index.version
        self._lines = {}
        for shape in self.shapes.values():
            self._stand(shape)
            self._sort_into_lines(shape)
        for shelf in self._index.shelves.values():
            shelf.line = self._lines.get(shelf.key) or Line()

    # ---------------------------------------------------------------- how

    def _stand(self, shape: Shape) -> None:
        """Into the lines of the shelves that it may use."""
        shape.lines, shape.orders, shape.place = [], [], None
        for _, shelf in self._index.eligible(shape.ask):
            line = self._lines.get(shelf.key)
            if line is None:
                line = shelf.line = self._lines[shelf.key] = Line()
            line.least_gpus = min(line.least_gpus, shape.need.gpus)
            shape.lines.append(line)
            if shape.is_gang:
                insort(line.gangs, (shape.need.whole, shape.number, shape))

    def _sort_in(self, shape: Shape) -> None:
        """After its first task may have changed."""
        old, first = shape.first, shape.find_first()
        if old is first:
            return
        shape.first = first
        if self._index.guarded and old is not None and first is not None and first < old:
            shape.open = True  # who goes further ahead may have nodes that were kept for others
        self._sort_into_lines(shape)
        if first is not None and shape.open:
            heappush(self.open, (first[0], first[1], shape))

    def _sort_into_lines(self, shape: Shape) -> None:
        """Where its first task stands, on its level."""
        old, first = shape.place, shape.first
        if old is not None and first is not None and not shape.is_gang:  # as a rule
            shape.place = first
            for order in shape.orders:
                del order[0 if order[0] is old else bisect_left(order, old)]
                insort(order, first)
            return
        if old is not None:
            for order in shape.orders:
                del order[0 if order[0] is old else bisect_left(order, old)]
        if shape.is_gang or not shape.orders:
            shape.orders = [line.order_of(shape.level()) for line in shape.lines]
        shape.place = first
        if first is not None:
            for order in shape.orders:
                insort(order, first)


def _leave_gangs(line: Line, shape: Shape) -> None:
    if shape.is_gang:
        del line.gangs[bisect_left(line.gangs, (shape.need.whole, shape.number))]


def _round_up(estimate_s: float) -> float:
    """To a power of four minutes: tasks of about the same length share a shape."""
    limit_s = 60.0
    while limit_s < estimate_s:
        limit_s *= 4.0
    return limit_s
