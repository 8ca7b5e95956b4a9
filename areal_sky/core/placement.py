"""Where a gang can run: `fit` answers with a Placement or with the reasons why not.

The one function that admission, hold-backs and what-ifs all use. Pure and deterministic: the same rooms and the same
ask give the same answer, whatever the order of the rooms.

Rules of this first cut:
- all bundles of a gang are placed or none;
- a gang stays within one node group, and on one accelerator type where it can (mixed types only as second choice);
- fewest nodes first, then the tightest fit, so that large holes stay whole;
- work without GPUs keeps off GPU nodes while any other node has room;
- GPUs are counted per device: two half-free devices are not one free GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from areal_sky.core.model import HEAD_GROUP, Bundle, NodeShape
from areal_sky.units import format_gib

# Below Ray's own resolution of resources (1e-4): what is closer than this is equal.
EPS = 1e-6

DeviceShare = tuple[int, float]  # (device index, share of it in 0..1)


@dataclass(frozen=True, slots=True)
class Ask:
    """A gang: `count` like bundles, together or not at all. `group` None: any group but the head's."""

    bundle: Bundle
    count: int
    group: str | None = None
    accelerators: tuple[str, ...] = ()


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

    @property
    def free_gpus(self) -> float:
        return sum(self.gpus)


@dataclass(frozen=True, slots=True)
class Held:
    """One bundle of ours on a node. `reserved`: Ray counts it already."""

    bundle: Bundle
    devices: tuple[DeviceShare, ...]
    reserved: bool = True


@dataclass(frozen=True, slots=True)
class Placement:
    """One node and its device shares per bundle, in rank order. Ranks on one node are neighbours."""

    node_ids: tuple[str, ...]
    devices: tuple[tuple[DeviceShare, ...], ...]


@dataclass(frozen=True, slots=True)
class NoFit:
    """Why nothing fits now, one reason per group that was looked at."""

    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join(self.reasons)


def fit(ask: Ask, rooms: Iterable[NodeRoom]) -> Placement | NoFit:
    """Place the whole gang into `rooms`, or say why it does not fit."""
    rooms = sorted(rooms, key=lambda r: (r.name, r.node_id))
    best: tuple[tuple[object, ...], Placement] | None = None
    for candidates in _candidate_sets(ask, rooms):
        found = _pack(ask, candidates)
        if found is None:
            continue
        used = [r for r in candidates if r.node_id in set(found.node_ids)]
        rank: tuple[object, ...] = (
            # work without GPUs first looks for nodes without GPUs
            ask.bundle.gpus == 0 and any(r.is_gpu_node for r in used),
            len({r.accelerator for r in used}),
            len(used),
            sum(r.free_gpus for r in used),
            sum(r.cpus for r in used),
            used[0].group,
        )
        if best is None or rank < best[0]:  # type: ignore[operator]
            best = (rank, found)
    return best[1] if best else NoFit(_reasons(ask, rooms))


def take(room: NodeRoom, bundle: Bundle) -> tuple[NodeRoom, tuple[DeviceShare, ...]] | None:
    """The room left after one bundle and the devices it takes, or None when it does not fit.

    Fractions go to the fullest device that still has the share, as Ray does it.
    """
    if bundle.cpus > room.cpus + EPS or bundle.memory_gib > room.memory_gib + EPS:
        return None
    shares = _devices_for(room.gpus, bundle.gpus)
    if shares is None:
        return None
    left = replace(
        room,
        gpus=_without(room.gpus, shares),
        cpus=max(0.0, room.cpus - bundle.cpus),
        memory_gib=max(0.0, room.memory_gib - bundle.memory_gib),
    )
    return left, shares


def occupy(rooms: dict[str, NodeRoom], ask: Ask, placement: Placement) -> None:
    """Take what `placement` needs out of `rooms`, which `fit` has just said it fits in."""
    for node_id, shares in zip(placement.node_ids, placement.devices, strict=True):
        room = rooms[node_id]
        rooms[node_id] = replace(
            room,
            gpus=_without(room.gpus, shares),
            cpus=max(0.0, room.cpus - ask.bundle.cpus),
            memory_gib=max(0.0, room.memory_gib - ask.bundle.memory_gib),
        )


def room_of(
    node_id: str,
    group: str,
    shape: NodeShape,
    available: tuple[float, float, float],
    held: Sequence[Held] = (),
    name: str = "",
) -> NodeRoom:
    """The room of a live node from what Ray says is `available` (GPUs, CPUs, GiB) and what we hold there.

    Ray's figures lag a little behind ours, so each resource is the smaller of "total less ours" and "Ray's less what
    Ray does not know of yet". What is missing beyond ours is foreign (an AReaL run of its own): whole GPUs of it take
    whole devices.
    """
    available_gpus, available_cpus, available_memory_gib = available
    gpus = _all_devices(shape.gpus)
    for h in held:
        gpus = _without(gpus, h.devices)
    seen_by_ray = sum(h.bundle.gpus for h in held if h.reserved)
    foreign = shape.gpus - available_gpus - seen_by_ray
    if foreign > EPS:
        gpus = _take_foreign(gpus, foreign)
    pending_cpus = sum(h.bundle.cpus for h in held if not h.reserved)
    pending_gib = sum(h.bundle.memory_gib for h in held if not h.reserved)
    cpus = min(shape.cpus - sum(h.bundle.cpus for h in held), available_cpus - pending_cpus)
    gib = min(shape.memory_gib - sum(h.bundle.memory_gib for h in held), available_memory_gib - pending_gib)
    cpus, gib = max(0.0, cpus), max(0.0, gib)
    return NodeRoom(node_id, group, gpus, cpus, gib, shape.accelerator, shape.gpus > 0, name)


def empty_room(node_id: str, group: str, shape: NodeShape) -> NodeRoom:
    """The room of a node that nothing runs on."""
    return room_of(node_id, group, shape, (shape.gpus, shape.cpus, shape.memory_gib))


def describe(ask: Ask) -> str:
    """`4 bundles of 2 GPUs, 1 CPU`."""
    return f"{ask.count} bundle{'s' if ask.count > 1 else ''} of {describe_bundle(ask.bundle)}"


def describe_bundle(bundle: Bundle) -> str:
    """`2 GPUs, 1 CPU, 8 GiB`."""
    parts: list[str] = []
    if bundle.gpus:
        parts.append(f"{bundle.gpus:g} GPU{'s' if bundle.gpus > 1 else ''}")
    if bundle.cpus:
        parts.append(f"{bundle.cpus:g} CPU{'s' if bundle.cpus != 1 else ''}")
    if bundle.memory_gib:
        parts.append(format_gib(bundle.memory_gib))
    return ", ".join(parts) or "nothing"


# ---------------------------------------------------------------- how


def _eligible(ask: Ask, room: NodeRoom) -> bool:
    if ask.group is None and room.group == HEAD_GROUP:
        return False  # the head keeps the cluster: work goes there only when it is asked for by name
    if ask.group is not None and room.group != ask.group:
        return False
    return accelerator_matches(ask, room.accelerator)


def accelerator_matches(ask: Ask, accelerator: str | None) -> bool:
    """Whether a node with that accelerator may take the gang."""
    wanted = {a.lower() for a in ask.accelerators}
    return not wanted or (accelerator or "").lower() in wanted


def _candidate_sets(ask: Ask, rooms: Sequence[NodeRoom]) -> list[list[NodeRoom]]:
    sets: dict[tuple[str, str], list[NodeRoom]] = {}
    groups: dict[str, list[NodeRoom]] = {}
    for room in rooms:
        if _eligible(ask, room):
            sets.setdefault((room.group, room.accelerator or ""), []).append(room)
            groups.setdefault(room.group, []).append(room)
    mixed = [whole for name, whole in groups.items() if sum(1 for key in sets if key[0] == name) > 1]
    return [*sets.values(), *mixed]


def _pack(ask: Ask, rooms: Sequence[NodeRoom]) -> Placement | None:
    """Like bundles into rooms: the node that takes all that is left and fits tightest, else the one that takes most."""
    capacity = {r.node_id: bundles_on(r, ask.bundle, ask.count) for r in rooms}
    if sum(capacity.values()) < ask.count:
        return None
    left = ask.count
    open_rooms = {r.node_id: r for r in rooms if capacity[r.node_id]}
    node_ids: list[str] = []
    devices: list[tuple[DeviceShare, ...]] = []
    while left:

        def order(r: NodeRoom, left: int = left) -> tuple[object, ...]:
            c = capacity[r.node_id]
            gpu_last = ask.bundle.gpus == 0 and r.is_gpu_node
            return (gpu_last, c < left, c if c >= left else -c, r.free_gpus, r.cpus, r.name, r.node_id)

        room = min(open_rooms.values(), key=order)  # type: ignore[arg-type]
        del open_rooms[room.node_id]
        for _ in range(min(left, capacity[room.node_id])):
            taken = take(room, ask.bundle)
            assert taken is not None
            room, shares = taken
            node_ids.append(room.node_id)
            devices.append(shares)
            left -= 1
    return Placement(tuple(node_ids), tuple(devices))


def bundles_on(room: NodeRoom, bundle: Bundle, limit: int) -> int:
    n = 0
    while n < limit:
        taken = take(room, bundle)
        if taken is None:
            break
        room = taken[0]
        n += 1
    return n


def _all_devices(gpus: float) -> tuple[float, ...]:
    whole = int(gpus + EPS)
    rest = gpus - whole
    return (1.0,) * whole + ((rest,) if rest > EPS else ())


def _devices_for(free: Sequence[float], gpus: float) -> tuple[DeviceShare, ...] | None:
    if gpus <= 0:
        return ()
    if gpus < 1 - EPS:
        fitting = [(share, i) for i, share in enumerate(free) if share + EPS >= gpus]
        return ((min(fitting)[1], gpus),) if fitting else None
    whole = [i for i, share in enumerate(free) if share >= 1 - EPS][: round(gpus)]
    return tuple((i, 1.0) for i in whole) if len(whole) == round(gpus) else None


def _without(free: tuple[float, ...], shares: Sequence[DeviceShare]) -> tuple[float, ...]:
    left = list(free)
    for i, share in shares:
        if i < len(left):
            left[i] = max(0.0, left[i] - share)
    return tuple(0.0 if x < EPS else x for x in left)


def _take_foreign(free: tuple[float, ...], gpus: float) -> tuple[float, ...]:
    whole, rest = int(gpus + EPS), gpus - int(gpus + EPS)
    left = list(free)
    # Whole devices first; where none is whole any more, eat shares: rather too little free than too much.
    for i in sorted(range(len(left)), key=lambda i: (-left[i], i))[:whole]:
        left[i] = 0.0
    shares = _devices_for(left, rest) if rest > EPS else ()
    if shares is None:
        shares = ((max(range(len(left)), key=lambda i: left[i]), rest),) if left else ()
    return _without(tuple(left), shares)


def _reasons(ask: Ask, rooms: Sequence[NodeRoom]) -> tuple[str, ...]:
    eligible = [r for r in rooms if _eligible(ask, r)]
    if not eligible:
        where = f"group {ask.group}" if ask.group else "the cluster"
        what = f" with {' or '.join(ask.accelerators)}" if ask.accelerators else ""
        return (f"{where} has no node{what} that takes work now",)
    reasons: list[str] = []
    for group in sorted({r.group for r in eligible}):
        members = [r for r in eligible if r.group == group]
        n = sum(bundles_on(r, ask.bundle, ask.count) for r in members)
        free = Bundle(
            sum(r.free_gpus for r in members), sum(r.cpus for r in members), sum(r.memory_gib for r in members)
        )
        reasons.append(
            f"group {group}: {n} of {ask.count} fit now ({describe_bundle(ask.bundle)} each; "
            f"free on {len(members)} node{'s' if len(members) > 1 else ''}: {_free(ask.bundle, free)})"
        )
    return tuple(reasons)


def _free(wanted: Bundle, free: Bundle) -> str:
    parts: list[str] = []
    if wanted.gpus:
        parts.append(f"{free.gpus:g} GPUs")
    if wanted.cpus:
        parts.append(f"{free.cpus:g} CPUs")
    if wanted.memory_gib:
        parts.append(format_gib(free.memory_gib))
    return ", ".join(parts)
