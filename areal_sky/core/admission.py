"""The queue, the nodes and the leases of one cluster, and what to do next.

One mutable, deterministic object without I/O and clock, used unchanged by the head, by trace replays and by the speed
benchmark. Tell it what happens (`submit`, `set_node`, `ended`, ...), then ask `decide`. What it decides is taken as
done: the capacity of a `Place` is held from then on.

`decide` never looks at waiting tasks that cannot be placed (core/waiting.py), nor at nodes on which nothing changed
(core/leases.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from areal_sky.core.gangs import Placement
from areal_sky.core.leases import NOTHING, Hold, Leases
from areal_sky.core.model import Bundle
from areal_sky.core.placement import NodeRoom, Nodes, find, placement_on, reasons
from areal_sky.core.queueing import Entry, OrderPolicy, WeightedOrder, check_entry
from areal_sky.core.room import UNIT, need_of
from areal_sky.core.roomindex import Node, RoomIndex
from areal_sky.core.waiting import Item, Shape, WaitingTasks
from areal_sky.errors import InvalidInput

__all__ = ["Admission", "Decision", "Entry", "OrderPolicy", "Place", "Placement", "WeightedOrder"]


@dataclass(frozen=True, slots=True)
class Place:
    """Start the task there. An elastic gang may get fewer bundles than it asked for."""

    task_id: str
    placement: Placement


Decision = Place


class Admission:
    """See the module. Times are Unix seconds, all given by the caller; a clock that goes back breaks nothing."""

    def __init__(self, order: OrderPolicy | None = None):
        self.order: OrderPolicy = order or WeightedOrder()
        self._index = RoomIndex()
        self._leases = Leases(self._index)
        self._waiting = WaitingTasks(self._index)
        self._items: dict[str, Item] = {}
        self._timers: list[tuple[float, int, Item]] = []
        self._to_look_at: list[tuple[int, int, tuple[str, str], Node]] = []
        self._now_s = 0.0

    # ---------------------------------------------------------------- what happens to tasks

    def submit(self, entry: Entry, served_s: float = 0.0) -> None:
        """It waits from now on. Raises InvalidInput that lists every mistake, or when it is known already."""
        check_entry(entry)
        need_of(entry.ask.bundle)
        if entry.task_id in self._items:
            raise InvalidInput(f"task {entry.task_id[:40]!r} is known already")
        item = self._items[entry.task_id] = Item(entry, served_s)
        self._now_s = max(self._now_s, entry.submitted_s)
        self._enqueue(item)

    def withdraw(self, task_id: str) -> None:
        """It waits no longer. Nothing happens when it does not wait."""
        item = self._items.get(task_id)
        if item is not None and item.shape is not None:
            self._waiting.remove(item)
            del self._items[task_id]

    def requeue(self, task_id: str, served_s: float, now_s: float) -> None:
        """It has stopped running and waits again, at its old place. `served_s`: seconds of service that count."""
        lease = self._leases.release(task_id)
        if lease is not None:
            self._now_s = now_s
            lease.item.served_s = served_s
            self._enqueue(lease.item)

    def ended(self, task_id: str, now_s: float) -> None:
        """It has ended and holds nothing any more. Nothing happens when it is not known."""
        item = self._items.pop(task_id, None)
        if item is None:
            return
        self._now_s = now_s
        if item.shape is not None:
            self._waiting.remove(item)
        else:
            self._leases.release(task_id)

    def adopt(self, entry: Entry, placement: Placement, since_s: float, served_s: float = 0.0) -> None:
        """It runs there already (a new process takes over). Raises InvalidInput when it is known already."""
        check_entry(entry)
        if entry.task_id in self._items:
            raise InvalidInput(f"task {entry.task_id[:40]!r} is known already")
        item = self._items[entry.task_id] = Item(entry, served_s)
        self._leases.adopt(Hold(item, placement, since_s))

    # ---------------------------------------------------------------- what happens to nodes

    def set_node(self, room: NodeRoom, foreign: Bundle = NOTHING) -> None:
        """The node takes work: `room` without any of ours, `foreign` what others use of it. Cheap when nothing changed.

        Raises InvalidInput for figures that are no amounts.
        """
        self._leases.set_node(room, foreign)

    def drop_node(self, node_id: str) -> None:
        """The node takes no work any more (gone, draining, cordoned). What runs there runs until it is `ended`."""
        self._leases.drop_node(node_id)

    # ---------------------------------------------------------------- what to do

    def decide(self, now_s: float) -> list[Decision]:
        """All that can be done now, in the order in which it was decided."""
        self._now_s = now_s
        self._on_time(now_s)
        out: list[Decision] = []
        waiting = self._waiting
        while True:
            node = self._next_changed()
            best = waiting.best_for(node, self._leases.dirty[node], self._may_use) if node is not None else None
            first = waiting.next_open()
            if first is not None and (best is None or first <= best):
                self._look(first[2], out)
            elif best is not None and node is not None:
                item = best[2]
                if item.entry.ask.count > 1:
                    self._look(item, out)
                else:
                    self._start(item, [(node, 1)], out)
            elif node is not None:
                waiting.settle(node, self._leases.dirty.pop(node))
            else:
                return out

    # ---------------------------------------------------------------- what people ask

    @property
    def waiting_ids(self) -> list[str]:
        """Waiting tasks, next first."""
        waiting = [i for i in self._items.values() if i.shape is not None]
        return [i.entry.task_id for i in sorted(waiting, key=lambda i: (i.key, i.entry.number))]

    @property
    def running_ids(self) -> list[str]:
        return list(self._leases.running)

    def rooms(self) -> list[NodeRoom]:
        """What every node that takes work has free now."""
        return [_room(node) for node in self._index.nodes.values()]

    def why(self, task_id: str) -> str:
        """Why the task waits, in words; empty when it does not."""
        item = self._items.get(task_id)
        if item is None or item.shape is None:
            return ""
        if item.shape.barred:
            return item.shape.barred
        if item.shape.open:
            return "it has not been looked at yet"
        return "; ".join(reasons(item.entry.ask, self.rooms()))

    def place_in_queue(self, task_id: str) -> tuple[int, int]:
        """(which, of how many) among the waiting tasks, from 1; (0, n) when it does not wait."""
        item = self._items.get(task_id)
        waiting = [i for i in self._items.values() if i.shape is not None]
        if item is None or item.shape is None:
            return 0, len(waiting)
        mine = (item.key, item.entry.number)
        return 1 + sum(1 for i in waiting if (i.key, i.entry.number) < mine), len(waiting)

    # ---------------------------------------------------------------- how

    def _enqueue(self, item: Item) -> None:
        item.key, item.until_s = self.order.key(item.entry, item.served_s, self._now_s)
        if item.until_s < inf:
            heappush(self._timers, (item.until_s, item.entry.number, item))
        self._waiting.add(item)

    def _on_time(self, now_s: float) -> None:
        """Tasks whose place in the order changes about now."""
        timers = self._timers
        while timers and timers[0][0] <= now_s:
            until_s, _, item = heappop(timers)
            if item.shape is None or item.until_s != until_s:
                continue
            key, item.until_s = self.order.key(item.entry, item.served_s, now_s)
            if item.until_s <= now_s:
                item.until_s = now_s + 1e-3  # a policy that asks to be asked at once shall not stop the clock
            if item.until_s < inf:
                heappush(timers, (item.until_s, item.entry.number, item))
            self._waiting.reorder(item, key)

    def _next_changed(self) -> Node | None:
        """A node with more room than when it was looked at last; the one with least room first."""
        dirty = self._leases.dirty
        queue = self._to_look_at
        while queue:
            node = queue[-1][3]
            if node in dirty:
                return node
            queue.pop()
        if not dirty:
            return None
        found = [(n.bucket.total, n.cpus, n.order, n) for n in dirty if n.bucket is not None]
        found.sort(key=lambda x: x[:3], reverse=True)
        self._to_look_at = found
        return found[-1][3]

    def _look(self, item: Item, out: list[Decision]) -> None:
        """Anywhere."""
        shape = item.shape
        assert shape is not None
        found = find(self._index, shape.ask, lambda guard: self._may_use(shape, guard), shape.least)
        if isinstance(found, dict):
            self._waiting.close_shape(shape, self._missing(shape, found))
        else:
            self._start(item, found, out)

    def _start(self, item: Item, nodes: Nodes, out: list[Decision]) -> None:
        shape = item.shape
        assert shape is not None
        placement = placement_on(nodes, shape.need)
        self._waiting.remove(item)
        self._leases.hold(Hold(item, placement, self._now_s))
        out.append(Place(item.entry.task_id, placement))

    def _missing(self, shape: Shape, fit: dict[str, int]) -> dict[str, int]:
        """Bundles per group that are too many, before the changed nodes are settled."""
        missing = {group: shape.least - n for group, n in fit.items()}
        if shape.ask.count > 1:
            for node, before in self._leases.dirty.items():
                if node.shelf.group in missing and node.bucket is not None:
                    gain = node.bucket.capacity(shape.need) - (before.capacity(shape.need) if before else 0)
                    missing[node.shelf.group] += gain
        return missing

    def _may_use(self, shape: Shape, guard: str) -> bool:
        return not guard


def _room(node: Node) -> NodeRoom:
    shelf = node.shelf
    return NodeRoom(
        node.node_id, shelf.group, tuple(d / UNIT for d in node.devices), node.cpus / UNIT, node.memory / UNIT,
        shelf.accelerator or None, shelf.is_gpu, node.order[0], node.market,
    )  # fmt: skip

