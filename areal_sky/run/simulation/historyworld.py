"""A small virtual cluster whose every part can fail: the world of random histories (run/simulation/histories.py).

The controller, the task service, the event store and the journal are the real ones; machines, Ray and the clock are
the shipped fakes. Each process lives in one object here, dies by `Crash` and comes back as a new one from disk. What
lasts (machines, Ray's gangs, files) is in the fakes. Every call between two parts goes over a `Wire`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_sky.adapters.fake_ray import Crash, FakeRayCluster
from areal_sky.adapters.fakes import FakeClock, FakeCloud
from areal_sky.adapters.fakewire import Fault, Faults, Wire
from areal_sky.adapters.ports import LaunchRequest
from areal_sky.adapters.store import EventStore
from areal_sky.core.events import ClusterCreated, Event, GroupDesired, Record
from areal_sky.core.model import HEAD_GROUP, GroupPlan, LaunchPlan, Machine, MachineState, NodeShape, Offer
from areal_sky.core.nodeenv import GroupShape, HeadEnv
from areal_sky.core.reconcile import Patience
from areal_sky.core.taskmodel import TaskSpec
from areal_sky.core.telemetry import Validity
from areal_sky.core.view import HeadView
from areal_sky.errors import ArealSkyError, InvalidInput, Refused, StateError, Unreachable
from areal_sky.run.controller import Controller, first_wishes
from areal_sky.run.journal import Journal
from areal_sky.run.plugins import scaling_policy
from areal_sky.run.tasks import TaskService
from areal_sky.spec.cluster import ClusterSpec, NodeGroupSpec, ResourcesSpec, ScalingSpec

GPU4 = NodeShape(gpus=4, cpus=16, memory_gib=64, accelerator="H100")
ELASTIC, MOST = "rollout", 3
PATIENCE = Patience(vanish_s=10, join_s=60, lost_s=5, drain_s=30, backoff_s=2, backoff_max_s=20)

_CALL = (Fault.LOST, Fault.UNANSWERED, Fault.TWICE, Fault.CRASH_BEFORE, Fault.CRASH_AFTER)
_READ = (Fault.LOST, Fault.REPEATED, Fault.CRASH_BEFORE, Fault.CRASH_AFTER)
_ONCE = (Fault.LOST, Fault.CRASH_BEFORE, Fault.CRASH_AFTER)  # what is told once only, and what is written to disk
CLOUD = {"launch": _CALL, "terminate": _CALL, "machines": _READ}
RAY = {
    "nodes": _READ, "gangs": _ONCE, "adopt": _ONCE, "starts": _ONCE, "exits": _ONCE, "gang_phase": _ONCE,
    "reserve": _CALL, "start": _CALL, "kill": _CALL, "release": _CALL, "release_ranks": _CALL,
}  # fmt: skip
HEAD = {"view": (Fault.LOST, Fault.REPEATED), "drain": (Fault.LOST, Fault.UNANSWERED, Fault.TWICE)}
CLIENT = {"submit": (Fault.LOST, Fault.UNANSWERED, Fault.TWICE), "cancel": (Fault.LOST, Fault.UNANSWERED, Fault.TWICE)}
WIRES = {"cloud": CLOUD, "ray": RAY, "head": HEAD, "client": CLIENT,
         "store": {"append": _ONCE, "append_if": _ONCE}, "journal": {"append": _ONCE}}  # fmt: skip


class World:
    """`beat` lets time pass and every process do one round. Faults and events are made by whoever holds the world."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.clock = FakeClock(1000.0)
        self.faults = Faults()
        self.cloud = _Cloud(self.clock, boot_s=2.0, stop_s=1.0)
        self.ray = FakeRayCluster()
        self.head_cut = False
        self.head_down_beats = 0
        self.head_disk = 0  # a head's disk goes with its machine
        self.joined: dict[str, list[str]] = {}  # Ray nodes of each machine
        self.codes: dict[tuple[str, int], int | None] = {}  # how ranks really ended
        self.asked: dict[str, TaskSpec] = {}  # submits that have no answer yet
        self.answered: dict[str, str] = {}  # submit key -> task id
        self.refused: set[str] = set()
        self.evicting: set[str] = set()
        self.spec, self.plan = small_cluster()
        self.store = _Store(folder / "events.db", durable=False)
        self.store.append(self.clock.now(), ClusterCreated("c"), *first_wishes(self.plan))
        self.service: TaskService | None = None
        self._journal: Journal | None = None
        self.controller = self._new_controller()

    def close(self) -> None:
        self.store.close()
        self._end_service()

    def beat(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self._join()
        self._tick_service()
        self._tick_controller()
        self._tick_service()
        for key, spec in list(self.asked.items()):
            self.submit(spec, key)

    # ---------------------------------------------------------------- what people and the cloud do

    def submit(self, spec: TaskSpec, key: str) -> None:
        """Asks until there is an answer."""
        self.asked[key] = spec
        try:
            self.answered[key] = Wire(_Asked(self), "client", self.faults, CLIENT).submit(spec)["task_id"]
        except (Refused, InvalidInput):
            self.refused.add(key)
        except ArealSkyError:
            return
        del self.asked[key]

    def ask(self, call: Callable[[TaskService], Any]) -> Any:
        """A call to the task service from outside. Raises Unreachable where the service dies or is not there."""
        if self.service is None:
            raise Unreachable("no head")
        try:
            return call(self.service)
        except Crash:
            self._end_service()
            raise Unreachable("the head died") from None

    def finish(self, gang_id: str, rank: int, code: int | None) -> None:
        """A process ends by itself; None: it is lost."""
        self.codes[gang_id, rank] = code
        if code is None:
            self.ray.lose(gang_id, rank)
        else:
            self.ray.finish(gang_id, rank, code)

    def reclaim(self, replica: str) -> None:
        """The machines of a replica are gone at once; with the head's go its disk and its Ray cluster."""
        self.cloud.taken[replica] += replica in self.cloud.existing
        self.cloud.vanish(replica)
        if self.plan.head.name in replica:
            self._lose_head()

    def kill_head(self, beats: int) -> None:
        """`kill -9` of the head's process; it is started again after so many beats."""
        self._end_service()
        self.head_down_beats = beats

    def kill_controller(self) -> None:
        self.controller = self._new_controller()

    def wish(self, size: int, by_surprise: bool) -> None:
        """A person sizes the elastic group; by surprise: between the controller's look and its next record."""
        wish = GroupDesired(ELASTIC, size, "by hand", "user")
        if by_surprise:
            self.store.interloper = wish
        else:
            self.store.append(self.clock.now(), wish)

    def heal(self) -> None:
        """Nothing fails from now on."""
        self.faults.armed.clear()
        self.cloud.silent = self.cloud.refuse = self.ray.unreachable = ""
        self.cloud.failing.clear()
        self.ray.crash_after = None
        self.ray.slow_exit = self.ray.slow_start = self.head_cut = False
        self.head_down_beats = 0

    # ---------------------------------------------------------------- how

    def _new_controller(self) -> Controller:
        store = Wire(self.store, "store", self.faults, WIRES["store"], StateError)
        return Controller(
            self.spec, self.plan, store, Wire(self.cloud, "cloud", self.faults, CLOUD), _HeadLink(self), self.clock,  # type: ignore[arg-type]
            scaling_policy(self.spec.scaling), PATIENCE,
        )  # fmt: skip

    def _tick_controller(self) -> None:
        try:
            self.controller.tick()
        except Crash:
            self.controller = self._new_controller()
        except StateError:
            pass  # the loop of run/supervise.py tries again

    def _tick_service(self) -> None:
        if self.service is None and self._head_is_up():
            if self.head_down_beats > 0:
                self.head_down_beats -= 1
                return
            self._journal = Journal(self.folder / f"head{self.head_disk}" / "journal.db", durable=False)
            self.service = TaskService(
                Wire(self.ray.connection(), "ray", self.faults, RAY),  # type: ignore[arg-type]
                Wire(self._journal, "journal", self.faults, WIRES["journal"], StateError),  # type: ignore[arg-type]
                self.clock, head_env(self.plan, self.folder), _Hub(self), jitter=lambda: 1.0,  # type: ignore[arg-type]
                min_runtime_s=2.0,
            )  # fmt: skip
        if self.service is not None:
            try:
                self.service.tick(self.clock.now())
            except Crash:
                self._end_service()
            except ArealSkyError:
                pass  # the loop of run/head.py tries again

    def _end_service(self) -> None:
        self.service = None
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _head_is_up(self) -> bool:
        return any(plan.name == HEAD_GROUP for plan in self.cloud.up().values())

    def _lose_head(self) -> None:
        self._end_service()
        self.head_disk += 1
        self.ray.all_gangs.clear()
        for node in list(self.ray.live):
            self.ray.kill_node(node)
        self.answered.clear()

    def _join(self) -> None:
        """Machines that are up join Ray once; those that are gone leave it."""
        if self._head_is_up():
            for name, plan in self.cloud.up().items():
                if plan.name != HEAD_GROUP and name not in self.joined:
                    self.joined[name] = [
                        self.ray.add_node(plan.name, name, plan.shape, i, f"{name}/{i}#{self.cloud.born[name]}")
                        for i in range(plan.nodes_per_replica)
                    ]
        elif self.service is not None:
            self._lose_head()  # the controller has ended it
        for name in [n for n in self.joined if n not in self.cloud.existing]:
            for node in self.joined.pop(name):
                if node in self.ray.live:
                    self.ray.kill_node(node)


@dataclass
class _Cloud(FakeCloud):
    """Machines whose start can fail. Counted per replica: `born`, how often made for it; `taken`, taken back."""

    failing: set[str] = field(default_factory=set[str])
    born: Counter[str] = field(default_factory=Counter[str])
    taken: Counter[str] = field(default_factory=Counter[str])

    @property
    def existing(self) -> Mapping[str, Any]:
        return self._launched

    def launch(self, request: LaunchRequest) -> str:
        before = request.replica in self._launched
        request_id = super().launch(request)
        self.born[request.replica] += not before
        return request_id

    def vanish(self, replica: str) -> None:
        super().vanish(replica)
        self.failing.discard(replica)

    def _machines(self) -> tuple[Machine, ...]:
        return tuple(
            Machine(m.replica, MachineState.FAILED, 0, "no capacity", no_capacity=True)
            if m.replica in self.failing and m.state is not MachineState.STOPPING else m
            for m in super()._machines()
        )  # fmt: skip


class _Store(EventStore):
    """Between the controller's look and its record somebody else may write `interloper`, once."""

    interloper: Event | None = None

    def append_if(self, t_s: float, expected_seq: int, *events: Event) -> list[Record] | None:
        if self.interloper is not None:
            self.append(t_s, self.interloper)
            self.interloper = None
        return super().append_if(t_s, expected_seq, *events)


class _HeadLink:
    """`ports.HeadPort` without the thread: what run/headlink.py does."""

    def __init__(self, world: World):
        self._world = world
        self._wire = Wire(_Asked(world), "head", world.faults, HEAD)

    def view(self) -> HeadView | None:
        try:
            return None if self._world.head_cut else self._wire.view()
        except ArealSkyError:
            return None

    def drain(self, replica: str, reason: str, deadline_s: float) -> None:
        try:
            if not self._world.head_cut:
                self._wire.drain(replica, reason, deadline_s)
        except ArealSkyError:
            pass  # asked again while the replica drains


class _Asked:
    """The gateway: what the task service answers over HTTP."""

    def __init__(self, world: World):
        self._world = world

    def view(self) -> HeadView:
        return self._world.ask(lambda s: s.view())

    def drain(self, replica: str, reason: str, deadline_s: float) -> int:
        return self._world.ask(lambda s: s.drain_replica(replica, reason, deadline_s))

    def submit(self, spec: TaskSpec) -> dict[str, Any]:
        return self._world.ask(lambda s: s.submit(spec))

    def cancel(self, task_id: str) -> dict[str, Any]:
        return self._world.ask(lambda s: s.cancel(task_id))


class _Hub:
    """GPUs are busy where something runs."""

    def __init__(self, world: World):
        self._world = world

    def replica_loads(self, now_s: float) -> dict[str, tuple[float | None, Validity, float | None]]:
        ray = self._world.ray
        busy = {ray.all_gangs[g].node_ids[rank] for g, rank in ray.running()}
        return {
            name: (0.9 if busy & set(nodes) else 0.0, Validity.KNOWN, 0.0) for name, nodes in self._world.joined.items()
        }

    def peak_memory_gib(self, task_id: str, since_s: float) -> float | None:
        return None


def small_cluster() -> tuple[ClusterSpec, LaunchPlan]:
    """A head, a fixed group of two nodes, and an elastic one of at most `MOST` nodes, the first of them on demand."""
    regular = Offer("aws", "us-east-1", None, "gpu4", GPU4, "on_demand", 12.0, "made up")
    spot = Offer("aws", "us-east-1", None, "gpu4", GPU4, "spot", 4.0, "made up")
    groups = (
        GroupPlan("trainer", False, 1, 1, 2, "on_demand", 0, GPU4, regular, regular),
        GroupPlan(ELASTIC, True, 0, MOST, 1, "mixed", 1, GPU4, regular, regular, spot),
    )
    head = GroupPlan(HEAD_GROUP, False, 1, 1, 1, "on_demand", 0, NodeShape(cpus=4), regular, regular)
    made = tuple(
        NodeGroupSpec(name=g.name, resources=ResourcesSpec(), elastic=g.elastic, min_replicas=g.min_replicas,
                      max_replicas=g.max_replicas, nodes_per_replica=g.nodes_per_replica, market=g.market)
        for g in groups
    )  # fmt: skip
    scaling = ScalingSpec(cooldown_s=2.0, idle_s=20.0)
    return ClusterSpec(name="c", infra=None, head=ResourcesSpec(), groups=made, scaling=scaling), LaunchPlan(
        "c", None, head, groups
    )


def head_env(plan: LaunchPlan, folder: Path) -> HeadEnv:
    shapes = (GroupShape(g.name, g.shape, g.nodes_per_replica, g.min_replicas, g.max_replicas) for g in plan.groups)
    return HeadEnv("c", "c-head-0", str(folder), groups=tuple(shapes))
