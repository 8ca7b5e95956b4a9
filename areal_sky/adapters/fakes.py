"""Shipped doubles of the ports: a clock that stands still, events in memory, a cloud and a head without machines.

The controller runs on them unchanged, in tests, benchmarks and simulations. Faults are set from outside
(`refuse`, `vanish`, `silent`); every call is kept in `calls` for tests to look at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from areal_sky.adapters.ports import LaunchRequest
from areal_sky.core.events import Event, Record
from areal_sky.core.model import GangDemand, GroupPlan, Machine, MachineState, NodeView
from areal_sky.core.telemetry import Validity
from areal_sky.core.view import HeadView, ReplicaLoad
from areal_sky.errors import NoCapacity, Unreachable


@dataclass(slots=True)
class FakeClock:
    """Shows `now_s` until somebody moves it."""

    now_s: float = 1_700_000_000.0

    def now(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> float:
        self.now_s += seconds
        return self.now_s


class MemoryEvents:
    """`ports.Events` that no disk holds."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def append(self, t_s: float, *events: Event) -> list[Record]:
        added = [Record(len(self.records) + i, t_s, event) for i, event in enumerate(events, 1)]
        self.records += added
        return added

    def append_if(self, t_s: float, expected_seq: int, *events: Event) -> list[Record] | None:
        return self.append(t_s, *events) if len(self.records) == expected_seq else None

    def read(self, after_seq: int = 0) -> list[Record]:
        return self.records[after_seq:]


@dataclass(slots=True)
class FakeCloud:
    """`ports.Cloud` whose machines need `boot_s` to come up and `stop_s` to go away."""

    clock: FakeClock
    boot_s: float = 0.0
    stop_s: float = 0.0
    refuse: str = ""  # a reason: every launch raises NoCapacity with it
    silent: str = ""  # a reason: nothing is known of the machines
    calls: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    _launched: dict[str, tuple[float, GroupPlan]] = field(default_factory=dict[str, tuple[float, GroupPlan]])
    _ending: dict[str, float] = field(default_factory=dict[str, float])

    def launch(self, request: LaunchRequest) -> str:
        self.calls.append(("launch", request.replica))
        if self.refuse:
            raise NoCapacity(self.refuse)
        self._launched.setdefault(request.replica, (self.clock.now_s, request.plan))
        return f"fake-{request.replica}"

    def machines(self) -> tuple[Machine, ...]:
        if self.silent:
            raise Unreachable(self.silent)
        return self._machines()

    def _machines(self) -> tuple[Machine, ...]:
        now_s = self.clock.now_s
        for replica in [r for r, end_s in self._ending.items() if now_s - end_s >= self.stop_s]:
            self.vanish(replica)
        return tuple(
            Machine(replica, self._state(replica, since_s, now_s), plan.nodes_per_replica)
            for replica, (since_s, plan) in self._launched.items()
        )

    def terminate(self, replica: str) -> None:
        self.calls.append(("terminate", replica))
        if replica in self._launched:
            self._ending.setdefault(replica, self.clock.now_s)

    def doubt(self, replica: str) -> None:
        self.calls.append(("doubt", replica))

    def vanish(self, replica: str) -> None:
        """The machine is gone without anybody having asked: a reclaim, a power cut."""
        self._launched.pop(replica, None)
        self._ending.pop(replica, None)

    def up(self) -> dict[str, GroupPlan]:
        """The replicas that are up now, with their plan."""
        up = {m.replica for m in self._machines() if m.state is MachineState.UP}
        return {replica: plan for replica, (_, plan) in self._launched.items() if replica in up}

    def _state(self, replica: str, since_s: float, now_s: float) -> MachineState:
        if replica in self._ending:
            return MachineState.STOPPING
        return MachineState.UP if now_s - since_s >= self.boot_s else MachineState.STARTING


@dataclass(slots=True)
class FakeHead:
    """`ports.HeadPort` that sees every machine of a FakeCloud as live Ray nodes the moment it is up.

    `running` counts tasks per replica, `utilization` gives its GPU load (unknown where it says nothing), `demand`
    is what waits. A replica without tasks is idle since the head first saw it so.
    """

    cloud: FakeCloud
    silent: bool = False
    demand: tuple[GangDemand, ...] = ()
    running: dict[str, int] = field(default_factory=dict[str, int])
    utilization: Mapping[str, float] = field(default_factory=dict[str, float])
    draining: set[str] = field(default_factory=set[str])
    calls: list[tuple[str, str, float]] = field(default_factory=list[tuple[str, str, float]])
    _idle_since_s: dict[str, float] = field(default_factory=dict[str, float])

    def view(self) -> HeadView | None:
        now_s = self.cloud.clock.now_s
        up = self.cloud.up()
        if self.silent or not any(plan.name == "head" for plan in up.values()):
            return None
        for replica in up:
            if self.running.get(replica, 0):
                self._idle_since_s.pop(replica, None)
            else:
                self._idle_since_s.setdefault(replica, now_s)
        workers = {r: plan for r, plan in up.items() if plan.name != "head"}
        return HeadView(
            t_s=now_s,
            nodes=tuple(n for r, plan in workers.items() for n in self._nodes(r, plan)),
            loads=tuple(self._load(r, plan) for r, plan in workers.items()),
            demand=self.demand,
            running_tasks=sum(self.running.values()),
            waiting_tasks=len(self.demand),
        )

    def drain(self, replica: str, reason: str, deadline_s: float) -> None:
        self.calls.append((replica, reason, deadline_s))
        self.draining.add(replica)

    def _nodes(self, replica: str, plan: GroupPlan) -> list[NodeView]:
        busy = self.running.get(replica, 0) > 0
        return [
            NodeView(
                node_id=f"{replica}/{index}", group=plan.name, replica=replica, index=index, shape=plan.shape,
                free_gpus=0.0 if busy else plan.shape.gpus, free_cpus=plan.shape.cpus,
                free_memory_gib=plan.shape.memory_gib, draining=replica in self.draining,
                idle_since_s=self._idle_since_s.get(replica),
            )
            for index in range(plan.nodes_per_replica)
        ]  # fmt: skip

    def _load(self, replica: str, plan: GroupPlan) -> ReplicaLoad:
        known = replica in self.utilization
        return ReplicaLoad(
            replica=replica, group=plan.name, nodes_alive=plan.nodes_per_replica,
            running_tasks=self.running.get(replica, 0), utilization_mean=self.utilization.get(replica),
            validity=Validity.KNOWN if known else Validity.UNKNOWN, age_s=0.0 if known else None,
            idle_since_s=self._idle_since_s.get(replica), draining=replica in self.draining,
        )  # fmt: skip
