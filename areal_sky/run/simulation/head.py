"""`ports.HeadPort` over a virtual world: what the head of a cluster would tell its controller of nodes and tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from areal_sky.adapters.fakes import FakeClock
from areal_sky.core.model import GangDemand, GroupPlan
from areal_sky.core.telemetry import Validity
from areal_sky.core.view import HeadView, NodeView, ReplicaLoad
from areal_sky.run.simulation.simtask import VirtualNode
from areal_sky.run.simulation.tasks import TaskWorld
from areal_sky.run.tasks import MAX_DEMAND

WORKING_FRAC = 0.95  # utilization that the GPUs of a running task show


@dataclass(slots=True)
class _Replica:
    plan: GroupPlan
    nodes: list[VirtualNode] = field(default_factory=list[VirtualNode])
    drain_s: float | None = None  # its deadline
    load: ReplicaLoad | None = None
    idle_since_s: float | None = None


class VirtualHead:
    """See the module. `at` calls something at a time, `idle` is called when a replica has become idle.

    `silent`: nobody can reach it. `version` changes with the nodes that the controller would see, when a draining one
    is free of tasks, and when one gets work that had been idle for `idle_s`.
    """

    def __init__(
        self,
        clock: FakeClock,
        tasks: TaskWorld,
        at: Callable[[float, Callable[[], None]], None],
        idle: Callable[[float], None],
        idle_s: float,
    ):
        self._clock = clock
        self._tasks = tasks
        self._at = at
        self._idle, self._idle_s = idle, idle_s
        self._replicas: dict[str, _Replica] = {}
        self._demand: tuple[GangDemand, ...] = ()
        self._demand_of = -1
        self.up = False
        self.silent = False
        self.unheard = 0  # calls that did not reach it
        self.version = 0
        tasks.on_node = self._changed

    # ---------------------------------------------------------------- the port

    def view(self) -> HeadView | None:
        if self.silent or not self.up:
            return None
        nodes = [n for r in self._replicas.values() for n in r.nodes]
        return HeadView(
            t_s=self._clock.now_s,
            nodes=tuple(n.view or _seen(n) for n in nodes),
            loads=tuple(r.load or _loaded(name, r) for name, r in self._replicas.items() if r.nodes),
            demand=self.demand(),
            running_tasks=self._tasks.running,
            waiting_tasks=len(self._tasks.entries) - self._tasks.running,
        )

    def drain(self, replica: str, reason: str, deadline_s: float) -> None:
        if self.silent or not self.up:
            self.unheard += 1
            return
        known = self._replicas.get(replica)
        if known is None or known.drain_s is not None:
            return
        known.drain_s, known.load = deadline_s, None
        self.version += 1
        for node in known.nodes:
            self._tasks.drain_node(node.node_id)
        self._at(deadline_s, lambda: self._overdue(replica, known))

    # ---------------------------------------------------------------- the world

    def joined(self, replica: str, plan: GroupPlan, index: int, market: str) -> None:
        """A node of the replica is a live Ray node now."""
        known = self._replicas.setdefault(replica, _Replica(plan))
        shape = plan.shape
        node = VirtualNode(
            f"{replica}/{index}", plan.name, replica, index, shape, [shape.gpus, shape.cpus, shape.memory_gib]
        )
        known.nodes.append(node)
        known.load = None
        self.version += 1
        self._tasks.add_node(node, self._clock.now_s, market)
        self._rest(known)

    def left(self, replica: str, index: int | None, reclaimed: bool) -> None:
        """A node (None: every one) of the replica is gone."""
        known = self._replicas.get(replica)
        if known is None:
            return
        going = [n for n in known.nodes if index is None or n.index == index]
        known.nodes = [n for n in known.nodes if n not in going]
        known.load = None
        self.version += 1
        for node in going:
            self._tasks.remove_node(node.node_id, self._clock.now_s, reclaimed)
        if not known.nodes:
            del self._replicas[replica]

    def noticed(self, replica: str) -> None:
        """The cloud has told the replica's nodes that it takes them back."""
        known = self._replicas.get(replica)
        for node in known.nodes if known else ():
            self._tasks.notice(node.node_id, self._clock.now_s)

    def demand(self) -> tuple[GangDemand, ...]:
        """Gangs that wait, best first."""
        if self._demand_of != self._tasks.queue_version:
            self._demand_of = self._tasks.queue_version
            now_s = self._clock.now_s
            self._demand = tuple(
                GangDemand(
                    e.task_id, e.ask.group, e.ask.count, e.ask.bundle, e.ask.accelerators,
                    self._tasks.score(e, now_s), now_s - e.submitted_s,
                )
                for e in self._tasks.waiting(MAX_DEMAND)
            )  # fmt: skip
        return self._demand

    def idle_since_s(self) -> list[float]:
        """Since when each replica that takes work has been idle, of those that are."""
        return [
            r.idle_since_s for r in self._replicas.values() if r.drain_s is None and r.idle_since_s is not None
        ]

    def gpus(self) -> dict[str, float]:
        """GPUs of live nodes: busy, idle, draining."""
        found = {"busy": 0.0, "idle": 0.0, "draining": 0.0}
        for r in self._replicas.values():
            for n in r.nodes:
                found["busy"] += n.shape.gpus - n.free[0]
                found["idle" if r.drain_s is None else "draining"] += n.free[0]
        return found

    # ---------------------------------------------------------------- how

    def _changed(self, node: VirtualNode) -> None:
        known = self._replicas.get(node.replica)
        if known is None:
            return
        known.load = None
        if node.tasks:
            since_s, known.idle_since_s = known.idle_since_s, None
            self.version += since_s is not None and self._clock.now_s - since_s >= self._idle_s
        elif not any(n.tasks for n in known.nodes):
            self._rest(known)

    def _rest(self, known: _Replica) -> None:
        """It has nothing to do from now on."""
        known.idle_since_s = self._clock.now_s
        if known.drain_s is None:
            self._idle(self._clock.now_s)
        else:
            self.version += 1

    def _overdue(self, replica: str, known: _Replica) -> None:
        """The drain's deadline: who still runs there is stopped."""
        if self._replicas.get(replica) is known:
            for node in known.nodes:
                self._tasks.evict(node, self._clock.now_s, reclaimed=False)


def _seen(n: VirtualNode) -> NodeView:
    n.view = NodeView(
        node_id=n.node_id, group=n.group, replica=n.replica, index=n.index, shape=n.shape, free_gpus=n.free[0],
        free_cpus=n.free[1], free_memory_gib=n.free[2], draining=n.draining, idle_since_s=n.idle_since_s,
    )  # fmt: skip
    return n.view


def _loaded(name: str, r: _Replica) -> ReplicaLoad:
    busy = sum(n.shape.gpus - n.free[0] for n in r.nodes)
    gpus = sum(n.shape.gpus for n in r.nodes)
    running = {task_id for n in r.nodes for task_id in n.tasks}
    r.load = ReplicaLoad(
        replica=name, group=r.plan.name, nodes_alive=len(r.nodes), running_tasks=len(running),
        utilization_mean=WORKING_FRAC * busy / gpus if gpus else None,
        validity=Validity.KNOWN if gpus else Validity.UNKNOWN, age_s=0.0 if gpus else None,
        idle_since_s=None if running else max(n.idle_since_s or 0.0 for n in r.nodes),
        draining=r.drain_s is not None,
    )  # fmt: skip
    return r.load
