"""Pools applied to waiting tasks: a shape whose pool is used up is barred until the pool may have changed."""

from __future__ import annotations

from math import inf

from areal_sky.core.leases import Leases
from areal_sky.core.pools import Pools
from areal_sky.core.shapes import Item, Shape
from areal_sky.core.waiting import WaitingTasks


class Quotas:
    """See the module."""

    def __init__(self, pools: Pools, leases: Leases, waiting: WaitingTasks):
        self.pools = pools
        self._leases = leases
        self._waiting = waiting
        self._barred: dict[Shape, None] = {}
        self.changed = False  # there may be more for somebody than when the bars were set

    def use(self, item: Item, bundles: int) -> None:
        """The task holds so many bundles more (negative: fewer)."""
        if self.pools and bundles:
            self.pools.use(item.entry.pool, item.entry.ask.bundle.gpus * bundles)
            self.changed |= bundles < 0

    def allowed(self, shape: Shape) -> int:
        """How many bundles a task of that shape may have now; the shape is barred when these are too few."""
        count, gpus = shape.ask.count, shape.ask.bundle.gpus
        if not self.pools or gpus <= 0:
            return count
        allowed, why = self.pools.allowed(shape.pool, shape.preemptible)
        if allowed < inf:
            count = min(count, int(allowed // gpus))
        if count < shape.least:
            shape.barred = why
            self._barred[shape] = None
        return count

    def lacks_gpus(self, shape: Shape) -> float:
        """GPUs of which its pool must have fewer before such a task may start; 0: none. There are pools."""
        allowed, _ = self.pools.allowed(shape.pool, shape.preemptible)
        return max(0.0, shape.ask.bundle.gpus * shape.least - allowed)

    def lift_bars(self) -> None:
        """Look again at all that is barred, and at claims that waited until their pool uses less."""
        if not self.pools or not self.changed:
            return
        self._leases.claims_to_check.update(self._leases.claims)
        self.changed = False
        rooms = (site.room for site in self._leases.sites.values())
        self.pools.cluster_gpus = sum(room.free_gpus for room in rooms if room is not None)
        barred, self._barred = self._barred, {}
        for shape in barred:
            shape.barred = ""
            if shape.size and self.allowed(shape) >= shape.least:
                self._waiting.open_shape(shape)
