"""The queue, the nodes and the leases of one cluster, and what to do next.

One mutable, deterministic object without I/O and clock, used unchanged by the head, by trace replays and by the speed
benchmark. Tell it what happens, then ask `decide`:

    submit -> Place -> ended                         a task's life
    Place -> Preempt -> requeue -> Place             a victim: tell `requeue` once it has ended
    Place -> Shrink -> shrunk                        an elastic gang gives ranks to another task
    Place -> Regrow -> requeue -> Place              and has them all again when nobody waits
    lend -> take_back -> (Preempt ...) -> Restore    a task in a low phase

What it decides is taken as done: the capacity of a `Place` is held from then on, that of victims is kept for whom they
are ended. `decide` never looks at waiting tasks that cannot be placed (core/waiting.py), nor at nodes on which nothing
changed (core/leases.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from areal_sky.core.backfill import PLAN_EVERY_S, Backfill, Reservation
from areal_sky.core.decisions import Decision, Place, Preempt, Regrow, Restore, Shrink
from areal_sky.core.gangs import Placement
from areal_sky.core.leases import NOTHING, Hold, Leases
from areal_sky.core.loans import Loans
from areal_sky.core.model import Bundle
from areal_sky.core.orderkeys import OrderKeys
from areal_sky.core.placement import NodeRoom
from areal_sky.core.pools import Pool, Pools
from areal_sky.core.preemption import SEARCH_EVERY_S, Preemption
from areal_sky.core.queueing import Entry, OrderPolicy, WeightedOrder, check_entry
from areal_sky.core.quotas import Quotas
from areal_sky.core.regrowth import Regrowth
from areal_sky.core.room import need_of
from areal_sky.core.roomindex import RoomIndex
from areal_sky.core.shapes import Item
from areal_sky.core.starting import Starting
from areal_sky.core.waiting import WaitingTasks
from areal_sky.core.waitreasons import why_it_waits
from areal_sky.errors import InvalidInput

__all__ = [
    "Admission", "Decision", "Entry", "OrderPolicy", "Place", "Placement", "Pool", "Preempt", "Regrow", "Restore",
    "Shrink", "WeightedOrder",
]  # fmt: skip

PATIENCE_S = 300.0


class Admission:
    """See the module. Times are Unix seconds, all given by the caller; a clock that goes back breaks nothing."""

    def __init__(self, order: OrderPolicy | None = None, pools: Iterable[Pool] = (), patience_s: float = PATIENCE_S):
        """`patience_s`: how long the first in line waits before nodes are kept free for it though nobody knows when
        what runs there will end. Raises InvalidInput for pools that contradict themselves.
        """
        self.order: OrderPolicy = order or WeightedOrder()
        self._index = RoomIndex()
        self._leases = Leases(self._index)
        self._waiting = WaitingTasks(self._index)
        self._quotas = Quotas(Pools(pools), self._leases, self._waiting)
        self._pools = bool(self._quotas.pools)  # whether there are any
        self._loans = Loans(self._index, self._leases)
        self._backfill = Backfill(self._index, self._leases, self._waiting, patience_s)
        self._preemption = Preemption(self._index, self._leases, self._waiting, self.order, self._quotas)
        self._regrowth = Regrowth(self._index, self._leases, self._loans, self._quotas)
        self._items: dict[str, Item] = {}
        self._keys = OrderKeys(self.order, self._leases, self._waiting, self._preemption)
        self._starting = Starting(
            self._index, self._leases, self._waiting, self._quotas, self._backfill, self._preemption, self._keys
        )
        self._told: list[Decision] = []  # decided outside of `decide`
        self._now_s = 0.0

    # ---------------------------------------------------------------- what happens to tasks

    def submit(self, entry: Entry, served_s: float = 0.0) -> None:
        """It waits from now on. Raises InvalidInput that lists every mistake, or when it is known already."""
        item = self._new(entry, served_s)
        need = need_of(entry.ask.bundle)
        self._index.usual.seen(need.gpus * entry.ask.count, need.cpus * entry.ask.count)
        self._now_s = max(self._now_s, entry.submitted_s)
        self._enqueue(item)

    def adopt(self, entry: Entry, placement: Placement, since_s: float, served_s: float = 0.0) -> None:
        """It runs there already (a new process takes over). Raises InvalidInput when it is known already."""
        item = self._new(entry, served_s)
        self._starting.run(Hold(item, placement, since_s), adopted=True)
        self._quotas.use(item, len(placement.node_ids))

    def progress(self, task_id: str, checkpoint_s: float) -> None:
        """It has a checkpoint of its work up to that time. Nothing happens when it does not run."""
        lease = self._leases.running.get(task_id)
        if lease is not None:
            lease.checkpoint_s = max(lease.checkpoint_s, checkpoint_s)

    def requeue(self, task_id: str, served_s: float, now_s: float) -> None:
        """It has stopped running and waits again, at its old place. `served_s`: seconds of service that count."""
        self._now_s = now_s
        lease = self._stop(task_id)
        if lease is not None:
            lease.item.served_s = served_s
            self._enqueue(lease.item)

    def ended(self, task_id: str, now_s: float, *, finished: bool = True) -> None:
        """It has ended, or shall wait no longer, and holds nothing any more. Nothing happens when it is not known.

        `finished`: it ended by itself, so that others like it may be expected to run about as long.
        """
        item = self._items.pop(task_id, None)
        if item is None:
            return
        self._now_s = now_s
        if self._keys.learns:
            self._keys.ended(item, now_s, finished=finished)
        if item.shape is not None:
            self._waiting.remove(item)
        elif self._stop(task_id) is None:
            self._drop_claim(task_id)

    def shrunk(self, task_id: str, ranks: Iterable[int], now_s: float) -> None:
        """These ranks of an elastic gang have ended; the others are numbered anew from 0."""
        self._now_s = now_s
        lease = self._leases.running.get(task_id)
        if lease is not None:
            before = len(lease.placement.node_ids)
            if not lease.ending:
                self._regrowth.stay(lease)
            self._leases.shrink(task_id, ranks)
            lease.ending = ""
            self._quotas.use(lease.item, len(lease.placement.node_ids) - before)

    def lend(self, task_id: str, ranks: Iterable[int], now_s: float) -> None:
        """The task is in a low phase: the room of these ranks is idle. See core/loans.py. Raises InvalidInput.

        The room still counts as used by its pool, so that the limit holds when it gets it back.
        """
        self._now_s = now_s
        self._loans.lend(task_id, ranks, now_s)

    def take_back(self, task_id: str, now_s: float) -> None:
        """It needs its room again, before anybody else; `decide` says whom to end, and Restore when it has it."""
        self._now_s = now_s
        self._told += self._loans.take_back(task_id, now_s)

    def reserve(self, task_id: str, node_ids: Collection[str], now_s: float) -> bool:
        """For a waiting task that is placed from outside; see `Backfill.reserve_on`."""
        return self._backfill.reserve_on(self._items[task_id], node_ids, now_s)

    # ---------------------------------------------------------------- what happens to nodes

    def set_node(self, room: NodeRoom, foreign: Bundle = NOTHING) -> None:
        """The node takes work: `room` without any of ours, `foreign` what others use of it. Cheap when nothing changed.

        Raises InvalidInput for figures that are no amounts.
        """
        self._leases.set_node(room, foreign)
        self._quotas.changed = True

    def drop_node(self, node_id: str) -> None:
        """The node takes no work any more (gone, draining, cordoned). What runs there runs until it is `ended`."""
        self._leases.drop_node(node_id)
        self._quotas.changed = True

    # ---------------------------------------------------------------- what to do

    def decide(self, now_s: float) -> list[Decision]:
        """All that can be done now, in the order in which it was decided."""
        self._now_s = now_s
        out: list[Decision] = []
        if self._told:
            out += [d for d in self._told if d.task_id in self._leases.running]
            self._told = []
        if self._keys.timers or self._keys.learns:
            self._keys.renew(self._items, now_s)
        if self._pools:
            self._quotas.lift_bars()
        if self._leases.claims_to_check:
            self._serve_claims(out)
        backfill, preemption = self._backfill, self._preemption
        if backfill.busy or not 0 <= now_s - backfill.began_s < PLAN_EVERY_S:
            backfill.refresh(now_s)
        self._starting.fill(now_s, out)
        if self._waiting.shapes:
            if preemption.round or not 0 <= now_s - preemption.began_s < SEARCH_EVERY_S:
                out += preemption.search(now_s, self._starting.may_use)
            while backfill.reservations and backfill.lift_idle():
                # who has started, or has a claim, needs no reservation any more
                self._starting.fill(now_s, out)
        else:
            out += self._regrowth.search(now_s)
        return out

    def next_change_s(self) -> float:
        """When the order changes next by time alone; inf: never. `decide` is to be asked then."""
        return self._keys.next_change_s()

    # ---------------------------------------------------------------- what people ask

    @property
    def waiting_ids(self) -> list[str]:
        """Waiting tasks, next first."""
        return [item.entry.task_id for item in self._waiting.items()]

    def rooms(self) -> list[NodeRoom]:
        """What every node that takes work has free now."""
        return self._index.rooms()

    def placement(self, task_id: str) -> Placement | None:
        """Where it runs; None when it does not."""
        lease = self._leases.running.get(task_id)
        return lease.placement if lease is not None else None

    def reservation(self, task_id: str) -> Reservation | None:
        """The nodes that are reserved for it, and the time when it is expected to start there."""
        return self._backfill.reservations.get(task_id)

    def why(self, task_id: str) -> str:
        """Why the task waits, in words; empty when it does not."""
        item = self._items.get(task_id)
        if item is None:
            return ""
        return why_it_waits(item, self._leases, self._backfill.reservations, self.rooms(), self._now_s)

    def place_in_queue(self, task_id: str) -> tuple[int, int]:
        """(which, of how many) among the waiting tasks, from 1; (0, n) when it does not wait."""
        item = self._items.get(task_id)
        return self._waiting.place_of(item) if item is not None else (0, len(self._waiting.items()))

    # ---------------------------------------------------------------- how

    def _serve_claims(self, out: list[Decision]) -> None:
        """Claims of which all is free now, or of which a node has gone."""
        check, self._leases.claims_to_check = sorted(self._leases.claims_to_check), set()
        for task_id in check:
            claim = self._leases.claims.get(task_id)
            free = self._leases.claim_is_free(claim) if claim is not None else False
            if claim is None or free is False:
                continue
            if task_id in self._loans:
                if free:
                    out.append(self._loans.restored(task_id))
                else:
                    self._forget_loan(task_id)
            elif free and self._pools and self._quotas.pools.is_over_limit(claim.item.entry.pool):
                pass  # its room is there, but those of its pool who go for it have not gone yet
            elif free:
                self._leases.unclaim(task_id)
                claim.since_s = claim.checkpoint_s = self._now_s
                self._starting.run(claim)
                out.append(Place(task_id, claim.placement))
            else:
                self._drop_claim(task_id)
                self._enqueue(claim.item)
        self._leases.claims_to_check.clear()

    def _new(self, entry: Entry, served_s: float) -> Item:
        check_entry(entry)
        need_of(entry.ask.bundle)
        if entry.task_id in self._items:
            raise InvalidInput(f"task {entry.task_id[:40]!r} is known already")
        item = self._items[entry.task_id] = Item(entry, served_s)
        return item

    def _enqueue(self, item: Item) -> None:
        self._keys.ask(item, self._now_s)
        self._waiting.add(item)

    def _stop(self, task_id: str) -> Hold | None:
        if self._loans.lent:
            self._forget_loan(task_id)
        lease = self._leases.release(task_id)
        if lease is not None and self._pools:
            self._quotas.use(lease.item, -len(lease.placement.node_ids))
        return lease

    def _forget_loan(self, task_id: str) -> None:
        lent = self._loans.forget(task_id)
        if lent is not None:
            self._quotas.use(lent.item, -len(lent.placement.node_ids))

    def _drop_claim(self, task_id: str) -> None:
        claim = self._leases.unclaim(task_id)
        if claim is not None:
            self._quotas.use(claim.item, -len(claim.placement.node_ids))

