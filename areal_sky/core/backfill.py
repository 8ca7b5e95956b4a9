"""Reservations, so that smaller tasks run in the meantime but delay nobody who is first in line (EASY backfill).

The first task in the line of a shelf that does not fit gets nodes reserved: those on which, by the expected ends of
what runs there, it fits soonest. Until then a task behind it may use them only if it is known to end before that time;
all other nodes are free for all. Where the ends are not known, the freest nodes that would do are kept free once the
task has waited for `patience_s`.

Bounds on the cost of a decision: plans are made every `PLAN_EVERY_S`, with `MOST_EXTRA_PLANS` in between for those who
come to be first in line; a plan considers the freest `MOST_NODES` nodes of a shelf (or twice as many as the gang can
use), and once a decision has considered so many, further plans wait for the next one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import inf

from areal_sky.core.leases import Hold, Leases, left_on
from areal_sky.core.room import how_many
from areal_sky.core.roomindex import Node, RoomIndex, Shelf
from areal_sky.core.shapes import Item, Shape
from areal_sky.core.waiting import Change, WaitingTasks

ShelfKey = tuple[str, str, bool]
MOST_NODES = 16
PLAN_EVERY_S = 5.0
MOST_EXTRA_PLANS = 4
REPLAN_S = 60.0


@dataclass(frozen=True, slots=True)
class Reservation:
    """`start_s`: when the task is expected to start there; inf: nobody knows."""

    item: Item
    node_ids: tuple[str, ...]
    start_s: float
    planned_s: float
    shelves: frozenset[ShelfKey]  # on which it is first in line

    @property
    def guard(self) -> str:
        return self.item.entry.task_id


class Backfill:
    """See the module."""

    def __init__(self, index: RoomIndex, leases: Leases, waiting: WaitingTasks, patience_s: float):
        self._index = index
        self._leases = leases
        self._waiting = waiting
        self._patience_s = patience_s
        # Plans are made in rounds: when this one began, what it has still to do, whom it has seen first in line.
        self.began_s = -inf
        self.busy = False  # whether there is something to refresh though no round is due
        self._to_plan: set[ShelfKey] = set()
        self._kept: set[str] = set()
        self._extra_plans = 0
        self._considered = 0  # nodes, in this decision
        self.reservations: dict[str, Reservation] = {}

    def may_use(self, shape: Shape, guard: str, now_s: float) -> bool:
        """Whether the shape's first task may have a node that is reserved for `guard`."""
        reservation = self.reservations.get(guard)
        if reservation is None:
            return True
        first = shape.first
        if first is not None and first[:2] <= _rank(reservation.item):
            return True  # it goes before the owner anyway
        return shape.longest_s is not None and now_s + shape.longest_s <= reservation.start_s

    def refresh(self, now_s: float) -> None:
        """Reserve for those who are first in line now. Once per decision where `busy`, or where a round is due."""
        self._considered = 0
        self.lift_idle()
        if not 0 <= now_s - self.began_s < PLAN_EVERY_S:
            self.began_s = now_s
            self._extra_plans = 0
            self._kept = set()
            self._to_plan = {shelf.key for shelf in self._index.shelves.values() if shelf.nodes}
        if self._to_plan:
            self._go_on(now_s)
        self.busy = bool(self._to_plan or self.reservations or self._considered)

    def reserve_on(self, item: Item, node_ids: Collection[str], now_s: float) -> bool:
        """Reserve these nodes for a task that no plan of ours covers, if it is first in line there; True when it was.

        To be said again within `REPLAN_S`. It is expected to start when all that runs there has ended.
        """
        guard, nodes = item.entry.task_id, [self._index.nodes.get(n) for n in node_ids]
        keys = frozenset(n.shelf.key for n in nodes if n is not None)
        before = [r for r in self.reservations.values() if keys & r.shelves and _rank(r.item) < _rank(item)]
        if before or any(n is None or n.guard not in ("", guard) for n in nodes):
            return False
        leases = [lease for n in node_ids for lease in self._leases.sites[n].leases.values()]
        start_s = max((_end(lease, now_s) for lease in leases), default=now_s)
        if start_s == inf and now_s - item.entry.submitted_s < self._patience_s:
            return False
        self._keep(Reservation(item, tuple(node_ids), start_s, now_s, keys))
        self._kept.add(guard)
        return True

    def lift_idle(self) -> bool:
        """Reservations of tasks that wait no longer end; whether there were any."""
        for reservation in self.reservations.values():
            if reservation.item.shape is None:
                break
        else:
            return False
        for guard in [g for g, r in self.reservations.items() if r.item.shape is None]:
            self._lift(guard)
        return True

    def _go_on(self, now_s: float) -> None:
        """With the round, shelf by shelf."""
        passed: set[ShelfKey] = set()
        for shape in self._waiting.in_order():
            if self._to_plan <= passed:
                break
            if shape.open or shape.barred or shape.first is None:
                continue
            shelves = self._shelves(shape)
            keys = {shelf.key for shelf in shelves}
            if keys <= passed:
                continue
            if keys & self._to_plan:
                if self._considered >= MOST_NODES:
                    return  # the next decision goes on
                item = shape.first[2]
                if self._reserve(shape, item, shelves, now_s):
                    self._kept.add(item.entry.task_id)
                self._to_plan -= keys
            passed |= keys
        self._to_plan = set()
        for guard in [g for g in self.reservations if g not in self._kept]:
            self._lift(guard)

    def blocked(self, shape: Shape, now_s: float) -> None:
        """The shape does not fit, and all before it in the order have been looked at: it may be first in line now."""
        if shape.first is None or self._extra_plans >= MOST_EXTRA_PLANS or self._considered >= MOST_NODES:
            return
        mine = {shelf.key for shelf in self._shelves(shape)}
        first = shape.first[:2]
        for guard, r in list(self.reservations.items()):
            if mine & r.shelves and r.item.shape is not None:
                if _rank(r.item) <= first:
                    return
                self._lift(guard)
        self._extra_plans += 1
        if self._reserve(shape, shape.first[2], self._shelves(shape), now_s):
            self._kept.add(shape.first[2].entry.task_id)

    # ---------------------------------------------------------------- how

    def _shelves(self, shape: Shape) -> list[Shelf]:
        return [shelf for _, shelf in self._index.eligible(shape.ask) if shelf.nodes]

    def _reserve(self, shape: Shape, item: Item, shelves: list[Shelf], now_s: float) -> bool:
        """Whether the task has a reservation now: its old one while it holds, else a new one."""
        guard = item.entry.task_id
        old = self.reservations.get(guard)
        fresh = old is not None and now_s < old.start_s and 0 <= now_s - old.planned_s < REPLAN_S
        if old is not None and fresh and all(n in self._index.nodes for n in old.node_ids):
            return True
        keys = frozenset(shelf.key for shelf in shelves)
        plans = [p for shelf in shelves if (p := self._plan(shape, item, shelf, keys, now_s)) is not None]
        plan = min(plans, key=lambda p: p.start_s, default=None)
        if plan is None or (plan.start_s == inf and now_s - item.entry.submitted_s < self._patience_s):
            return False
        self._keep(plan)
        return True

    def _keep(self, plan: Reservation) -> None:
        old = self.reservations.get(plan.guard)
        if old is not None and (old.node_ids != plan.node_ids or old.start_s < plan.start_s):
            self._lift(plan.guard)
        self.reservations[plan.guard] = plan
        self.busy = True
        for node_id in plan.node_ids:
            self._index.set_guard(self._index.nodes[node_id], plan.guard)

    def _plan(
        self, shape: Shape, item: Item, shelf: Shelf, keys: frozenset[ShelfKey], now_s: float
    ) -> Reservation | None:
        """The soonest start on that shelf; None where it would not fit even if all that runs there ended."""
        guard, ask = item.entry.task_id, shape.ask
        gains: list[tuple[float, int, int]] = []  # (from when, which of the freest nodes, bundles more)
        freest = shelf.freest(max(MOST_NODES, 2 * shape.least))
        self._considered += len(freest)
        self.busy = True
        nodes = [n for n in freest if n.guard in ("", guard) and ask.market in (None, n.market)]
        if ask.nodes:
            nodes = [n for n in nodes if n.node_id in ask.nodes or n.order[0] in ask.nodes]
        for place, node in enumerate(nodes):
            had = 0
            for t_s, n in self._capacities(node, shape, now_s):
                if n > had:
                    gains.append((t_s, place, n - had))
                    had = n
        gains.sort()
        bundles: dict[int, int] = {}
        missing = shape.least
        for t_s, place, more in gains:
            bundles[place] = bundles.get(place, 0) + more
            missing -= more
            if missing <= 0:
                chosen, left = list[str](), shape.least
                for place, n in sorted(bundles.items(), key=lambda x: (-min(x[1], shape.least), x[0])):
                    if left > 0:
                        chosen.append(nodes[place].node_id)
                        left -= n
                return Reservation(item, tuple(chosen), t_s, now_s, keys)
        return None

    def _capacities(self, node: Node, shape: Shape, now_s: float) -> list[tuple[float, int]]:
        """(from when, bundles that fit) as what runs on the node comes to its end."""
        site = self._leases.sites[node.node_id]
        devices, cpus, memory = list(node.devices.free), node.cpus, node.memory
        if not site.simple:
            devices, cpus, memory = left_on(site)
        found = [(now_s, how_many(devices, cpus, memory, shape.need))]
        for end_s, _, lease in sorted([(_end(h, now_s), h.item.entry.number, h) for h in site.leases.values()]):
            taken = lease.on(site)
            taken.add_to(devices)
            cpus += taken.cpus
            memory += taken.memory
            found.append((end_s, how_many(devices, cpus, memory, shape.need)))
        return found

    def _lift(self, guard: str) -> None:
        reservation = self.reservations.pop(guard)
        for node_id in reservation.node_ids:
            node = self._index.nodes.get(node_id)
            if node is not None and node.guard == guard:
                self._index.set_guard(node, "")
                self._leases.changes[node] = Change(None)


def _rank(item: Item) -> tuple[float, int]:
    return item.key, item.entry.number


def _end(lease: Hold, now_s: float) -> float:
    ends_s = lease.ends_s(now_s)
    return inf if ends_s is None else ends_s
