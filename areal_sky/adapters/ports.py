"""The doors to the outside, as protocols. Adapters implement them; `run` knows only these.

Every method raises errors of `areal_sky.errors` only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from areal_sky.core.events import Event, Record
from areal_sky.core.model import Bundle, GroupPlan, Machine, NodeShape
from areal_sky.core.telemetry import GpuSample
from areal_sky.core.tenancy import Foreign
from areal_sky.core.view import HeadView


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """Everything that a cloud needs to bring up one replica (the head is the replica of group `head`)."""

    cluster: str
    replica: str
    plan: GroupPlan
    market: str


class Cloud(Protocol):
    """Where replicas come from. No method blocks for longer than a local call takes."""

    def launch(self, request: LaunchRequest) -> str:
        """Start bringing up a replica; returns the request's id at once, "" while it is not known yet: ask again.

        Idempotent by replica name: launching what exists changes nothing.
        Raises what refused it: NoCapacity, Refused, AlreadyExists, Unauthorized, Unreachable.
        """
        ...

    def machines(self) -> tuple[Machine, ...]:
        """All replicas of this cluster that exist in any form, those of crashed launches included.

        Raises Unreachable while nothing is known for sure.
        """
        ...

    def terminate(self, replica: str) -> None:
        """Start ending a replica; repeat until `machines()` no longer lists it. Unknown names are no error."""
        ...

    def doubt(self, replica: str) -> None:
        """Something is wrong with the replica: look at its machines anew, and soon. Repeating it is harmless."""
        ...


class Clock(Protocol):
    def now(self) -> float:
        """Unix time in seconds."""
        ...


class Events(Protocol):
    """The append-only list of a cluster's events, numbered from 1 without gaps."""

    def append(self, t_s: float, *events: Event) -> list[Record]:
        """Adds the events, all or none. Raises StateError."""
        ...

    def append_if(self, t_s: float, expected_seq: int, *events: Event) -> list[Record] | None:
        """Adds them only while nothing was added after `expected_seq`; None when somebody was faster."""
        ...

    def read(self, after_seq: int = 0) -> list[Record]:
        """Events after that number, in order. Raises StateError."""
        ...


class GpuReader(Protocol):
    """Reads every GPU of this node. A broken device yields a sample that says so; it never raises for one device."""

    def read(self, now_s: float) -> Sequence[GpuSample]: ...

    def relieve(self) -> bool:
        """Asked from another thread, a few times a second: whether `read` hangs. Then it is given up and raises
        `lanes.Relieved` whenever it returns; the next `read`, in a new thread, leaves the device that hangs alone.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RayNode:
    """A live Ray node. Labels carry cluster, group, replica and index as `areal-sky/<key>`.

    `available_*` is what Ray would still give away: the total less all placement groups, actors and tasks, foreign
    ones included.
    """

    node_id: str
    labels: dict[str, str]
    shape: NodeShape
    available_gpus: float
    available_cpus: float
    available_memory_gib: float
    draining: bool


class GangPhase(StrEnum):
    PENDING = "PENDING"
    READY = "READY"
    GONE = "GONE"


@dataclass(frozen=True, slots=True)
class RankExit:
    """How one rank ended. `code` is None when its node or its runner died under it.

    `lost` says what, or with a code what else is known of the end (the kernel killed it for want of memory, say).
    """

    rank: int
    code: int | None
    lost: str = ""


@dataclass(frozen=True, slots=True)
class RankStart:
    """One process to start: `command` by /bin/sh in a fresh directory, `envs` added to the runner's own."""

    rank: int
    command: str
    payload: str | None
    envs: dict[str, str]
    kind: str = ""  # the task's, for whoever watches the node
    gpus: float = 0.0  # all that it has, lent ones included
    lent: tuple[str, ...] = ()  # ids of GPUs that Ray counts as another task's


class RayCluster(Protocol):
    """Our Ray cluster, as the scheduler needs it. Gangs and runners outlive the process that made them."""

    def nodes(self) -> tuple[RayNode, ...]: ...

    def foreign(self) -> Foreign:
        """What placement groups and actors hold that are not ours, and whose they are."""
        ...

    def gangs(self) -> tuple[str, ...]:
        """Names of all gangs that hold a placement group in Ray, whoever made them."""
        ...

    def reserve(self, gang_id: str, bundles: Sequence[Bundle], node_ids: Sequence[str], apart: bool = False) -> None:
        """Ask Ray for the resources of a gang: each bundle on its node, all or none. Idempotent by `gang_id`.

        `apart`: the resources of single ranks can be given back later (`release_ranks`).
        """
        ...

    def gang_phase(self, gang_id: str) -> GangPhase: ...

    def start(self, gang_id: str, bundles: Sequence[Bundle], ranks: Sequence[RankStart]) -> None:
        """Start one runner per rank in the gang's bundles. Idempotent: a runner that exists is left as it is."""
        ...

    def starts(self) -> tuple[tuple[str, int, tuple[str, ...]], ...]:
        """(gang_id, rank, ids of its GPUs) of ranks whose process has started since the last call, or was adopted.

        Never blocks. A rank that could not start comes up in `exits` instead.
        """
        ...

    def adopt(self, gang_id: str, ranks: int) -> bool:
        """Find the runners of a gang again after a restart of this service; False when any of them is gone."""
        ...

    def exits(self) -> tuple[tuple[str, RankExit], ...]:
        """(gang_id, exit) of ranks that ended since the last call. Never blocks."""
        ...

    def kill(self, gang_id: str, grace_s: float, ranks: Collection[int] | None = None) -> None:
        """SIGTERM the gang's processes (None: of all ranks), SIGKILL after `grace_s`. Does not wait."""
        ...

    def release(self, gang_id: str) -> None:
        """Remove the gang's runners and placement group. Unknown names are no error."""
        ...

    def release_ranks(self, gang_id: str, ranks: Collection[int]) -> None:
        """The same for some ranks of a gang that was reserved `apart`; the others run on."""
        ...

    def drain(self, node_id: str, reason: str, deadline_s: float) -> None: ...


class HeadPort(Protocol):
    """The cluster's head as the controller needs it. Never blocks."""

    def view(self) -> HeadView | None:
        """The latest look at the head, or None while it does not answer."""
        ...

    def drain(self, replica: str, reason: str, deadline_s: float) -> None:
        """Let the replica take no new work. Repeating it is harmless."""
        ...
