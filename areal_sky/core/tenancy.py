"""Tenants: what others hold in our Ray cluster, and which of it belongs to a driver that we admitted.

A driver (an AReaL run) is admitted for the GPUs of all its backends. It then makes placement groups of its own, which
Ray shows as somebody's use. As they appear, its claim shrinks by as much: what it has taken is held by Ray, what it has
not is held by us, and nothing is counted twice. What nobody admitted is foreign: it is seen, and room it takes is
gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from areal_sky.core.gangs import Ask, DeviceShare, NoFit, Placement
from areal_sky.core.model import HEAD_GROUP, Bundle
from areal_sky.core.placement import accelerator_matches
from areal_sky.core.room import NodeRoom, bundles_on, take
from areal_sky.errors import InvalidInput
from areal_sky.spec.backends import ENGINES, TRAIN_ENGINES, Backend, components, parse_backend, world_size

EPS = 1e-6
# Metadata of a Ray job that says which gang's program it is; in the environment of every task.
GANG_KEY = "areal-sky-gang"


@dataclass(frozen=True, slots=True)
class ForeignUse:
    """What a placement group or actor that is not ours holds on a node. `owner`: the gang whose program made it."""

    node_id: str
    bundle: Bundle
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class Foreign:
    """One look at what others hold.

    `gangs`: those whose programs are connected to Ray now; `strangers`: so is a program that no task of ours started.
    """

    uses: tuple[ForeignUse, ...] = ()
    gangs: frozenset[str] = frozenset()
    strangers: bool = False


@dataclass(frozen=True, slots=True)
class Settled:
    """`left`: of each gang's claim what it has not taken yet, by node. `taken`: what all others hold, by node."""

    left: Mapping[str, Mapping[str, Bundle]]
    taken: Mapping[str, Bundle]

    def gone(self, node_id: str) -> Bundle:
        """What a node has not for anybody else: taken, or promised."""
        promised = (claims[node_id] for claims in self.left.values() if node_id in claims)
        return total(chain((self.taken.get(node_id, NOTHING),), promised))


NOTHING = Bundle(0.0, 0.0, 0.0)


def total(bundles: Iterable[Bundle]) -> Bundle:
    gpus = cpus = memory = 0.0
    for b in bundles:
        gpus, cpus, memory = gpus + b.gpus, cpus + b.cpus, memory + b.memory_gib
    return Bundle(gpus, cpus, memory)


def settle(
    claims: Mapping[str, Mapping[str, Bundle]], foreign: Foreign, held: Mapping[str, Bundle] | None = None
) -> Settled:
    """What is left of each driver's claim, given what it and others hold.

    `claims`: by gang and node, what it was admitted for. `held`: what Ray has given away on each node beyond our own
    gangs, tasks and actors included that are in no table. Where that is more than the tables say, the rest is taken for
    a driver's, up to its claim on that node, as long as nobody without a claim could have it; else it is a stranger's,
    which may hold back too much for a while but never promises what is gone.

    Of each resource apart: what a task took on a node of its claim lessens that; what it took elsewhere lessens the
    claim anywhere else, since Ray placed it where we did not expect. More than its claim it may take, too: then nothing
    is left, and all of it is taken.
    """
    listed: dict[str, list[Bundle]] = {}
    own: dict[str, dict[str, list[Bundle]]] = {t: {} for t in claims}
    for use in foreign.uses:
        listed.setdefault(use.node_id, []).append(use.bundle)
        if use.owner in own:
            own[use.owner].setdefault(use.node_id, []).append(use.bundle)
    used = {t: {n: total(bs) for n, bs in nodes.items()} for t, nodes in own.items()}
    taken = {n: total(bs) for n, bs in listed.items()}
    for node_id, seen in (held or {}).items():
        known = taken.get(node_id, NOTHING)
        unlisted = _over(seen, known)
        if unlisted == NOTHING:
            continue
        taken[node_id] = total((known, unlisted))
        if not (foreign.strangers or foreign.gangs - claims.keys()):
            _share_out(node_id, unlisted, claims, used)
    left = {t: _left(claim, used[t]) for t, claim in claims.items()}
    return Settled({t: nodes for t, nodes in left.items() if nodes}, taken)


def make_good(settled: Settled, free_gpus: Mapping[str, float]) -> Settled:
    """The same, with GPUs of claims that strangers sit on promised on other nodes instead, as far as there are any.

    `free_gpus`: by node what neither we nor others hold nor claims keep; below 0 where a stranger took what was kept.
    """
    free = dict(free_gpus)
    left = {t: dict(nodes) for t, nodes in settled.left.items()}
    for n in sorted(n for n, gpus in free.items() if gpus < -EPS):
        for claim in left.values():
            short = min(-free[n], claim[n].gpus if n in claim else 0.0)
            for other in sorted((o for o in free if free[o] > EPS), key=lambda o: (-free[o], o)):
                moved = min(short, free[other])
                if moved <= EPS:
                    break
                claim[n] = _over(claim[n], Bundle(moved, 0.0, 0.0))
                claim[other] = total((claim.get(other, NOTHING), Bundle(moved, 0.0, 0.0)))
                short, free[n], free[other] = short - moved, free[n] + moved, free[other] - moved
    return Settled(left, settled.taken)


# ---------------------------------------------------------------- what a driver must be admitted for


@dataclass(frozen=True, slots=True)
class DriverNeed:
    """`shapes`: (bundle, how many) of the placement groups that the run will make. `gpus`: of all of them."""

    shapes: tuple[tuple[Bundle, int], ...]

    @property
    def gpus(self) -> int:
        return round(sum(b.gpus * n for b, n in self.shapes))

    @property
    def uniform(self) -> tuple[Bundle, int]:
        """Like bundles that hold all of it: as large as the largest, so many that their GPUs are at least `gpus`."""
        largest = max((b for b, _ in self.shapes), key=lambda b: b.gpus)
        gpus = max(1.0, largest.gpus)
        count = -int(-self.gpus // gpus)
        cpus = max(b.cpus / max(1.0, b.gpus) for b, _ in self.shapes) * gpus
        memory = max(b.memory_gib / max(1.0, b.gpus) for b, _ in self.shapes) * gpus
        return Bundle(gpus, cpus, memory), count


def driver_need(
    backends: str | Sequence[str], gpus_per_node: int = 8, cpus_per_gpu: float = 0.0, memory_gib_per_gpu: float = 0.0
) -> DriverNeed:
    """What an AReaL run of these backends takes: the sum of their world sizes, in the shapes of its placement groups.

    Its RayScheduler gives each trainer rank a bundle of one GPU, all in one group, and each rollout instance a group of
    its own with all its GPUs on one node, or as many whole nodes as these fill. `backends` are backend strings, or
    AReaL's allocation mode (`sglang:d4t2+fsdp:d8`). Raises InvalidInput.
    """
    if isinstance(backends, str):
        groups = components(backends)
    else:
        groups = tuple((parse_backend(b, ENGINES),) for b in backends)
    shapes: list[tuple[Bundle, int]] = []
    for together in groups:
        # Those that share GPUs take as much as the largest of them.
        for gpus, count in _groups_of(max(together, key=lambda b: b.gpus), gpus_per_node):
            shapes.append((Bundle(gpus, gpus * cpus_per_gpu, gpus * memory_gib_per_gpu), count))
    if not shapes:
        raise InvalidInput("a driver without backends takes no GPUs: give it `backends`, such as sglang:d4t2+fsdp:d8")
    need = DriverNeed(tuple(sorted(shapes, key=lambda s: -s[0].gpus)))
    if isinstance(backends, str):
        assert need.gpus == world_size(backends)
    return need


def fit_driver(
    need: DriverNeed, rooms: Iterable[NodeRoom], group: str | None = None, accelerators: tuple[str, ...] = ()
) -> Placement | NoFit:
    """Where all of it fits now, one GPU a bundle; not bound to one node group, since Ray does not bind the run either.

    Largest bundles first, each shape on the nodes that take most of it, so that it lies on few.
    """
    ask = Ask(NOTHING, 1, group, accelerators)
    left = {
        r.node_id: r
        for r in rooms
        if (r.group != HEAD_GROUP if group is None else r.group == group) and accelerator_matches(ask, r.accelerator)
    }
    nodes: list[str] = []
    devices: list[tuple[DeviceShare, ...]] = []
    for bundle, count in need.shapes:
        each = {n: bundles_on(r, bundle, count) for n, r in left.items()}
        for n in sorted(each, key=lambda n: (-each[n], left[n].group, left[n].name, n)):
            for _ in range(min(each[n], count)):
                taken = take(left[n], bundle)
                assert taken is not None
                left[n], shares = taken
                nodes += [n] * len(shares)
                devices += [(share,) for share in shares]
                count -= 1
        if count:
            return NoFit((f"of its {need.gpus} GPUs {len(nodes)} can be had, in the sizes that it takes",))
    return Placement(tuple(nodes), tuple(devices))


# ---------------------------------------------------------------- how


def _groups_of(b: Backend, gpus_per_node: int) -> list[tuple[float, int]]:
    if b.engine in TRAIN_ENGINES:
        return [(1.0, b.gpus)]
    whole, rest = divmod(b.gpus_per_replica, max(1, gpus_per_node))
    pairs = [(float(gpus_per_node), whole * b.data), (float(rest), b.data if rest else 0)]
    return [(gpus, count) for gpus, count in pairs if count]


def _over(a: Bundle, b: Bundle) -> Bundle:
    """What `a` has above `b`, each resource apart."""
    pairs = ((a.gpus, b.gpus), (a.cpus, b.cpus), (a.memory_gib, b.memory_gib))
    return Bundle(*(x - y if x - y > EPS else 0.0 for x, y in pairs))


def _least(a: Bundle, b: Bundle) -> Bundle:
    return Bundle(min(a.gpus, b.gpus), min(a.cpus, b.cpus), min(a.memory_gib, b.memory_gib))


def _share_out(
    node_id: str,
    unlisted: Bundle,
    claims: Mapping[str, Mapping[str, Bundle]],
    used: dict[str, dict[str, Bundle]],
) -> None:
    """Counts use that no table lists as that of drivers with a claim on the node, in their order."""
    for task_id, claim in claims.items():
        if node_id not in claim:
            continue
        before = used[task_id].get(node_id, NOTHING)
        part = _least(unlisted, _over(claim[node_id], before))
        used[task_id][node_id] = total((before, part))
        unlisted = _over(unlisted, part)


def _left(claim: Mapping[str, Bundle], used: Mapping[str, Bundle]) -> dict[str, Bundle]:
    rest = {n: _over(b, used.get(n, NOTHING)) for n, b in claim.items()}
    elsewhere = total(_over(u, claim.get(n, NOTHING)) for n, u in used.items())
    # The smallest rests go first, so that what stays promised stays together.
    for n in sorted(rest, key=lambda n: (rest[n].gpus, n)):
        before = rest[n]
        rest[n] = _over(before, elsewhere)
        elsewhere = _over(elsewhere, before)
    return {n: b for n, b in rest.items() if b != NOTHING}
