"""A shipped double of the RayCluster port: gangs and runners as plain values that outlive the service.

Faults are set from outside: `kill_node`, `finish`, `lose`, `unreachable`, and `crash_after` for a service that dies
right after its n-th call. `started` counts how often each rank was ever started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from areal_sky.adapters.ports import GangPhase, RankExit, RankStart, RayNode
from areal_sky.core.model import Bundle, NodeShape
from areal_sky.core.tenancy import Foreign, ForeignUse
from areal_sky.errors import NotFound, Unreachable


class Crash(BaseException):
    """The service's process dies here."""


@dataclass
class _Gang:
    bundles: tuple[Bundle, ...]
    node_ids: tuple[str, ...]
    phase: GangPhase
    runners: dict[int, RankExit | None] = field(default_factory=dict[int, RankExit | None])
    starts: dict[int, RankStart] = field(default_factory=dict[int, RankStart])
    gone: set[int] = field(default_factory=set[int])
    apart: bool = False

    @property
    def bundle(self) -> Bundle:
        return self.bundles[0]


class FakeRayCluster:
    """State that lasts is here; `connection()` gives the port of one service process."""

    def __init__(self, *, slow_reserve: bool = False, slow_start: bool = False, slow_exit: bool = False):
        self.live: dict[str, RayNode] = {}
        self.all_gangs: dict[str, _Gang] = {}
        self.started: Counter[tuple[str, int]] = Counter()
        self.slow_reserve = slow_reserve  # placement groups stay pending until `reserve_all`
        self.slow_start = slow_start  # runners say nothing of their start while this holds
        self.slow_exit = slow_exit  # killed ranks end only by `finish`
        self.others: list[ForeignUse] = []  # what others than the service hold
        self.unreachable = ""
        self.crash_after: int | None = None

    def add_node(self, group: str, replica: str, shape: NodeShape, index: int = 0, node_id: str = "") -> str:
        node_id = node_id or f"{replica}/{index}#{len(self.live)}"
        labels = {"cluster": "c", "group": group, "replica": replica, "index": str(index)}
        self.live[node_id] = RayNode(node_id, labels, shape, shape.gpus, shape.cpus, shape.memory_gib, False)
        return node_id

    def kill_node(self, node_id: str) -> None:
        """The node and everything on it are gone at once."""
        del self.live[node_id]
        for gang in self.all_gangs.values():
            for rank, node in enumerate(gang.node_ids):
                if node == node_id and rank in gang.runners and gang.runners[rank] is None:
                    gang.runners[rank] = RankExit(rank, None, "its node died")

    def finish(self, gang_id: str, rank: int, code: int = 0, lost: str = "") -> None:
        self.all_gangs[gang_id].runners[rank] = RankExit(rank, code, lost)

    def lose(self, gang_id: str, rank: int) -> None:
        """The runner dies on a healthy node."""
        self.all_gangs[gang_id].runners[rank] = RankExit(rank, None, "its runner died")

    def running(self) -> list[tuple[str, int]]:
        """(gang, rank) of every process that runs now."""
        return [(g, r) for g, gang in self.all_gangs.items() for r, end in gang.runners.items() if end is None]

    def gangs_left(self) -> list[str]:
        return sorted(self.all_gangs)

    def reserve_all(self) -> None:
        for gang in self.all_gangs.values():
            gang.phase = GangPhase.READY

    def over_committed(self) -> bool:
        """Whether gangs together hold more of a node than it has."""
        return any(self._free(n)[k] < -1e-6 for n in self.live for k in range(3))

    def connection(self) -> FakeRayConnection:
        return FakeRayConnection(self)

    def _free(self, node_id: str) -> tuple[float, float, float]:
        shape = self.live[node_id].shape
        held = [
            bundle
            for g in self.all_gangs.values()
            for rank, (n, bundle) in enumerate(zip(g.node_ids, g.bundles, strict=True))
            if n == node_id and g.phase is GangPhase.READY and rank not in g.gone
        ] + [u.bundle for u in self.others if u.node_id == node_id]
        return (
            shape.gpus - sum(b.gpus for b in held),
            shape.cpus - sum(b.cpus for b in held),
            shape.memory_gib - sum(b.memory_gib for b in held),
        )


class FakeRayConnection:
    """`ports.RayCluster` of one process: what it has been told dies with it, the cluster stays."""

    def __init__(self, cluster: FakeRayCluster):
        self._cluster = cluster
        self._watched: set[tuple[str, int]] = set()
        self._lost: list[tuple[str, RankExit]] = []
        self._begun: list[tuple[str, int]] = []

    def nodes(self) -> tuple[RayNode, ...]:
        self._step()
        found: list[RayNode] = []
        for node in self._cluster.live.values():
            gpus, cpus, gib = self._cluster._free(node.node_id)
            found.append(replace(node, available_gpus=gpus, available_cpus=cpus, available_memory_gib=gib))
        return tuple(found)

    def foreign(self) -> Foreign:
        owners = {u.owner for u in self._cluster.others}
        return Foreign(tuple(self._cluster.others), frozenset(o for o in owners if o), None in owners)

    def gangs(self) -> tuple[str, ...]:
        self._step()
        return tuple(self._cluster.all_gangs)

    def reserve(self, gang_id: str, bundles: Sequence[Bundle], node_ids: Sequence[str], apart: bool = False) -> None:
        if gang_id not in self._cluster.all_gangs:
            phase = GangPhase.PENDING if self._cluster.slow_reserve else GangPhase.READY
            self._cluster.all_gangs[gang_id] = _Gang(tuple(bundles), tuple(node_ids), phase, apart=apart)
        self._step()

    def gang_phase(self, gang_id: str) -> GangPhase:
        self._step()
        gang = self._cluster.all_gangs.get(gang_id)
        return gang.phase if gang else GangPhase.GONE

    def start(self, gang_id: str, bundles: Sequence[Bundle], ranks: Sequence[RankStart]) -> None:
        gang = self._cluster.all_gangs.get(gang_id)
        if gang is None:
            raise NotFound(f"no gang {gang_id}")
        for r in ranks:
            if r.rank not in gang.runners:
                gang.runners[r.rank] = None
                gang.starts[r.rank] = r
                self._cluster.started[gang_id, r.rank] += 1
                self._begun.append((gang_id, r.rank))
                self._step()  # a crash may leave a gang half started
            self._watched.add((gang_id, r.rank))
        self._step()

    def starts(self) -> tuple[tuple[str, int, tuple[str, ...]], ...]:
        self._step()
        if self._cluster.slow_start:
            return ()
        found, self._begun = self._begun, []
        return tuple((g, r, self._gpu_ids(g, r)) for g, r in found if g in self._cluster.all_gangs)

    def adopt(self, gang_id: str, ranks: int) -> bool:
        self._step()
        gang = self._cluster.all_gangs.get(gang_id)
        for rank in range(ranks):
            if gang is None or rank not in gang.runners:
                self._lost.append((gang_id, RankExit(rank, None, "its runner is gone")))
            else:
                self._watched.add((gang_id, rank))
                self._begun.append((gang_id, rank))
        return gang is not None and len(gang.runners) == ranks

    def exits(self) -> tuple[tuple[str, RankExit], ...]:
        self._step()
        found, self._lost = self._lost, []
        for gang_id, rank in sorted(self._watched):
            gang = self._cluster.all_gangs.get(gang_id)
            end = gang.runners.get(rank) if gang else RankExit(rank, None, "its gang was removed")
            if end is not None:
                found.append((gang_id, end))
                self._watched.discard((gang_id, rank))
        return tuple(found)

    def kill(self, gang_id: str, grace_s: float, ranks: Collection[int] | None = None) -> None:
        gang = self._cluster.all_gangs.get(gang_id)
        if gang is not None and not self._cluster.slow_exit:
            for rank, end in gang.runners.items():
                if end is None and (ranks is None or rank in ranks):
                    gang.runners[rank] = RankExit(rank, -15)
        self._step()

    def release(self, gang_id: str) -> None:
        self._cluster.all_gangs.pop(gang_id, None)
        self._watched = {key for key in self._watched if key[0] != gang_id}
        self._step()

    def release_ranks(self, gang_id: str, ranks: Collection[int]) -> None:
        gang = self._cluster.all_gangs.get(gang_id)
        if gang is not None:
            assert gang.apart, "its ranks share one placement group"
            gang.gone |= set(ranks)
            for rank in ranks:
                if gang.runners.get(rank) is None:
                    gang.runners[rank] = RankExit(rank, None, "its placement group was removed")
        self._watched = {key for key in self._watched if key[0] != gang_id or key[1] not in ranks}
        self._step()

    def drain(self, node_id: str, reason: str, deadline_s: float) -> None:
        self._cluster.live[node_id] = replace(self._cluster.live[node_id], draining=True)
        self._step()

    def _gpu_ids(self, gang_id: str, rank: int) -> tuple[str, ...]:
        """As a node with that many GPUs might give them out."""
        gang = self._cluster.all_gangs[gang_id]
        before = sum(int(b.gpus) for b, n in zip(gang.bundles[:rank], gang.node_ids, strict=False)
                     if n == gang.node_ids[rank])  # fmt: skip
        own = tuple(str(before + i) for i in range(int(gang.bundles[rank].gpus)))
        return (*own, *gang.starts[rank].lent)

    def _step(self) -> None:
        c = self._cluster
        if c.crash_after is not None:
            c.crash_after -= 1
            if c.crash_after <= 0:
                c.crash_after = None
                raise Crash
        if c.unreachable:
            raise Unreachable(c.unreachable)
