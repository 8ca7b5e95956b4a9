"""Who holds which part of which node, and what that leaves free.

free = the node - what others than us use - leases - claims

A claim is capacity set aside for a task that has been promised it while others still hold it: what they free goes to
the claim and to nobody else.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from areal_sky.core.devices import Taken, taken_by
from areal_sky.core.gangs import DeviceShare, Placement
from areal_sky.core.model import Bundle
from areal_sky.core.room import Need, NodeRoom, need_of, take_foreign, units
from areal_sky.core.roomindex import Node, RoomIndex
from areal_sky.core.shapes import Item
from areal_sky.core.waiting import Change

NOTHING = Bundle(0.0, 0.0, 0.0)


class Hold:
    """Bundles of one gang on their nodes. A lease (`since_s`: from when), or a claim.

    `parts`: what it takes of the devices, node by node. Kept by Leases.
    """

    standing: float  # kept by core/preemption.py, for leases that may be victims
    __slots__ = ("checkpoint_s", "ending", "item", "need", "parts", "placement", "since_s", "standing", "task_id")

    def __init__(self, item: Item, placement: Placement, since_s: float, need: Need | None = None):
        self.item = item
        self.task_id = item.entry.task_id
        self.need: Need = need or need_of(item.entry.ask.bundle)
        self.placement = placement
        self.parts: Sequence[tuple[Site, Taken]] = ()
        self.since_s = since_s
        self.checkpoint_s = since_s  # work up to here is safe
        self.ending = ""  # for which task it has been told to end, or to shrink

    def served_s(self, now_s: float) -> float:
        """Seconds of service in this and earlier runs."""
        return self.item.served_s + max(0.0, now_s - self.since_s)

    def lost_s(self, now_s: float) -> float:
        """Seconds of work that ending it now would lose."""
        return max(0.0, now_s - self.checkpoint_s)

    def ends_s(self, now_s: float) -> float | None:
        """When it is expected to end; None where nobody knows. What is overdue may end any time."""
        estimate_s = self.item.entry.estimate_s
        if estimate_s is None:
            return None
        return max(now_s, self.since_s + max(0.0, estimate_s - self.item.served_s))

    def on(self, site: Site) -> Taken:
        """What it takes there, where it has bundles."""
        return next(taken for where, taken in self.parts if where is site)


class Site:
    """A node with all that is on it. `simple`: what is free can be told by adding and subtracting."""

    __slots__ = ("claims", "foreign", "leases", "node", "node_id", "room", "simple")

    def __init__(self, node_id: str):
        self.node_id = node_id
        # None: not here, or takes no new work
        self.room: NodeRoom | None = None
        self.node: Node | None = None
        self.foreign = NOTHING
        self.leases: dict[str, Hold] = {}
        self.claims: dict[str, Hold] = {}
        self.simple = True


class Leases:
    """See the module. Keeps `index` up to date; `changes` collects nodes with other room than when they were
    looked at last.
    """

    def __init__(self, index: RoomIndex):
        self._index = index
        self.sites: dict[str, Site] = {}
        self.running: dict[str, Hold] = {}
        self.claims: dict[str, Hold] = {}
        self.changes: dict[Node, Change] = {}
        self._to_look_at: list[Node] = []  # those of them that are known in one decision, the next last
        self.claims_to_check: set[str] = set()  # tasks on whose claims something has changed

    # ---------------------------------------------------------------- nodes

    def set_node(self, room: NodeRoom, foreign: Bundle = NOTHING) -> None:
        """The node as it is without any of our work, and what others use of it. Unchanged: costs nothing."""
        site = self.sites.get(room.node_id)
        if site is None:
            site = self.sites[room.node_id] = Site(room.node_id)
        if site.room == room and site.foreign == foreign:
            return
        old = site.node
        change, guard = Change(None), ""
        if old is not None:
            change, guard = self.changes.pop(old, None) or Change(old.free()), old.guard
        node = self._index.put(room)
        site.room, site.foreign, site.node, node.site = room, foreign, node, site
        self._index.set_guard(node, guard)
        self._recount(site)
        self.changes[node] = change

    def drop_node(self, node_id: str) -> None:
        """It takes no work any more. Leases there stay until their tasks have ended."""
        site = self.sites.get(node_id)
        if site is None:
            return
        if site.node is not None:
            self.changes.pop(site.node, None)
        site.room = site.node = None
        self.claims_to_check.update(site.claims)
        self._index.drop(node_id)
        self._tidy(site)

    # ---------------------------------------------------------------- holds

    def hold(self, lease: Hold) -> None:
        """The task runs there from now on; `find` has just said that this is free."""
        task_id = lease.task_id
        self.running[task_id] = lease
        lease.parts = self._parts(lease)
        for site, taken in lease.parts:
            site.leases[task_id] = lease
            if not site.simple:
                self._recount(site)
            elif site.node is not None:
                site.node.take(taken)

    def start(self, item: Item, need: Need, node: Node, now_s: float) -> Hold:
        """`hold` for one bundle on a node that has been found to have room: nearly all starts, so in few steps."""
        taken, left = node.devices.chosen.get(need) or node.devices.choose(need)
        lease = Hold(item, Placement((node.node_id,), taken.bundles), now_s, need)
        site: Site = node.site
        lease.parts = ((site, taken),)
        site.leases[lease.task_id] = self.running[lease.task_id] = lease
        if site.simple:
            node.devices = left
            node.cpus -= taken.cpus
            node.memory -= taken.memory
            node.shelf.changed[node] = None
        else:
            self._recount(site)
        return lease

    def adopt(self, lease: Hold) -> None:
        """The task runs there already, free or not, also on nodes that are not known yet."""
        self.running[lease.task_id] = lease
        lease.parts = self._parts(lease)
        for site, _ in lease.parts:
            site.leases[lease.task_id] = lease
            self._recount(site)

    def release(self, task_id: str) -> Hold | None:
        """The task holds nothing any more."""
        lease = self.running.pop(task_id, None)
        if lease is None:
            return None
        for site, taken in lease.parts:
            del site.leases[task_id]
            node = site.node
            if node is None:
                self._tidy(site)
            elif not site.simple:
                self._recount(site)
            else:
                devices = node.devices
                if node not in self.changes:
                    self.changes[node] = Change((devices, node.cpus, node.memory, node.guard))
                node.devices = devices.more.get(taken) or devices.given(taken)
                node.cpus += taken.cpus
                node.memory += taken.memory
                node.shelf.changed[node] = None
        return lease

    def shrink(self, task_id: str, ranks: Iterable[int]) -> None:
        """These ranks have ended; the others run on and are numbered anew from 0."""
        lease = self.release(task_id)
        if lease is None:
            return
        gone = set(ranks)
        left = [r for r in range(len(lease.placement.node_ids)) if r not in gone]
        lease.placement = Placement(
            tuple(lease.placement.node_ids[r] for r in left), tuple(lease.placement.devices[r] for r in left)
        )
        self.adopt(lease)

    def claim(self, claim: Hold) -> None:
        """Nobody else gets that capacity, whoever holds it now."""
        self.claims[claim.task_id] = claim
        claim.parts = self._parts(claim)
        for site, _ in claim.parts:
            site.claims[claim.task_id] = claim
            self._recount(site)

    def unclaim(self, task_id: str) -> Hold | None:
        claim = self.claims.pop(task_id, None)
        if claim is None:
            return None
        for site, _ in claim.parts:
            del site.claims[task_id]
            self._recount(site)
            self._tidy(site)
        return claim

    def claim_is_free(self, claim: Hold, without: Container[Hold] = ()) -> bool | None:
        """Whether all that it claims is free; None when it can never be, since a node of it has gone.

        `without`: leases that are taken for ended.
        """
        free = True
        for site, taken in claim.parts:
            if site.room is None:
                return None
            devices, cpus, memory = left_on(site, (), without)
            for shares in taken.bundles:
                for i, _ in shares:
                    if i >= len(devices):
                        return None
                    devices[i] -= taken.amount
                    free = free and devices[i] >= 0
            free = free and cpus >= taken.cpus and memory >= taken.memory
        return free

    def next_changed(self) -> Node | None:
        """A node with more room than when it was looked at last; the one with least room first."""
        changes, queue = self.changes, self._to_look_at
        if not queue:
            if not changes:
                return None
            queue += changes
            queue.sort(key=lambda n: (n.devices.total, n.cpus, n.order), reverse=True)
        return queue[-1]

    def looked_at(self, node: Node) -> Change:
        """The node that `next_changed` told; what comes then are others, until it changes again."""
        change = self.changes.pop(node)
        if self._to_look_at:
            self._to_look_at.pop()
            if not self.changes:
                self.changes.clear()  # a dictionary that has had many entries is slow to look into
        return change

    # ---------------------------------------------------------------- how

    def _parts(self, hold: Hold) -> Sequence[tuple[Site, Taken]]:
        parts: dict[str, list[tuple[DeviceShare, ...]]] = {}
        for node_id, shares in zip(hold.placement.node_ids, hold.placement.devices, strict=True):
            parts.setdefault(node_id, []).append(shares)
        return [(self._site(node_id), taken_by(hold.need, bundles)) for node_id, bundles in parts.items()]

    def _site(self, node_id: str) -> Site:
        site = self.sites.get(node_id)
        if site is None:  # a task that an earlier process placed on a node not seen yet
            site = self.sites[node_id] = Site(node_id)
        return site

    def _recount(self, site: Site) -> None:
        """What is free on the node, from the start."""
        node = site.node
        if node is None:
            return
        devices, cpus, memory = left_on(site)
        self.claims_to_check.update(site.claims)
        site.simple = site.foreign == NOTHING and not site.claims and min(*devices, cpus, memory, 0) == 0
        if node not in self.changes:
            self.changes[node] = Change(node.free())
        node.set_free(devices, cpus, memory)

    def _tidy(self, site: Site) -> None:
        if site.room is None and not site.leases and not site.claims:
            del self.sites[site.node_id]


def left_on(
    site: Site, claims: Iterable[Hold] | None = None, without: Container[Hold] = ()
) -> tuple[list[int], int, int]:
    """(devices, cpus, memory) that leases, claims (None: all) and what others use leave; may be below nothing.

    `without`: leases that are left out.
    """
    room = site.room
    assert room is not None
    devices = [units(g) for g in room.gpus]
    cpus = units(room.cpus) - units(site.foreign.cpus)
    memory = units(room.memory_gib) - units(site.foreign.memory_gib)
    holds = [h for h in site.leases.values() if h not in without]
    for hold in (*holds, *(site.claims.values() if claims is None else claims)):
        taken = hold.on(site)
        taken.add_to(devices, -1)
        cpus -= taken.cpus
        memory -= taken.memory
    take_foreign(devices, units(site.foreign.gpus))
    return devices, cpus, memory
