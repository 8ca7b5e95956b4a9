"""What one node has free, per device, and what a bundle takes of it.

Counted in whole ten-thousandths (Ray's own resolution), so that sums are exact and equal rooms are equal. GPUs are
counted per device: two half-free devices are not one free GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from areal_sky.core.gangs import Ask, DeviceShare, Placement, describe_bundle
from areal_sky.core.model import Bundle, NodeShape
from areal_sky.errors import InvalidInput

UNIT = 10_000
# Below Ray's own resolution of resources (1e-4): what is closer than this is equal.
EPS = 1e-6
MOST_BUNDLES = 4096  # on one node; far above any real node, ends the counting of bundles that ask for nothing


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """What one node has free. `gpus` holds the free share of each device; `is_gpu_node` whether it has any at all.

    Among equals the node with the smaller `name` is taken.
    """

    node_id: str
    group: str
    gpus: tuple[float, ...]
    cpus: float
    memory_gib: float
    accelerator: str | None = None
    is_gpu_node: bool = False
    name: str = ""
    market: str = ""

    @property
    def free_gpus(self) -> float:
        return sum(self.gpus)


@dataclass(frozen=True, slots=True)
class Held:
    """One bundle of ours on a node. `reserved`: Ray counts it already. `driver`: the engine holds its claim instead."""

    bundle: Bundle
    devices: tuple[DeviceShare, ...]
    reserved: bool = True
    driver: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Need:
    """A bundle in units: `whole` devices, or `part` of one; `gpus` is their sum. One object per bundle (`need_of`).

    `amount` is what it takes of each of its devices, `share` the same as it was asked for.
    """

    bundle: Bundle
    whole: int
    part: int
    gpus: int
    cpus: int
    memory: int
    amount: int
    share: float


def units(amount: float) -> int:
    return round(amount * UNIT)


@lru_cache(maxsize=65536)
def need_of(bundle: Bundle) -> Need:
    """Raises InvalidInput that lists every mistake: negative, not finite, GPUs neither whole nor below 1."""
    wrong = [
        f"bundle.{name}: {amount:g} is not a number of 0 or more"
        for name, amount in (("gpus", bundle.gpus), ("cpus", bundle.cpus), ("memory_gib", bundle.memory_gib))
        if not (math.isfinite(amount) and amount >= 0)
    ]
    gpus = 0 if wrong else units(bundle.gpus)
    if gpus > UNIT and gpus % UNIT:
        wrong.append(f"bundle.gpus: {bundle.gpus:g} is neither whole nor a fraction below 1")
    if bundle.gpus > 0 and not gpus and not wrong:
        wrong.append(f"bundle.gpus: shares below {1 / UNIT:g} are not counted")
    if wrong:
        raise InvalidInput("\n".join(wrong))
    whole, part = (0, gpus) if gpus < UNIT else (gpus // UNIT, 0)
    amount, share = (UNIT, 1.0) if whole else (part, bundle.gpus)
    return Need(bundle, whole, part, gpus, units(bundle.cpus), units(bundle.memory_gib), amount, share)


# ---------------------------------------------------------------- the arithmetic, in units


def how_many(devices: Sequence[int], cpus: int, memory: int, need: Need, whole: int | None = None) -> int:
    """Like bundles that fit together into so much room. `whole`: untouched devices, where that is known already."""
    n = MOST_BUNDLES
    if need.whole:
        n = (sum([d >= UNIT for d in devices]) if whole is None else whole) // need.whole
    elif need.part:
        n = sum(d // need.part for d in devices if d > 0)
    if need.cpus:
        n = min(n, cpus // need.cpus)
    if need.memory:
        n = min(n, memory // need.memory)
    return max(0, n)


def choose_devices(free: tuple[int, ...], need: Need, bundles: int = 1) -> tuple[tuple[DeviceShare, ...], ...] | None:
    """Which devices each of so many bundles takes; None: too few are free.

    Fractions go to the fullest device that still has the share.
    """
    left, found = list(free), list[tuple[DeviceShare, ...]]()
    for _ in range(bundles):
        chosen = [i for i, amount in enumerate(left) if amount >= need.amount] if need.gpus else []
        chosen = [min(chosen, key=left.__getitem__)] if need.part and chosen else chosen[: need.whole]
        if len(chosen) * need.amount < need.gpus:
            return None
        for i in chosen:
            left[i] -= need.amount
        found.append(tuple([(i, need.share) for i in chosen]))
    return tuple(found)


def take_foreign(devices: list[int], gpus: int) -> None:
    """Others use so many GPUs, on devices that nobody tells: whole devices first, shares where none is whole.

    Rather too little is left free than too much.
    """
    whole, rest = divmod(max(0, gpus), UNIT)
    for i in sorted(range(len(devices)), key=lambda i: (-devices[i], i))[:whole]:
        devices[i] = min(0, devices[i])
    if rest and devices:
        fitting = [(free, i) for i, free in enumerate(devices) if free >= rest]
        i = min(fitting)[1] if fitting else max(range(len(devices)), key=lambda i: devices[i])
        devices[i] -= rest


# ---------------------------------------------------------------- rooms of nodes


def empty_room(node_id: str, group: str, shape: NodeShape, name: str = "", market: str = "") -> NodeRoom:
    """The room of a node that nothing runs on."""
    whole = int(shape.gpus + EPS)
    rest = shape.gpus - whole
    gpus = (1.0,) * whole + ((rest,) if rest > EPS else ())
    return NodeRoom(
        node_id, group, gpus, shape.cpus, shape.memory_gib, shape.accelerator, shape.gpus > 0, name, market
    )


def foreign_use(shape: NodeShape, available: tuple[float, float, float], held: Sequence[Held] = ()) -> Bundle:
    """What others than us use of a node of which Ray says that (GPUs, CPUs, GiB) are `available`.

    Ray's figures lag a little behind ours, so what Ray does not count yet is no foreign use.
    """
    ours = [h.bundle for h in held if h.reserved]
    gpus, cpus, memory_gib = available
    return Bundle(
        max(0.0, shape.gpus - gpus - sum(b.gpus for b in ours)),
        max(0.0, shape.cpus - cpus - sum(b.cpus for b in ours)),
        max(0.0, shape.memory_gib - memory_gib - sum(b.memory_gib for b in ours)),
    )


def room_of(
    node_id: str,
    group: str,
    shape: NodeShape,
    available: tuple[float, float, float],
    held: Sequence[Held] = (),
    name: str = "",
    market: str = "",
) -> NodeRoom:
    """The room of a live node from what Ray says is `available` (GPUs, CPUs, GiB) and what we hold there.

    All that is neither ours nor available is foreign (an AReaL run of its own).
    """
    room = empty_room(node_id, group, shape, name, market)
    foreign = foreign_use(shape, available, held)
    devices = [units(g) for g in room.gpus]
    for h in held:
        for i, share in h.devices:
            if i < len(devices):
                devices[i] = max(0, devices[i] - units(share))
    take_foreign(devices, units(foreign.gpus))
    return replace(
        room,
        gpus=tuple(max(0, d) / UNIT for d in devices),
        cpus=max(0.0, shape.cpus - sum(h.bundle.cpus for h in held) - foreign.cpus),
        memory_gib=max(0.0, shape.memory_gib - sum(h.bundle.memory_gib for h in held) - foreign.memory_gib),
    )


def take(room: NodeRoom, bundle: Bundle) -> tuple[NodeRoom, tuple[DeviceShare, ...]] | None:
    """The room left after one bundle and the devices it takes, or None when it does not fit."""
    need = need_of(bundle)
    devices = [units(g) for g in room.gpus]
    chosen = choose_devices(tuple(devices), need)
    if chosen is None or need.cpus > units(room.cpus) or need.memory > units(room.memory_gib):
        return None
    return _less(room, bundle, chosen[0]), chosen[0]


def bundles_on(room: NodeRoom, bundle: Bundle, limit: int) -> int:
    """Like bundles that fit together, `limit` at most."""
    devices = [units(g) for g in room.gpus]
    return min(limit, how_many(devices, units(room.cpus), units(room.memory_gib), need_of(bundle)))


def occupy(rooms: dict[str, NodeRoom], ask: Ask, placement: Placement) -> None:
    """Take what `placement` needs out of `rooms`, which `fit` has just said it fits in."""
    for node_id, shares in zip(placement.node_ids, placement.devices, strict=True):
        rooms[node_id] = _less(rooms[node_id], ask.bundle, shares)


def describe_free(wanted: Bundle, rooms: Sequence[NodeRoom]) -> str:
    """What is free in sum, of the resources that are wanted."""
    parts: list[str] = []
    if wanted.gpus:
        parts.append(f"{sum(r.free_gpus for r in rooms):g} GPUs")
    if wanted.cpus:
        parts.append(f"{sum(r.cpus for r in rooms):g} CPUs")
    if wanted.memory_gib:
        parts.append(describe_bundle(Bundle(0, 0, sum(r.memory_gib for r in rooms))))
    return ", ".join(parts)


def _less(room: NodeRoom, bundle: Bundle, shares: Sequence[DeviceShare]) -> NodeRoom:
    devices = [units(g) for g in room.gpus]
    for i, share in shares:
        devices[i] -= units(share)
    return replace(
        room,
        gpus=tuple(max(0, d) / UNIT for d in devices),
        cpus=max(0.0, room.cpus - bundle.cpus),
        memory_gib=max(0.0, room.memory_gib - bundle.memory_gib),
    )
