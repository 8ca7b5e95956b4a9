"""Capacity that a running task lends while it does not need it, and gets back first.

A task in a low phase (evaluation, validation) lends the room of some of its ranks. Nodes with lent room take only
preemptible tasks meanwhile. When the task wants its room back, the room is claimed at once, what has borrowed it is
ended, and the ranks are restored when all of it is free.
"""

from __future__ import annotations

from collections.abc import Iterable

from areal_sky.core.decisions import Decision, Preempt, Restore
from areal_sky.core.gangs import Placement
from areal_sky.core.leases import Hold, Leases
from areal_sky.core.roomindex import RoomIndex
from areal_sky.core.victims import ROLES
from areal_sky.core.waiting import Change
from areal_sky.errors import InvalidInput

GUARD = "(lent)"  # no task id looks like this


class Loans:
    """See the module."""

    def __init__(self, index: RoomIndex, leases: Leases):
        self._index = index
        self._leases = leases
        self.lent: dict[str, Hold] = {}

    def __contains__(self, task_id: str) -> bool:
        return task_id in self.lent

    def lend(self, task_id: str, ranks: Iterable[int], now_s: float) -> None:
        """The room of these ranks is idle from now on.

        Raises InvalidInput: it does not run, has lent already, has no such ranks.
        """
        lease = self._leases.running.get(task_id)
        if lease is None or lease.ending:
            why = "does not run" if lease is None else "is about to end"
            raise InvalidInput(f"task {task_id[:40]!r} {why}, so it has nothing to lend")
        if task_id in self.lent:
            raise InvalidInput(f"task {task_id[:40]!r} has lent already")
        n = len(lease.placement.node_ids)
        wanted = sorted(set(ranks))
        if not wanted or wanted[0] < 0 or wanted[-1] >= n:
            raise InvalidInput(f"ranks: expected some of 0 to {n - 1}")
        lent = Hold(lease.item, _part(lease.placement, wanted), now_s)
        self._leases.shrink(task_id, wanted)
        self.lent[task_id] = lent
        for node_id in lent.placement.node_ids:
            node = self._index.nodes.get(node_id)
            if node is not None and not node.guard:
                self._index.set_guard(node, GUARD)

    def take_back(self, task_id: str, now_s: float) -> list[Decision]:
        """Claims what was lent, and ends what has borrowed it. Nothing happens when nothing is lent."""
        lent = self.lent.get(task_id)
        if lent is None or task_id in self._leases.claims:
            return []
        self._leases.claim(lent)
        victims: list[Hold] = []
        for lease in self._borrowers(lent, now_s):
            if self._leases.claim_is_free(lent, victims):
                break
            victims.append(lease)
        for lease in list(victims):
            rest = [v for v in victims if v is not lease]
            if self._leases.claim_is_free(lent, rest):
                victims = rest
        for lease in victims:
            lease.ending = task_id
        why = f"its room was lent by {task_id}, which needs it again"
        return [Preempt(v.task_id, task_id, why) for v in victims]

    def restored(self, task_id: str) -> Restore:
        """All that was lent is free again: the task holds it from now on."""
        lent = self._close(task_id)
        self._leases.unclaim(task_id)
        lease = self._leases.release(task_id)
        assert lease is not None, "a loan ends with its lease"
        lease.placement = Placement(
            (*lease.placement.node_ids, *lent.placement.node_ids), (*lease.placement.devices, *lent.placement.devices)
        )
        self._leases.adopt(lease)
        return Restore(task_id, lent.placement)

    def forget(self, task_id: str) -> Hold | None:
        """The task has ended, or what it lent is lost."""
        if task_id not in self.lent:
            return None
        self._leases.unclaim(task_id)
        return self._close(task_id)

    # ---------------------------------------------------------------- how

    def _close(self, task_id: str) -> Hold:
        lent = self.lent.pop(task_id)
        still = {n for other in self.lent.values() for n in other.placement.node_ids}
        for node_id in lent.placement.node_ids:
            node = self._index.nodes.get(node_id)
            if node is not None and node.guard == GUARD and node_id not in still:
                self._index.set_guard(node, "")
                self._leases.changes[node] = Change(None)
        return lent

    def _borrowers(self, lent: Hold, now_s: float) -> list[Hold]:
        """Preemptible leases on the nodes of the loan, those to end first first."""
        found: dict[Hold, None] = {}
        for node_id in dict.fromkeys(lent.placement.node_ids):
            for lease in self._leases.sites[node_id].leases.values():
                if lease.item.entry.preemptible and lease.item is not lent.item:
                    found[lease] = None
        return sorted(found, key=lambda h: (ROLES.get(h.item.entry.kind, 9), h.lost_s(now_s), h.item.entry.number))


def _part(placement: Placement, ranks: list[int]) -> Placement:
    return Placement(tuple(placement.node_ids[r] for r in ranks), tuple(placement.devices[r] for r in ranks))
