"""Starts waiting tasks wherever they fit: on nodes that have got room, and anywhere those of shapes not looked at yet.

Always the first task in the order of all that may fit. One that ended gives way to others on its node, so nearly all
starts are of one bundle on the node at hand: these go a short way (`Leases.start`), all others through `find`.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from areal_sky.core.backfill import Backfill
from areal_sky.core.decisions import Decision, Place
from areal_sky.core.leases import Hold, Leases
from areal_sky.core.loans import GUARD
from areal_sky.core.orderkeys import OrderKeys
from areal_sky.core.placement import Nodes, find, placement_on
from areal_sky.core.preemption import Preemption
from areal_sky.core.quotas import Quotas
from areal_sky.core.roomindex import RoomIndex
from areal_sky.core.shapes import First, Item, Shape
from areal_sky.core.waiting import Change, WaitingTasks


class Starting:
    """See the module."""

    def __init__(
        self, index: RoomIndex, leases: Leases, waiting: WaitingTasks, quotas: Quotas, backfill: Backfill,
        preemption: Preemption, keys: OrderKeys,
    ):  # fmt: skip
        self._index = index
        self._leases = leases
        self._waiting = waiting
        self._quotas = quotas
        self._pools = bool(quotas.pools)
        self._backfill = backfill
        self._preemption = preemption
        self._keys = keys
        self._now_s = 0.0

    def fill(self, now_s: float, out: list[Decision]) -> None:
        """Until nothing more fits."""
        self._now_s = now_s
        waiting, leases, may_use = self._waiting, self._leases, self.may_use
        if waiting.lines_version != self._index.version:
            waiting.renew_lines()
        changes = leases.changes
        looked_at: Change | None = None
        best: First | None = None
        while changes or waiting.open:
            if len(changes) == 1:  # as a rule
                (node,) = changes
            else:
                node = leases.next_changed()
            if node is None:
                first = waiting.next_open()
                if first is not None:
                    self._look(first[2], out)
                continue
            change = changes[node]
            if change is not looked_at:
                looked_at, best = change, None
            while True:
                if node.devices.total < node.shelf.line.least_gpus:
                    best = None
                else:
                    # While a node is looked at its room only gets less: who did not fit before does not now.
                    best = waiting.best_for(node, change, may_use, best)
                first = waiting.next_open() if waiting.open else None
                if first is not None and (best is None or first <= best):
                    self._look(first[2], out)
                elif best is None:
                    waiting.settle(node, leases.looked_at(node), may_use)
                elif self._pools or best[3].is_gang:
                    self._look(best[2], out)
                else:
                    waiting.remove(best[2])
                    lease = leases.start(best[2], best[3].need, node, now_s)
                    self._began(lease)
                    out.append(Place(lease.task_id, lease.placement))
                    continue
                break

    def run(self, lease: Hold, *, adopted: bool = False) -> None:
        """It runs from now on; `adopted`: it does already, free or not."""
        if adopted:
            self._leases.adopt(lease)
        else:
            self._leases.hold(lease)
        self._began(lease, adopted=adopted)

    def may_use(self, shape: Shape, guard: str) -> bool:
        """Whether the shape's first task may have a node with that guard, which is lent or reserved."""
        if guard == GUARD:
            return shape.preemptible
        return self._backfill.may_use(shape, guard, self._now_s)

    def _look(self, item: Item, out: list[Decision]) -> None:
        """Anywhere."""
        shape = item.shape
        assert shape is not None
        ask = shape.ask
        if self._pools:
            count = self._quotas.allowed(shape)
            if count < shape.least:
                return
            if count < ask.count:
                ask = replace(ask, count=count)
        found = find(self._index, ask, lambda guard: self.may_use(shape, guard), shape.least)
        if isinstance(found, dict):
            self._waiting.close_shape(shape, found, self._leases.changes)
            self._backfill.blocked(shape, self._now_s)
        else:
            self._start(item, shape, found, out)

    def _start(self, item: Item, shape: Shape, nodes: Nodes, out: list[Decision]) -> None:
        placement = placement_on(nodes, shape.need)
        self._waiting.remove(item)
        self.run(Hold(item, placement, self._now_s, shape.need))
        if self._pools:
            self._quotas.use(item, len(placement.node_ids))
        out.append(Place(item.entry.task_id, placement))

    def _began(self, lease: Hold, *, adopted: bool = False) -> None:
        item = lease.item
        if adopted or item.until_s < inf or self._keys.by_service:
            self._keys.started(item, lease.since_s)
        if item.entry.preemptible:
            self._preemption.begun(lease)
