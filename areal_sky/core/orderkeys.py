"""Keeps the keys of waiting and running tasks as their order wants them: asked for again when time, service or what the
order has learnt changes them.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

from areal_sky.core.leases import Hold, Leases
from areal_sky.core.preemption import Preemption
from areal_sky.core.queueing import LearningOrder, OrderByService, OrderPolicy
from areal_sky.core.shapes import Item
from areal_sky.core.waiting import WaitingTasks


class OrderKeys:
    """See the module."""

    def __init__(self, order: OrderPolicy, leases: Leases, waiting: WaitingTasks, preemption: Preemption):
        self._order = order
        self._learner = order if isinstance(order, LearningOrder) else None
        self._by_service = order if isinstance(order, OrderByService) else None
        self.learns = self._learner is not None  # whether it wants to be told what has ended ...
        self.by_service = self._by_service is not None  # ... and of every start, since service changes keys
        self._leases = leases
        self._waiting = waiting
        self._preemption = preemption
        self.timers: list[tuple[float, int, Item]] = []

    def ask(self, item: Item, now_s: float) -> None:
        """The key of a task that is going to wait."""
        item.key, item.until_s = self._order.key(item.entry, item.served_s, now_s)
        self._set_timer(item, now_s)

    def started(self, item: Item, now_s: float) -> None:
        """It is going to run, and its key may change with its service or with time."""
        item.key, item.until_s = self._order.key(item.entry, item.served_s, now_s)
        self._until_next_step(item, item.served_s, now_s)
        self._set_timer(item, now_s)

    def ended(self, item: Item, now_s: float, *, finished: bool) -> None:
        """It is over; its lease is still there if it ran."""
        if self._learner is not None:
            lease = self._lease_of(item)
            served_s = item.served_s if lease is None else lease.served_s(now_s)
            self._learner.ended(item.entry, served_s, finished and lease is not None)

    def renew(self, items: dict[str, Item], now_s: float) -> None:
        """All keys that have changed until now."""
        timers = self.timers
        while timers and timers[0][0] <= now_s:
            until_s, _, item = heappop(timers)
            if self._is_due(until_s, item):
                self._renew(item, now_s)
        if self._learner is not None:
            for task_id in self._learner.moved():
                if (item := items.get(task_id)) is not None:
                    self._renew(item, now_s)

    def next_change_s(self) -> float:
        """When a key changes next by time alone; inf: never."""
        timers = self.timers
        while timers and not self._is_due(timers[0][0], timers[0][2]):
            heappop(timers)
        return timers[0][0] if timers else inf

    # ---------------------------------------------------------------- how

    def _renew(self, item: Item, now_s: float) -> None:
        lease = self._lease_of(item)
        if lease is None and item.shape is None:
            return
        served_s = item.served_s if lease is None else lease.served_s(now_s)
        key, item.until_s = self._order.key(item.entry, served_s, now_s)
        if lease is None:
            if key != item.key:
                self._waiting.reorder(item, key)
        else:
            self._until_next_step(item, served_s, now_s)
            if key != item.key:
                item.key = key
                if item.entry.preemptible:
                    self._preemption.moved(lease)
        self._set_timer(item, now_s)

    def _until_next_step(self, item: Item, served_s: float, now_s: float) -> None:
        if self._by_service is not None:
            item.until_s = min(item.until_s, now_s + self._by_service.next_step_s(item.entry, served_s) - served_s)

    def _set_timer(self, item: Item, now_s: float) -> None:
        if item.until_s <= now_s:
            item.until_s = now_s + 1e-3  # an order that wants to be asked at once shall not stop the clock
        if item.until_s < inf:
            heappush(self.timers, (item.until_s, item.entry.number, item))

    def _is_due(self, until_s: float, item: Item) -> bool:
        """Whether that timer is the task's latest, and the task still waits or runs."""
        return item.until_s == until_s and (item.shape is not None or self._lease_of(item) is not None)

    def _lease_of(self, item: Item) -> Hold | None:
        lease = self._leases.running.get(item.entry.task_id)
        return lease if lease is not None and lease.item is item else None
