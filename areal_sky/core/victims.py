"""Whom to end, or to shrink, so that a gang fits: the fewest tasks, with the least work lost.

Pure: `choose` gets what could be freed, as units (all of a task, or one rank of an elastic one), and what the nodes
would have. In this order: no training task where others will do, then as few tasks ended as possible, then the least
work lost. Elastic gangs are shrunk before anything is ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from areal_sky.core.devices import taken_by
from areal_sky.core.leases import Hold
from areal_sky.core.room import Need, how_many

# Rollout and eval can be done again; a reward model holds them up; training loses the most.
ROLES: Mapping[str, int] = {"eval": 0, "rollout": 0, "reward": 1, "driver": 2, "train": 2}
LAST_ROLE = 2
EXACT_SIZE = 3  # sets of up to so many tasks on one node are all compared ...
EXACT_UNITS = 16  # ... among so many

Room = tuple[list[int], int, int]  # devices, cpus, memory, in units


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """What can be freed in one piece: a whole lease (`ranks` empty), or some ranks of an elastic one."""

    lease: Hold
    ranks: tuple[int, ...]
    lost_gpu_s: float  # work since the last checkpoint x GPUs; 0 for ranks of an elastic gang

    @property
    def ends(self) -> bool:
        return not self.ranks

    @property
    def role(self) -> int:
        return ROLES.get(self.lease.item.entry.kind, LAST_ROLE) if self.ends else -1

    def node_ids(self) -> tuple[str, ...]:
        """Where it frees something."""
        ids = self.lease.placement.node_ids
        return tuple(dict.fromkeys(ids if self.ends else [ids[r] for r in self.ranks]))


def cost(units: Sequence[Unit]) -> tuple[int, int, float, int]:
    """(worst role, tasks ended, GPU-seconds lost, ranks taken from elastic gangs): lower is better."""
    ended = [u for u in units if u.ends]
    return (
        max((u.role for u in units), default=-1),
        len(ended),
        sum(u.lost_gpu_s for u in ended),
        sum(len(u.ranks) for u in units),
    )


def choose(
    need: Need, count: int, elsewhere: int, rooms: Mapping[str, Room], units: Sequence[Unit]
) -> list[Unit] | None:
    """The units to free so that `count` bundles fit, or None.

    `rooms`: free room, as it is now, of the nodes that the gang may use and on which units are; `elsewhere`: bundles
    that fit on other nodes.
    """
    everything = sum(how_many(*freed(room, n, units), need) for n, room in rooms.items())
    if everything < count - elsewhere:
        return None
    best: list[Unit] | None = None
    if count - elsewhere <= 1 or len(rooms) == 1:
        by_node: dict[str, list[Unit]] = {}
        for unit in units:
            for node_id in unit.node_ids():
                if node_id in rooms:
                    by_node.setdefault(node_id, []).append(unit)
        fits_now = {n: how_many(*room, need) for n, room in rooms.items()}
        total = elsewhere + sum(fits_now.values())
        for node_id, here in sorted(by_node.items()):
            wanted = count - (total - fits_now[node_id])
            found = _on_one_node(need, wanted, node_id, rooms[node_id], here, best)
            if found is not None and (best is None or cost(found) < cost(best)):
                best = found
    for order in (_least_lost_first, _largest_first):
        found = _greedily(need, count - elsewhere, rooms, sorted(units, key=order))
        if found is not None and (best is None or cost(found) < cost(best)):
            best = found
    return best


def choose_weakest(
    need: Need, count: int, elsewhere: int, rooms: Mapping[str, Room], units: Sequence[Unit]
) -> list[Unit] | None:
    """The same for orders in which standing is all that counts: `units`, the weakest first, until the gang fits."""
    return _greedily(need, count - elsewhere, rooms, units, weakest=True)


def with_more(chosen: Sequence[Unit], units: Sequence[Unit], gpus: float) -> list[Unit] | None:
    """Those chosen and as many more as give up so much of GPUs together; None where all of them do not."""
    more = list(chosen)
    for unit in sorted(units, key=_least_lost_first):
        if _gpus(more) >= gpus:
            break
        if unit not in more:
            more.append(unit)
    return more if _gpus(more) >= gpus else None


def freed(room: Room, node_id: str, units: Sequence[Unit]) -> Room:
    """The room of that node once the units are gone."""
    devices, cpus, memory = list(room[0]), room[1], room[2]
    whole = {u.lease for u in units if u.ends}
    for unit in units:
        if not unit.ends and unit.lease in whole:
            continue
        placement = unit.lease.placement
        ranks = unit.ranks or range(len(placement.node_ids))
        here = [placement.devices[rank] for rank in ranks if placement.node_ids[rank] == node_id]
        taken = taken_by(unit.lease.need, here)
        taken.add_to(devices)
        cpus += taken.cpus
        memory += taken.memory
    return devices, cpus, memory


# ---------------------------------------------------------------- how


def _gpus(units: Sequence[Unit]) -> int:
    whole = {u.lease for u in units if u.ends}
    ranks = sum(len(u.ranks) * u.lease.need.gpus for u in units if u.lease not in whole)
    return ranks + sum(len(h.placement.node_ids) * h.need.gpus for h in whole)


def _least_lost_first(unit: Unit) -> tuple[object, ...]:
    return unit.role, unit.ends, unit.lost_gpu_s, unit.lease.item.entry.number, [-rank for rank in unit.ranks]


def _largest_first(unit: Unit) -> tuple[object, ...]:
    gpus = unit.lease.need.gpus * len(unit.lease.placement.node_ids)
    return unit.role, unit.ends, -gpus, unit.lost_gpu_s, unit.lease.item.entry.number, [-rank for rank in unit.ranks]


def _on_one_node(
    need: Need, wanted: int, node_id: str, room: Room, units: Sequence[Unit], best: list[Unit] | None
) -> list[Unit] | None:
    """The best of all small sets of units on that node."""
    if wanted <= 0 or how_many(*freed(room, node_id, units), need) < wanted:
        return None
    units = sorted(units, key=_least_lost_first)[:EXACT_UNITS]
    for size in range(1, EXACT_SIZE + 1):
        for some in combinations(units, size):
            if best is not None and cost(some) >= cost(best):
                continue
            if how_many(*freed(room, node_id, some), need) >= wanted:
                best = list(some)
    return best


def _greedily(
    need: Need, wanted: int, rooms: Mapping[str, Room], units: Sequence[Unit], *, weakest: bool = False
) -> list[Unit] | None:
    """Units in that order until the gang fits; then those are kept after all that it also fits without."""
    on_node: dict[str, list[Unit]] = {n: [] for n in rooms}
    fits = {n: how_many(*room, need) for n, room in rooms.items()}

    def recount(unit: Unit) -> None:
        for n in unit.node_ids():
            if n in fits:
                fits[n] = how_many(*freed(rooms[n], n, on_node[n]), need)

    chosen: list[Unit] = []
    for unit in units:
        if sum(fits.values()) >= wanted:
            break
        chosen.append(unit)
        for n in unit.node_ids():
            on_node.get(n, []).append(unit)
        recount(unit)
    if sum(fits.values()) < wanted:
        return None
    spare = chosen[::-1]  # the strongest first
    if not weakest:
        spare = sorted(chosen, key=lambda u: (u.role, u.lost_gpu_s, [-r for r in u.ranks]), reverse=True)
    for unit in spare:
        for n in unit.node_ids():
            if n in on_node:
                on_node[n].remove(unit)
        recount(unit)
        if sum(fits.values()) >= wanted:
            chosen.remove(unit)
            continue
        for n in unit.node_ids():
            if n in on_node:
                on_node[n].append(unit)
        recount(unit)
    return chosen
