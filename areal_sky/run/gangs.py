"""What this process has asked Ray for. A new process asks again: every step is harmless when repeated.

Only the thread that ticks uses it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

from areal_sky.adapters.ports import GangPhase, RankExit, RankStart, RayCluster, RayNode
from areal_sky.core.model import Bundle
from areal_sky.core.tasklife import TaskRecord
from areal_sky.core.tenancy import Foreign
from areal_sky.errors import ArealSkyError

log = logging.getLogger(__name__)


class Gangs:
    def __init__(self, ray: RayCluster):
        self._ray = ray
        self.reserved: set[str] = set()
        self._launched: set[str] = set()
        self._killed: set[str] = set()
        self._to_release: set[str] = set()
        self._told_to_leave: set[tuple[str, int]] = set()
        self._given_back: set[tuple[str, int]] = set()
        self._up: dict[str, dict[int, tuple[str, ...]]] = {}  # ids of the GPUs of each rank that has started

    def look(
        self, holding: Collection[TaskRecord] = ()
    ) -> tuple[tuple[RayNode, ...], tuple[tuple[str, RankExit], ...], Foreign]:
        """(live nodes, ranks that have ended since the last look, what others hold). Raises Unreachable.

        Others are looked at where it matters whose their use is: while a driver is among `holding`.
        """
        for gang_id, rank, gpu_ids in self._ray.starts():
            self._up.setdefault(gang_id, {})[rank] = gpu_ids
        exits = self._ray.exits()
        nodes = self._ray.nodes()
        return nodes, exits, self._ray.foreign() if any(r.claim for r in holding) else Foreign()

    def adopt(self, holding: Collection[TaskRecord]) -> list[TaskRecord]:
        """Takes over the gangs that an earlier process started, and returns those it had only begun to start.

        A runner that is missing comes up among the exits. Raises Unreachable.
        """
        gangs = self._ray.gangs()
        broken: list[TaskRecord] = []
        for r in holding:
            if r.started_s is not None:
                self._ray.adopt(r.gang_id, len(r.places))
                self._launched.add(r.gang_id)
            elif r.starting:
                # It may have been started, whole or in part, or not: only a whole gang is taken over.
                if r.gang_id in gangs and self._ray.adopt(r.gang_id, len(r.places)):
                    self._launched.add(r.gang_id)
                else:
                    broken.append(r)
        self._to_release |= set(gangs) - {r.gang_id for r in holding}
        return broken

    def all_up(self, r: TaskRecord) -> bool:
        """Whether every rank's process has been started; one that has ended was started, too."""
        up = {*self._up.get(r.gang_id, ()), *(e.rank for e in r.exits if e.code is not None)}
        return up >= set(r.world)

    def gpu_ids(self, r: TaskRecord) -> dict[int, tuple[str, ...]]:
        """The ids of the GPUs that each of its ranks has, as far as the ranks have told."""
        return self._up.get(r.gang_id, {})

    def is_launched(self, gang_id: str) -> bool:
        """Whether its ranks may run: Ray was told to start them."""
        return gang_id in self._launched

    def leave(self, gang_id: str) -> None:
        """The gang is over: whatever Ray holds for it is given back by and by."""
        self._to_release.add(gang_id)
        self.reserved.discard(gang_id)
        self._launched.discard(gang_id)
        self._killed.discard(gang_id)
        self._up.pop(gang_id, None)
        for ranks in (self._told_to_leave, self._given_back):
            ranks -= {key for key in ranks if key[0] == gang_id}

    def over(self, holding: Iterable[TaskRecord]) -> list[str]:
        """Gangs whose resources are to be given back now: not those from which others live that still run."""
        lenders = {p.lender for r in holding for p in r.held if p.lender}
        return [gang_id for gang_id in self._to_release if gang_id not in lenders]

    def release(self, gang_ids: Collection[str]) -> None:
        for gang_id in gang_ids:
            if self._tried("release", lambda g=gang_id: self._ray.release(g)):
                self._to_release.discard(gang_id)
                self.reserved.discard(gang_id)

    def reserve(self, r: TaskRecord) -> None:
        """Asks for the gang's placement group, once."""
        if r.starting or r.started_s is not None or r.gang_id in self.reserved:
            return
        nodes = [p.node_id for p in r.places]
        if self._tried("reserve", lambda: self._ray.reserve(r.gang_id, _bundles(r), nodes, r.elastic)):
            self.reserved.add(r.gang_id)

    def kill(self, r: TaskRecord, grace_s: float) -> None:
        """Tells the gang's ranks to end: SIGTERM, after `grace_s` SIGKILL; once."""
        due = r.gang_id in self._launched and r.gang_id not in self._killed
        if due and self._tried("stop", lambda: self._ray.kill(r.gang_id, grace_s)):
            self._killed.add(r.gang_id)

    def kill_ranks(self, r: TaskRecord, grace_s: float) -> None:
        """The same for the ranks that the gang gives up."""
        due = [rank for rank in r.leaving if (r.gang_id, rank) not in self._told_to_leave]
        if due and self._tried("stop ranks", lambda: self._ray.kill(r.gang_id, grace_s, due)):
            self._told_to_leave |= {(r.gang_id, rank) for rank in due}

    def release_ranks(self, r: TaskRecord) -> None:
        """What the ranks that are gone had is given back."""
        due = [rank for rank in r.gone if (r.gang_id, rank) not in self._given_back]
        if due and self._tried("release ranks", lambda: self._ray.release_ranks(r.gang_id, due)):
            self._given_back |= {(r.gang_id, rank) for rank in due}

    def phase(self, gang_id: str) -> GangPhase:
        """How far Ray is with reserving. Raises Unreachable."""
        return self._ray.gang_phase(gang_id)

    def start(self, r: TaskRecord) -> None:
        """Starts the gang's ranks, once; harmless when some run already."""
        if r.gang_id in self._launched:
            return
        if self._tried("start", lambda: self._ray.start(r.gang_id, _bundles(r), _rank_starts(r))):
            self._launched.add(r.gang_id)

    def _tried(self, what: str, call: Callable[[], Any]) -> bool:
        try:
            call()
        except ArealSkyError as e:
            log.warning("cannot %s now, trying again: %s", what, e)
            return False
        return True


def _rank_starts(r: TaskRecord) -> list[RankStart]:
    envs = dict(r.spec.envs)
    if r.spec.array_index is not None:
        envs["AREAL_SKY_ARRAY_INDEX"] = str(r.spec.array_index)
        envs["AREAL_SKY_ARRAY_SIZE"] = str(r.spec.array)
    return [
        RankStart(rank, r.spec.command, r.spec.payload, dict(envs), r.spec.kind, r.bundle.gpus, place.lent)
        for rank, place in enumerate(r.places)
    ]


def _bundles(r: TaskRecord) -> list[Bundle]:
    """What Ray is asked for, per rank. Of what another task has lent Ray knows nothing: it counts as that one's."""
    lean = (Bundle(max(0.0, r.bundle.gpus - len(p.lent)), 0.0, 0.0) if p.lent else r.bundle for p in r.places)
    return list(lean)
