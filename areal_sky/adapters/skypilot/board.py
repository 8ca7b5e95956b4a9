"""What is known and under way of one cluster on SkyPilot, shared by the threads that look and those that act."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from areal_sky.adapters.ports import LaunchRequest
from areal_sky.adapters.skypilot.judge import Ending, Launching, Stage, machine_of
from areal_sky.adapters.skypilot.requests import DOWN, LAUNCH, Request, SkyCluster
from areal_sky.core.model import HEAD_GROUP, Machine, replica_name
from areal_sky.core.orphans import CLUSTER_LABEL, OWNER_LABEL
from areal_sky.errors import AlreadyExists, ArealSkyError


@dataclass(frozen=True, slots=True)
class HeadSeat:
    """Where the head is: its SkyPilot cluster, its private address, and OpenSSH's configuration to get there."""

    host: str
    private_ip: str
    ssh_config: str


class Board:
    """Hold `lock` for whatever takes more than one look. Nothing here blocks."""

    def __init__(self, cluster: str, owner: str, groups: Collection[str], hide: Callable[[str], str]):
        """`groups` are all that the cluster has, the head's included; `hide` takes secrets out of a text."""
        self.lock = threading.RLock()
        self.cluster = cluster
        self.head = replica_name(cluster, HEAD_GROUP, 0)
        self.launches: dict[str, Launching] = {}
        self.endings: dict[str, Ending] = {}
        self.clusters: dict[str, SkyCluster] = {}  # ours, as last seen
        self.theirs: frozenset[str] = frozenset()  # names of ours that others have taken
        self.flying: dict[str, Request] = {}  # launches in flight by name, whoever asked for them
        self.doubts: set[str] = set()
        self.refreshed_s: dict[str, float] = {}
        self.found_well: dict[str, int] = {}  # doubts without ground in a row: each answer costs the machine seconds
        self.seat: HeadSeat | None = None
        self._forgotten_s: dict[str, float] = {}
        self._owner = owner
        self._groups = tuple(groups)
        self._hide = hide

    def machines(self) -> tuple[Machine, ...]:
        """All that exists in any form, by name."""
        with self.lock:
            names = sorted({*self.clusters, *self.launches, *self.endings, *self.flying})
            found = [
                machine_of(
                    name, self.clusters.get(name), self.launches.get(name), self.endings.get(name),
                    self.flying.get(name), time.monotonic(),
                )
                for name in names
            ]  # fmt: skip
        return tuple(m for m in found if m is not None)

    def moving(self) -> bool:
        """Whether something is under way, so that looking often pays."""
        with self.lock:
            settled = all(x.stage in (Stage.DONE, Stage.FAILED) for x in self.launches.values())
            return bool(not settled or self.endings or self.flying or self.doubts)

    def settled(self, name: str) -> bool:
        """Whether nobody works on the replica, so that asking its cloud disturbs nobody."""
        launch = self.launches.get(name)
        busy = launch is not None and launch.stage in (Stage.WAITING, Stage.SUBMITTING, Stage.FLYING)
        return not busy and name not in self.endings and name not in self.flying

    def head_ip(self) -> str:
        """The head's private address, empty until its machine is up."""
        with self.lock:
            head = self.clusters.get(self.head)
            return head.private_ips[0] if head is not None and head.private_ips and head.status == "UP" else ""

    def see_requests(self, active: Collection[Request]) -> None:
        """Takes what is in flight now. Launches of a controller that was killed before it wrote the id are adopted."""
        launches = {r.cluster: r for r in active if r.name == LAUNCH and self._is_name(r.cluster)}
        mine = {name: r for name, r in launches.items() if name not in self.theirs}
        ending = {r.cluster for r in active if r.name == DOWN}
        with self.lock:
            self.flying = mine
            for name, request in mine.items():
                if name not in self.endings and name not in ending:
                    launch = Launching(name, stage=Stage.FLYING, request_id=request.id, told=True)
                    self.launches.setdefault(name, launch)

    def see_clusters(self, found: Mapping[str, SkyCluster], asked_s: float) -> None:
        """Takes what SkyPilot lists. An answer older than the end of a replica does not bring it back."""
        with self.lock:
            ours = self.ours(found)
            self.theirs = frozenset(n for n in found if n not in ours and self._is_name(n))
            self.clusters = {n: c for n, c in ours.items() if self._forgotten_s.get(n, float("-inf")) < asked_s}

    def begin(self, request: LaunchRequest) -> None:
        """A launch that waits for its turn. How a replica of that name fared before does not count."""
        with self.lock:
            name = request.replica
            self.launches[name] = Launching(name, request, since_s=time.monotonic())
            self.refreshed_s.pop(name, None)
            self.found_well.pop(name, None)

    def forget(self, name: str) -> None:
        """Nothing is left of the replica."""
        with self.lock:
            for known in (self.clusters, self.flying, self.launches, self.endings):
                known.pop(name, None)
            self._forgotten_s[name] = time.monotonic()
            if name == self.head:
                self.seat = None

    def is_ours(self, cluster: SkyCluster) -> bool:
        """By its labels: somebody else may use the same names."""
        labels = cluster.labels
        return labels.get(CLUSTER_LABEL) == self.cluster and labels.get(OWNER_LABEL) == self._owner

    def ours(self, clusters: Mapping[str, SkyCluster]) -> dict[str, SkyCluster]:
        return {n: c for n, c in clusters.items() if self.is_ours(c)}

    def not_ours(self, cluster: SkyCluster) -> AlreadyExists:
        """What to say of a cluster that has a name of ours."""
        return AlreadyExists(
            f"a SkyPilot cluster {cluster.name} exists that this cluster did not make (user {cluster.user or '?'}): "
            f"`sky down {cluster.name}` if it is yours, or choose another `name`"
        )

    def hidden(self, error: ArealSkyError) -> ArealSkyError:
        """The error without secrets in its words."""
        return type(error)(self._hide(str(error)))

    def _is_name(self, name: str) -> bool:
        group, _, slot = name.removeprefix(f"{self.cluster}-").rpartition("-")
        return name.startswith(f"{self.cluster}-") and slot.isdigit() and group in self._groups
