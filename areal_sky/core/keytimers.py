"""When the place of a task in the order has to be asked for again."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

from areal_sky.core.waiting import Item


class KeyTimers:
    """By `Item.until_s`; timers that an item has outlived are passed over."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []

    def set(self, item: Item, now_s: float) -> None:
        """After its key has been asked for."""
        if item.until_s <= now_s:
            item.until_s = now_s + 1e-3  # an order that asks to be asked at once shall not stop the clock
        if item.until_s < inf:
            heappush(self._heap, (item.until_s, item.entry.number, item))

    def due(self, now_s: float) -> list[Item]:
        """Whose time has come; each has to be `set` again."""
        found: list[Item] = []
        while self._heap and self._heap[0][0] <= now_s:
            until_s, _, item = heappop(self._heap)
            if item.until_s == until_s:
                item.until_s = inf  # not twice
                found.append(item)
        return found
