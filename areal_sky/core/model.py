"""The values that every layer speaks in: offers, plans, replicas, nodes, demand, the cluster's state. All are frozen.

Durations and times are seconds (times: Unix), memory is GiB, money is US dollars per hour.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from areal_sky.core.memory_terms import MemoryReport

HEAD_GROUP = "head"

# ---------------------------------------------------------------- what can be had

@dataclass(frozen=True, slots=True)
class NodeShape:
    """What one node offers to Ray. `accelerator` is the canonical name, None on a CPU node."""

    gpus: float = 0.0
    cpus: float = 1.0
    memory_gib: float = 1.0
    accelerator: str | None = None
    gpu_memory_gib: float | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """One machine type in one place at one price per node and hour.

    `price_usd_per_hour` is None when nobody told us; `source` says where the number comes from.
    """

    cloud: str
    region: str | None
    zone: str | None
    instance_type: str
    shape: NodeShape
    market: Literal["on_demand", "spot"]
    price_usd_per_hour: float | None
    source: str


@dataclass(frozen=True, slots=True)
class PricedChoice:
    """What one of the accelerators that a group may have would cost: the whole group at its largest, per hour.

    `offer` is the best machine with it in the plan's region (anywhere, if `elsewhere`); None: `why` says what is wrong.
    """

    accelerator: str
    offer: Offer | None
    usd_per_hour: float | None
    elsewhere: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class SpotPatience:
    """When spot that cannot be had is given up, and for how long, in seconds.

    Refused for `give_up_s` in a row: on demand instead. Spot is tried again `hold_s` after it was last refused.
    """

    give_up_s: float = 600.0
    hold_s: float = 1800.0


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """How one group will be launched. `offer` is the one to try first, `alternatives` the next ones, best first.

    `offer` has the market of a first replica; `spot_offer`/`on_demand_offer` are the same machine in each market
    where it can be had. For a fixed group min = max = 1 and `nodes_per_replica` counts the whole gang.
    """

    name: str
    elastic: bool
    min_replicas: int
    max_replicas: int
    nodes_per_replica: int
    market: Literal["on_demand", "spot", "mixed"]
    on_demand_base: int
    shape: NodeShape
    offer: Offer
    on_demand_offer: Offer | None = None
    spot_offer: Offer | None = None
    alternatives: tuple[Offer, ...] = ()
    choices: tuple[PricedChoice, ...] = ()  # where the spec names several accelerators, in their order
    no_spot: str = ""  # why spot is impossible for it; empty where it is possible

    @property
    def spot_partition(self) -> str | None:
        """The Slurm partition that stands for spot, where the spec names one."""
        spot = self.spot_offer
        return spot.zone if spot is not None and spot.cloud == "slurm" else None


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The whole cluster, priced. `guesses` are in words; `unknowns` is what could not be known here.

    `refusals`: why it must not be launched as it is; `memory` apart. `next_places`: the next best regions, with dollars
    per hour at the largest.
    """

    cluster: str
    infra: str | None
    head: GroupPlan
    groups: tuple[GroupPlan, ...]
    guesses: tuple[str, ...] = ()
    unknowns: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    next_places: tuple[tuple[str, float], ...] = ()
    spot: SpotPatience = SpotPatience()
    max_hourly_usd: float | None = None  # what stands in for spot may not take the cluster above it
    memory: MemoryReport = field(default_factory=MemoryReport)

    def group(self, name: str) -> GroupPlan | None:
        """The plan of that group (the head's under `head`), or None."""
        if name == HEAD_GROUP:
            return self.head
        return next((g for g in self.groups if g.name == name), None)


def replica_name(cluster: str, group: str, slot: int) -> str:
    """The SkyPilot cluster name of a replica: derived, so that a crash before it was recorded can be found again."""
    return f"{cluster}-{group}-{slot}"


# ---------------------------------------------------------------- what runs: replicas and nodes


class ReplicaState(StrEnum):
    QUEUED = "QUEUED"  # intent recorded, launch not confirmed
    REQUESTED = "REQUESTED"  # the cloud accepted the launch
    PROVISIONED = "PROVISIONED"  # machines exist, Ray nodes not all seen
    READY = "READY"  # every node is a live Ray node
    DRAINING = "DRAINING"  # no new work; running work finishes or moves
    TERMINATING = "TERMINATING"  # told the cloud to end it
    TERMINATED = "TERMINATED"  # the cloud confirms that nothing is left
    LAUNCH_FAILED = "LAUNCH_FAILED"
    LOST = "LOST"  # was there, is gone or broken, not by us


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica: one SkyPilot cluster (or a set of local node processes).

    `launched_s` starts the bill (None before the launch was accepted).
    """

    name: str
    group: str
    slot: int
    state: ReplicaState
    since_s: float
    nodes: int
    market: str
    price_usd_per_hour: float | None  # per node
    reason: str = ""
    request_id: str | None = None
    launched_s: float | None = None
    ready_s: float | None = None
    drain_deadline_s: float | None = None
    on_demand_usd_per_hour: float | None = None  # what the same machine cost on demand at launch, per node
    note: str = ""  # what its start waits for, or why it could not be ended so far
    fallback: bool = False  # stands in for a spot replica that could not be had


class MachineState(StrEnum):
    STARTING = "STARTING"
    UP = "UP"
    FAILED = "FAILED"  # the launch ended in an error, or some of its nodes are gone
    STOPPING = "STOPPING"


@dataclass(frozen=True, slots=True)
class Machine:
    """A replica as the cloud sees it now. `nodes_up` of its nodes are there. `request_id` is its launch's, if known.

    `error` explains FAILED, and STOPPING when an attempt to end it has failed. `note` says what STARTING waits for.

    `no_capacity`: it failed because there was none to be had, or none within quota, in its market.
    """

    replica: str
    state: MachineState
    nodes_up: int
    error: str = ""
    no_capacity: bool = False
    request_id: str = ""
    note: str = ""


MOST_FAULTS = 5  # with waits that double from 15 s: after about four minutes of waiting and five set-ups


@dataclass(frozen=True, slots=True)
class GroupState:
    """What is wanted of a group, since when, why, by whom (`spec`, `user` or `policy`).

    `victims` go first when it shrinks. `failures` counts launches that failed in a row; none is tried before
    `retry_at_s`. `faults` counts those of them that waiting does not mend, `last_fault` is the last; see `given_up`.
    `failed_market` is where the last failure was. `spot_refused_since_s` and `spot_refused_s` are the first and the
    last time in a row that spot could not be had; a spot replica that comes up ends the row.
    """

    name: str
    desired: int
    since_s: float
    reason: str
    by: str
    victims: tuple[str, ...] = ()
    market: str | None = None
    last_grow_s: float | None = None
    last_shrink_s: float | None = None
    failures: int = 0
    faults: int = 0
    last_fault: str = ""
    retry_at_s: float | None = None
    failed_market: str | None = None
    spot_refused_since_s: float | None = None
    spot_refused_s: float | None = None

    @property
    def given_up(self) -> bool:
        """Nothing more is launched until somebody asks again: what fails always costs money with every try."""
        return self.faults >= MOST_FAULTS


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """Time that one replica was paid for. `until_s` None: still running. Prices per node and hour, as at launch."""

    replica: str
    group: str
    market: str
    nodes: int
    price_usd_per_hour: float | None
    from_s: float
    until_s: float | None
    on_demand_usd_per_hour: float | None = None

    def hours(self, now_s: float) -> float:
        """Node-hours so far."""
        end_s = now_s if self.until_s is None else self.until_s
        return max(0.0, end_s - self.from_s) / 3600.0 * self.nodes

    def usd(self, now_s: float) -> float | None:
        """Dollars so far, or None without a price."""
        return None if self.price_usd_per_hour is None else self.hours(now_s) * self.price_usd_per_hour


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The fold of a cluster's events. `version` is the last event's number; `replicas` holds live ones by name.

    `cloud_problem`: why nothing is known of its machines now; empty while the cloud answers.
    """

    name: str = ""
    version: int = 0
    created_s: float | None = None
    down_requested_s: float | None = None
    down_drain_s: float = 0.0
    down_s: float | None = None
    cloud_problem: str = ""
    groups: Mapping[str, GroupState] = field(default_factory=dict[str, GroupState])
    replicas: Mapping[str, Replica] = field(default_factory=dict[str, Replica])
    ledger: tuple[LedgerLine, ...] = ()


# ---------------------------------------------------------------- what is asked of it (tasks: core/taskmodel.py)


@dataclass(frozen=True, slots=True)
class Bundle:
    """One resource request of a gang; runs as one rank on one node. `gpus` is whole, or a fraction below 1."""

    gpus: float = 0.0
    cpus: float = 1.0
    memory_gib: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeView:
    """A live node as the head sees it. `free_*` is what neither our gangs nor foreign placement groups hold.

    `draining`: takes no new work. `idle_since_s`: since when nothing of ours runs on it, None while something does.
    """

    node_id: str
    group: str
    replica: str
    index: int
    shape: NodeShape
    free_gpus: float
    free_cpus: float
    free_memory_gib: float
    draining: bool = False
    idle_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class GangDemand:
    """A waiting gang that does not fit now: demand for scaling. `group` None means any group will do.

    `score` is its place in the queue (higher first), `waiting_s` how long it has waited.
    """

    task_id: str
    group: str | None
    bundles: int
    bundle: Bundle
    accelerators: tuple[str, ...]
    score: float
    waiting_s: float
