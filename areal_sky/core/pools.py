"""Quotas per model: what a pool is guaranteed, what it may have at most, and what it borrows.

A pool may use idle GPUs beyond its guarantee up to `max_gpus` (it borrows them). A task of a pool within its guarantee
takes borrowed GPUs back by preemption, whatever the ranks; nobody of another pool preempts work within a guarantee.
In a pool at its limit a task takes the place of the pool's own preemptible ones of lower rank. What cannot be preempted
cannot be taken back, so such a task borrows only what nobody is guaranteed. Tasks of no pool have no guarantee and no
limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from areal_sky.errors import InvalidInput

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Pool:
    """GPUs of one model or model type. Without `borrow` it has its guarantee and no more."""

    name: str
    guaranteed_gpus: float = 0.0
    max_gpus: float = math.inf
    borrow: bool = True

    @property
    def limit(self) -> float:
        return self.max_gpus if self.borrow else min(self.max_gpus, self.guaranteed_gpus)


class Pools:
    """What each pool uses now. `cluster_gpus`: all GPUs of nodes that take work."""

    def __init__(self, pools: Iterable[Pool] = ()):
        """Raises InvalidInput that lists every mistake."""
        self._pools: dict[str, Pool] = {}
        self._used: dict[str | None, float] = {}
        self.cluster_gpus = 0.0
        wrong: list[str] = []
        for pool in pools:
            if pool.name in self._pools:
                wrong.append(f"pool {pool.name}: there are two of that name")
            if not (math.isfinite(pool.guaranteed_gpus) and pool.guaranteed_gpus >= 0):
                wrong.append(f"pool {pool.name}: guaranteed_gpus {pool.guaranteed_gpus:g} is not a number of 0 or more")
            elif not pool.max_gpus >= pool.guaranteed_gpus:
                wrong.append(f"pool {pool.name}: max_gpus {pool.max_gpus:g} is less than its guarantee")
            self._pools[pool.name] = pool
        if wrong:
            raise InvalidInput("\n".join(wrong))

    def __bool__(self) -> bool:
        return bool(self._pools)

    def __contains__(self, name: str) -> bool:
        return name in self._pools

    def used(self, name: str | None) -> float:
        return self._used.get(name, 0.0)

    def use(self, name: str | None, gpus: float) -> None:
        """So many more (negative: fewer) GPUs are held for tasks of that pool."""
        self._used[name] = max(0.0, self._used.get(name, 0.0) + gpus)

    def allowed(self, name: str | None, preemptible: bool) -> tuple[float, str]:
        """(how many GPUs more the pool may use now, why no more)."""
        pool = self._pools.get(name) if name is not None else None
        used = self.used(name)
        limit, why = math.inf, ""
        if pool is not None:
            limit = pool.limit - used
            why = f"pool {pool.name} may have {pool.limit:g} GPUs and uses {used:g}"
        if not preemptible:
            within = max(0.0, pool.guaranteed_gpus - used) if pool is not None else 0.0
            promised = sum(
                max(0.0, p.guaranteed_gpus - self.used(p.name)) for p in self._pools.values() if p.name != name
            )
            free = self.cluster_gpus - sum(self._used.values())
            common = max(within, free - promised)
            if common < limit:
                limit = common
                why = f"it cannot be preempted, so it may not borrow the {promised:g} GPUs promised to other pools"
        return limit + EPS, why

    def is_over_limit(self, name: str | None) -> bool:
        """Whether the pool uses more than it may have, as it does while one of its tasks waits for others to end."""
        pool = self._pools.get(name) if name is not None else None
        return pool is not None and self.used(name) > pool.limit + EPS

    def within_guarantee(self, name: str | None, gpus: float = 0.0) -> bool:
        """Whether the pool with so many GPUs more would still be within what it is guaranteed."""
        pool = self._pools.get(name) if name is not None else None
        return pool is not None and self.used(name) + gpus <= pool.guaranteed_gpus + EPS

    def may_take(self, name: str | None, gpus: float, victim: str | None) -> bool | None:
        """Whether a task of that pool that needs so many GPUs may end one of the victim's pool: yes, no, or by rank."""
        if not self._pools or name == victim:
            return None
        if self.within_guarantee(victim):
            return False
        return True if self.within_guarantee(name, gpus) else None
