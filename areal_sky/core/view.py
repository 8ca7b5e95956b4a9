"""What the head tells the controller: live nodes, unmet demand, load. JSON on the wire, these values in code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from areal_sky.core.model import GangDemand, NodeView
from areal_sky.core.telemetry import Validity


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """GPU load of one replica over its latest windows, and what runs there.

    `utilization_mean` is None unless `validity` is KNOWN: an unknown load is never an idle one.
    `idle_since_s`: since when no task of ours has run on any of its nodes; None while one does.
    """

    replica: str
    group: str
    nodes_alive: int
    running_tasks: int
    utilization_mean: float | None
    validity: Validity
    age_s: float | None
    idle_since_s: float | None
    draining: bool = False


@dataclass(frozen=True)
class HeadView:
    """One consistent look at the head at `t_s`."""

    t_s: float
    nodes: tuple[NodeView, ...]
    loads: tuple[ReplicaLoad, ...]
    demand: tuple[GangDemand, ...]
    running_tasks: int
    waiting_tasks: int

    def load(self, replica: str) -> ReplicaLoad | None:
        return self._by_replica.get(replica)

    def nodes_alive(self) -> Mapping[str, int]:
        """How many live nodes each replica has; those that have none are left out."""
        return self._alive

    # A tick over a thousand replicas asks for each of them.
    @cached_property
    def _by_replica(self) -> dict[str, ReplicaLoad]:
        return {x.replica: x for x in reversed(self.loads)}

    @cached_property
    def _alive(self) -> Counter[str]:
        return Counter(n.replica for n in self.nodes)
