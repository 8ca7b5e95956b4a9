"""A tiny world for the pure core: plans to reconcile and a cloud that does as told, some ticks later."""

from __future__ import annotations

from dataclasses import dataclass, field

from areal_sky.core import reconcile
from areal_sky.core.events import Event, GroupDesired, LaunchAccepted, Record, apply
from areal_sky.core.model import (
    HEAD_GROUP,
    ClusterState,
    GroupPlan,
    LaunchPlan,
    Machine,
    MachineState,
    NodeShape,
    NodeView,
    Offer,
    ReplicaState,
)
from areal_sky.core.telemetry import Validity
from areal_sky.core.view import HeadView, ReplicaLoad

PATIENCE = reconcile.Patience(vanish_s=5, join_s=60, lost_s=5, drain_s=20, backoff_s=2, backoff_max_s=30)
SHAPE = NodeShape(gpus=8, cpus=16, memory_gib=64, accelerator="V100")


def offer(market: str = "on_demand", price: float | None = 10.0) -> Offer:
    return Offer("aws", "us-east-1", None, "p3.16xlarge", SHAPE, market, price, "test")  # type: ignore[arg-type]


def group(
    name: str, low: int = 1, high: int = 3, nodes: int = 1, market: str = "on_demand", base: int = 0
) -> GroupPlan:
    on_demand, spot = offer(), offer("spot", 3.0)
    return GroupPlan(
        name=name,
        elastic=high > low,
        min_replicas=low,
        max_replicas=high,
        nodes_per_replica=nodes,
        market=market,  # type: ignore[arg-type]
        on_demand_base=base,
        shape=SHAPE,
        offer=spot if market == "spot" else on_demand,
        on_demand_offer=on_demand,
        spot_offer=spot,
    )


def plan(*groups: GroupPlan) -> LaunchPlan:
    head = group(HEAD_GROUP, 1, 1)
    return LaunchPlan("c", "local", head, groups or (group("rollout"),))


@dataclass
class World:
    """State, events and a cloud. `tick()` is the controller's loop without its shell."""

    plan: LaunchPlan
    now_s: float = 0.0
    state: ClusterState = field(default_factory=ClusterState)
    records: list[Record] = field(default_factory=list)
    machines: dict[str, Machine] = field(default_factory=dict)
    refuse: set[str] = field(default_factory=set)  # replicas whose machines never join Ray
    running: dict[str, int] = field(default_factory=dict)
    drained: set[str] = field(default_factory=set)
    launches: list[str] = field(default_factory=list)
    missing: dict[str, float] = field(default_factory=dict)

    def record(self, *events: Event) -> None:
        for event in events:
            record = Record(self.state.version + 1, self.now_s, event)
            self.records.append(record)
            self.state = apply(self.state, record)

    def want(self, name: str, desired: int, by: str = "user") -> None:
        self.record(GroupDesired(name, desired, "test", by))

    def view(self) -> HeadView | None:
        head = next((r for r in self.state.replicas.values() if r.group == HEAD_GROUP), None)
        if head is None or head.name not in self.machines:
            return None
        known = {r.name: r for r in self.state.replicas.values() if r.group != HEAD_GROUP}
        joined = [r for n, r in known.items() if n in self.machines and n not in self.refuse]
        return HeadView(
            t_s=self.now_s,
            nodes=tuple(
                NodeView(f"{r.name}.{i}", r.group, r.name, i, SHAPE, 8, 16, 64)
                for r in joined
                for i in range(self.machines[r.name].nodes_up)
            ),
            loads=tuple(
                ReplicaLoad(
                    r.name, r.group, r.nodes, self.running.get(r.name, 0), None, Validity.UNKNOWN, None, None,
                    draining=r.name in self.drained,
                )
                for r in joined
            ),
            demand=(),
            running_tasks=0,
            waiting_tasks=0,
        )  # fmt: skip

    def tick(self, dt_s: float = 1.0) -> list[Event]:
        """Returns the events of this tick."""
        before = len(self.records)
        self.now_s += dt_s
        view = self.view()
        self.missing = reconcile.track_missing(self.missing, self.state, view, self.now_s)
        seen = reconcile.Observation(dict(self.machines), view, self.missing)
        self.record(*reconcile.observe(self.state, seen, self.now_s, PATIENCE))
        self.record(*reconcile.decide(self.state, self.plan, seen, self.now_s, PATIENCE))
        for action in reconcile.todo(self.state):
            self.carry_out(action)
        return [r.event for r in self.records[before:]]

    def carry_out(self, action: reconcile.Action) -> None:
        match action:
            case reconcile.Launch(name):
                self.launches.append(name)
                nodes = self.state.replicas[name].nodes
                self.machines[name] = Machine(name, MachineState.UP, nodes)
                self.record(LaunchAccepted(name, "r"))
            case reconcile.Drain(name):
                self.drained.add(name)
            case reconcile.Terminate(name):
                self.machines.pop(name, None)
                self.drained.discard(name)

    def settle(self, ticks: int = 60) -> None:
        for _ in range(ticks):
            self.tick()

    def ready(self, name: str) -> list[str]:
        return [r.name for r in self.state.replicas.values() if r.group == name and r.state is ReplicaState.READY]
