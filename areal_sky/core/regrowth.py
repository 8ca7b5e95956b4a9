"""Elastic gangs that run with fewer bundles than they asked for get them all again, once nobody else waits for room.

Ranks know how many they are from their start, so a gang does not grow while it runs: it is ended, with the usual grace,
and starts anew with all its bundles. That pays only where little is done twice: shortly after a checkpoint, and not
again before it has run for a while.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from areal_sky.core.decisions import Regrow
from areal_sky.core.leases import Hold, Leases
from areal_sky.core.loans import Loans
from areal_sky.core.placement import find
from areal_sky.core.quotas import Quotas
from areal_sky.core.roomindex import RoomIndex

SEARCH_EVERY_S = 5.0
MOST_LOST_S = 30.0  # of work since the latest checkpoint
LEAST_RUN_S = 300.0  # of this run, whatever its task allows


class Regrowth:
    """See the module."""

    def __init__(self, index: RoomIndex, leases: Leases, loans: Loans, quotas: Quotas):
        self._index = index
        self._leases = leases
        self._loans = loans
        self._quotas = quotas
        self._searched_s = -inf
        self._stay: dict[str, Hold] = {}

    def stay(self, lease: Hold) -> None:
        """Its ranks were given up for their own sake (a straggler, say): this run stays as it is."""
        self._stay[lease.task_id] = lease

    def search(self, now_s: float) -> list[Regrow]:
        """Whom to start anew. Asked while nobody waits."""
        if 0 <= now_s - self._searched_s < SEARCH_EVERY_S:
            return []
        self._searched_s = now_s
        running = self._leases.running
        self._stay = {t: h for t, h in self._stay.items() if running.get(t) is h}
        for lease in running.values():
            ask = lease.item.entry.ask
            missing = ask.count - len(lease.placement.node_ids)
            if missing and self._may(lease, now_s) and self._fits(lease, missing):
                lease.ending = lease.task_id
                why = f"starts anew with {ask.count} bundles instead of {ask.count - missing}: there is room for them, "
                why += f"nobody waits, and its checkpoint is {lease.lost_s(now_s):.0f} s old"
                return [Regrow(lease.task_id, why)]  # one at a time: the next one shall see what is left
        return []

    def _may(self, lease: Hold, now_s: float) -> bool:
        entry = lease.item.entry
        return (
            lease.checkpoint_s > lease.since_s
            and lease.lost_s(now_s) <= MOST_LOST_S
            and now_s - lease.since_s >= max(LEAST_RUN_S, entry.min_runtime_s)
            and not lease.ending
            and lease.task_id not in self._loans
            and lease.task_id not in self._stay
        )

    def _fits(self, lease: Hold, missing: int) -> bool:
        """Whether so many bundles more go beside it, on machines like its own."""
        entry, node = lease.item.entry, self._index.nodes.get(lease.placement.node_ids[0])
        if node is None:
            return False
        more_gpus, _ = self._quotas.pools.allowed(entry.pool, entry.preemptible) if self._quotas.pools else (inf, "")
        if missing * entry.ask.bundle.gpus > more_gpus:
            return False
        shelf = node.shelf
        kind = (shelf.accelerator,) if shelf.accelerator else ()
        ask = replace(entry.ask, count=missing, group=shelf.group, accelerators=kind, ordered=False)
        return not isinstance(find(self._index, ask), dict)
