"""Tasks that fit or do not fit together, and which of them goes first."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from heapq import heappop
from math import inf
from typing import cast

from areal_sky.core.queueing import Entry
from areal_sky.core.room import MOST_BUNDLES, UNIT, need_of
from areal_sky.core.roomindex import Node

_SORT_FROM = 64  # newer tasks of a shape are sorted when there are so many and no sorted ones are left


class Item:
    """A task that waits or runs. `key`: its place in the order, asked for again at `until_s`."""

    __slots__ = ("entry", "key", "served_s", "shape", "until_s")

    def __init__(self, entry: Entry, served_s: float = 0.0):
        self.entry = entry
        self.served_s = served_s
        self.key = 0.0
        self.until_s = 0.0
        self.shape: Shape | None = None  # None: it does not wait

    def __lt__(self, other: Item) -> bool:
        """Of two with one key and number neither is first: one has left, and its entry in a heap not yet."""
        return False


MayUse = Callable[["Shape", str], bool]  # whether the shape may have nodes with that guard
First = tuple[float, int, Item, "Shape"]  # (key, submit number, task, its shape): the one to go first


LAST = cast(First, (inf,))  # goes after all


class Shape:
    """Waiting tasks that fit or do not fit together. `longest_s`: none of them runs longer, as far as is known."""

    __slots__ = (
        "ask", "barred", "cpus", "first", "heap", "is_gang", "key", "least", "lines", "longest_s", "memory", "missing",
        "need", "number", "open", "orders", "picky", "place", "pool", "preemptible", "ready", "short", "size",
        "special",
    )  # fmt: skip

    def __init__(self, entry: Entry, key: tuple[object, ...], longest_s: float | None, number: int):
        self.number = number
        self.ask = entry.ask
        self.is_gang = entry.ask.count > 1
        self.key = key
        self.need = need_of(entry.ask.bundle)
        self.cpus, self.memory = self.need.cpus, self.need.memory
        self.picky = bool(entry.ask.nodes) or entry.ask.market is not None
        self.special = self.is_gang or self.picky
        self.least = entry.least
        self.pool = entry.pool
        self.preemptible = entry.preemptible
        self.longest_s = longest_s
        # Tasks in two parts: sorted ones, the first last, which cost nothing to take from, and a heap of newer ones.
        self.ready: list[First] = []
        self.heap: list[First] = []
        self.first: First | None = None
        self.size = 0
        self.lines: list[Line] = []
        self.orders: list[list[First]] = []  # those of its level in its lines
        self.place: First | None = None  # which of its tasks stands there
        self.open = True
        self.barred = ""  # why none of them may start now, whatever is free (its pool is used up)
        self.missing: dict[str, int] = {}  # bundles per node group, when it was looked at last
        self.short = self.least  # the least of these

    def __lt__(self, other: Shape) -> bool:
        """As for tasks: one task may have stood first in both, one after the other."""
        return False

    def holds(self, entry: First) -> bool:
        """Whether that is still the place of a waiting task."""
        return entry[2].shape is self and entry[2].key == entry[0]

    def find_first(self) -> First | None:
        """Past all that wait no longer."""
        ready, heap = self.ready, self.heap
        while ready and not self.holds(ready[-1]):
            ready.pop()
        while heap and not self.holds(heap[0]):
            heappop(heap)
        if not ready and len(heap) > _SORT_FROM:
            ready = self.ready = sorted(heap, reverse=True)
            heap.clear()
        if ready and (not heap or ready[-1] <= heap[0]):
            return ready[-1]
        return heap[0] if heap else None

    def level(self) -> int:
        """What a node has free, in units (`Devices.most`), which it is worth looking at for it.

        That is what one bundle needs, and all bundles that it misses for a gang that has been looked at in vain.
        """
        missed = self.short if self.is_gang and not self.open else 1
        return self.need.whole * UNIT * missed or self.need.part

    def may_use(self, node: Node) -> bool:
        """Whether the node is one of those that it names; for those that are picky."""
        ask = self.ask
        if ask.market is not None and ask.market != node.market:
            return False
        return not ask.nodes or node.node_id in ask.nodes or node.order[0] in ask.nodes


class Line:
    """The shapes that may use the nodes of one shelf, by level, the shape with the first task of a level first.

    What needs more than a node has free is often the oldest that waits: it need not be passed where it is of no use.
    """

    __slots__ = ("gangs", "least_gpus", "levels", "orders")

    def __init__(self) -> None:
        self.levels: list[int] = []  # below 0, the largest first: its tasks are the oldest as a rule ...
        self.orders: list[list[First]] = []  # ... and the first tasks of the shapes on each
        self.gangs: list[tuple[int, int, Shape]] = []  # (whole devices, its number, shape) of several bundles
        self.least_gpus = UNIT * MOST_BUNDLES  # no shape that came asks for less

    def order_of(self, level: int) -> list[First]:
        """The first tasks of the shapes on that level."""
        i = bisect_left(self.levels, -level)
        if i == len(self.levels) or self.levels[i] != -level:
            self.levels.insert(i, -level)
            self.orders.insert(i, [])
        return self.orders[i]
