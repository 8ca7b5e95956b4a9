"""What the head knows of its live nodes: their room, who drains, since when each is idle."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from areal_sky.adapters.ports import RayNode
from areal_sky.core.model import Bundle, NodeView
from areal_sky.core.nodeenv import GroupShape
from areal_sky.core.placement import EPS, Held, NodeRoom, empty_room, foreign_use, room_of
from areal_sky.core.taskevents import Draining, NodeAvoided, NodeFact
from areal_sky.core.tasklife import TaskRecord
from areal_sky.core.taskmodel import TaskState
from areal_sky.core.telemetry import Validity
from areal_sky.core.tenancy import NOTHING, Foreign, Settled, make_good, settle, total
from areal_sky.core.view import ReplicaLoad


class LoadSource(Protocol):
    """The telemetry hub, as far as the task service needs it."""

    def replica_loads(self, now_s: float) -> Mapping[str, tuple[float | None, Validity, float | None]]: ...

    def peak_memory_gib(self, task_id: str, since_s: float) -> float | None: ...


class NodeBook:
    """Filled by `observe` once per tick; everything else reads the latest look."""

    def __init__(self, groups: Sequence[GroupShape]):
        self._accelerators = {g.name: g.shape.accelerator for g in groups}
        self._nodes: dict[str, RayNode] = {}
        self._drains: dict[str, Draining] = {}
        self._avoided: dict[str, NodeAvoided] = {}
        self._held: dict[str, list[Held]] = {}
        self._tasks_on: dict[str, set[str]] = {}
        self._foreign = Foreign()
        self._claims: dict[str, dict[str, Bundle]] = {}  # of each driver's gang by node
        self._settled = Settled({}, {})
        self._idle_since_s: dict[str, float] = {}
        self.seen_s: float | None = None  # when Ray was looked at last

    def observe(self, nodes: Iterable[RayNode], now_s: float, foreign: Foreign | None = None) -> None:
        """A new look at the live nodes. A node that is gone takes its drain with it: its successor starts fresh.

        `foreign`: whose the use is that is not ours; needed while drivers run.
        """
        self._foreign = foreign or Foreign()
        self._nodes = {n.node_id: self._with_accelerator(n) for n in nodes}
        self._drains = {i: d for i, d in self._drains.items() if i in self._nodes}
        self._avoided = {i: a for i, a in self._avoided.items() if i in self._nodes}
        self._idle_since_s = {i: t for i, t in self._idle_since_s.items() if i in self._nodes}
        self.seen_s = now_s
        self._mark_idle(now_s)

    def hold(self, records: Iterable[TaskRecord], reserved: set[str], now_s: float) -> None:
        """Takes in what our tasks hold. `reserved`: gangs that Ray counts already."""
        self._held, self._tasks_on, self._claims = {}, {}, {}
        for r in records:
            for place in r.claim if r.holds else ():
                claim = self._claims.setdefault(r.gang_id, {})
                claim[place.node_id] = total((claim.get(place.node_id, NOTHING), Bundle(1.0, 0.0, 0.0)))
                self._tasks_on.setdefault(place.node_id, set()).add(r.task_id)
            for place in r.held if r.holds else ():
                known = r.state is TaskState.RUNNING or r.gang_id in reserved
                self._held.setdefault(place.node_id, []).append(Held(r.bundle, place.devices, known, bool(r.claim)))
                self._tasks_on.setdefault(place.node_id, set()).add(r.task_id)
        seen = {i: self._others_on(n) for i, n in self._nodes.items()} if self._claims else {}
        found = settle(self._claims, self._foreign, seen)
        free = {
            i: self._nodes[i].shape.gpus - found.gone(i).gpus - sum(h.bundle.gpus for h in self._held.get(i, ()))
            for i in seen
        }
        self._settled = make_good(found, free)
        self._mark_idle(now_s)

    def note(self, fact: NodeFact) -> None:
        """What was decided about nodes: they drain, or are avoided for a time."""
        if isinstance(fact, NodeAvoided):
            self._avoided[fact.node_id] = fact
            return
        for node_id in fact.node_ids:
            self._drains[node_id] = fact

    def avoided(self, now_s: float) -> list[NodeAvoided]:
        """The live nodes that are avoided now."""
        return [a for a in self._avoided.values() if now_s < a.until_s]

    def avoided_in_group_of(self, node_id: str, now_s: float) -> tuple[int, int]:
        """(avoided nodes, live nodes) of the node's group."""
        node = self._nodes.get(node_id)
        group = node.labels.get("group") if node is not None else None
        members = {i for i, n in self._nodes.items() if n.labels.get("group") == group}
        return sum(a.node_id in members for a in self.avoided(now_s)), len(members)

    def accelerator_of(self, node_id: str) -> str | None:
        node = self._nodes.get(node_id)
        return None if node is None else node.shape.accelerator

    def takes_work(self, node_id: str, now_s: float) -> bool:
        """Whether tasks may be placed on the node: it neither drains nor is avoided."""
        avoided = self._avoided.get(node_id)
        return not self.is_draining(node_id) and (avoided is None or now_s >= avoided.until_s)

    def drain_of(self, node_id: str) -> Draining | None:
        return self._drains.get(node_id)

    def is_draining(self, node_id: str) -> bool:
        node = self._nodes.get(node_id)
        return node_id in self._drains or (node is not None and node.draining)

    def __contains__(self, node_id: str) -> bool:
        return node_id in self._nodes

    def dead_among(self, record: TaskRecord) -> set[str]:
        """The task's nodes that no longer live."""
        return {p.node_id for p in record.held if p.node_id not in self._nodes}

    def node_ids_of(self, replica: str) -> tuple[str, ...]:
        return tuple(sorted(i for i, n in self._nodes.items() if n.labels.get("replica") == replica))

    def node_size(self, node_id: str) -> tuple[float, float]:
        """(GPUs, CPUs) of a live node, all of it."""
        shape = self._nodes[node_id].shape
        return shape.gpus, shape.cpus

    def place_labels(self, node_id: str) -> tuple[str, int]:
        """(replica, index) of a live node."""
        labels = self._nodes[node_id].labels
        return labels.get("replica", "?"), _index(labels)

    def whole_with_foreign(self, now_s: float) -> Iterator[tuple[NodeRoom, Bundle]]:
        """Every node that takes new work: all of it, and what others than us use of it.

        What drivers hold by themselves counts as long as it is beyond their claims, which the engine holds already. Of
        a claim that a driver has taken up elsewhere the node gets its GPUs back: as GPUs more, for as long as anything
        of ours was placed on these.
        """
        for i, n in self._nodes.items():
            if not self.takes_work(i, now_s):
                continue
            room, others = self._whole(n), self._others_on(n)
            back = self._extra_gpus(n)
            if self._claims:
                gone = self._settled.gone(i)
                beyond = gone.gpus - sum(c[i].gpus for c in self._claims.values() if i in c)
                back = max(back, math.ceil(-beyond - EPS))
                own = total(h.bundle for h in self._held.get(i, ()) if h.driver)
                others = Bundle(beyond, gone.cpus + own.cpus, gone.memory_gib + own.memory_gib)
            if back:
                room = replace(room, gpus=room.gpus + (1.0,) * back)
                others = replace(others, gpus=others.gpus + back)
            yield room, others

    def whole_rooms(self) -> list[NodeRoom]:
        """Every live node, empty: what a task may be promised beyond the spec's groups."""
        return [self._whole(n) for n in self._nodes.values()]

    def node_views(self) -> tuple[NodeView, ...]:
        views: list[NodeView] = []
        for i, n in self._nodes.items():
            room = self._room(n)
            views.append(
                NodeView(
                    i, n.labels["group"], n.labels.get("replica", ""), _index(n.labels), n.shape, room.free_gpus,
                    room.cpus, room.memory_gib, self.is_draining(i), self._idle_since_s.get(i),
                )
            )  # fmt: skip
        return tuple(sorted(views, key=lambda v: (v.group, v.replica, v.index, v.node_id)))

    def loads(self, hub: LoadSource | None, now_s: float) -> tuple[ReplicaLoad, ...]:
        """One per replica with live nodes; GPU load from the hub, unknown where it says nothing."""
        readings = hub.replica_loads(now_s) if hub is not None else {}
        replicas: dict[str, list[NodeView]] = {}
        for v in self.node_views():
            replicas.setdefault(v.replica, []).append(v)
        loads: list[ReplicaLoad] = []
        for name, nodes in replicas.items():
            mean, validity, age_s = readings.get(name, (None, Validity.UNKNOWN, None))
            tasks = set[str]().union(*(self._tasks_on.get(n.node_id, set()) for n in nodes))
            idle = [n.idle_since_s for n in nodes]
            idle_since_s = None if None in idle else max(t for t in idle if t is not None)
            draining = all(n.draining for n in nodes)
            loads.append(
                ReplicaLoad(name, nodes[0].group, len(nodes), len(tasks), mean, validity, age_s, idle_since_s, draining)
            )
        return tuple(loads)

    def _whole(self, n: RayNode) -> NodeRoom:
        return empty_room(n.node_id, n.labels["group"], n.shape, _name(n))

    def _extra_gpus(self, n: RayNode) -> int:
        """How many GPUs it needs more than it has for all of ours to be on some."""
        used = [i for h in self._held.get(n.node_id, ()) for i, _ in h.devices]
        return max(0, max(used, default=-1) + 1 - len(self._whole(n).gpus))

    def _others_on(self, n: RayNode) -> Bundle:
        """What is in use there and not ours, as far as Ray has noticed."""
        available = (n.available_gpus, n.available_cpus, n.available_memory_gib)
        return foreign_use(n.shape, available, self._held.get(n.node_id, ()))

    def _room(self, n: RayNode) -> NodeRoom:
        """What is free there: what drivers have not taken up yet of their claims is not."""
        left = total(c[n.node_id] for c in self._settled.left.values() if n.node_id in c)
        whole = len(self._whole(n).gpus)
        extra = sum(x for h in self._held.get(n.node_id, ()) for i, x in h.devices if i >= whole)
        available = (n.available_gpus - left.gpus - extra, n.available_cpus, n.available_memory_gib)
        held = self._held.get(n.node_id, ())
        return room_of(n.node_id, n.labels["group"], n.shape, available, held, _name(n))

    def _with_accelerator(self, n: RayNode) -> RayNode:
        if n.shape.accelerator is not None or n.shape.gpus <= 0:
            return n
        accelerator = self._accelerators.get(n.labels.get("group", ""))
        return replace(n, shape=replace(n.shape, accelerator=accelerator))

    def _mark_idle(self, now_s: float) -> None:
        for i, n in self._nodes.items():
            foreign = n.available_gpus < n.shape.gpus - EPS or n.available_cpus < n.shape.cpus - EPS
            if foreign or i in self._tasks_on:  # foreign work counts: nobody's run is shrunk away
                self._idle_since_s.pop(i, None)
            else:
                self._idle_since_s.setdefault(i, now_s)


def _name(n: RayNode) -> str:
    return f"{n.labels.get('replica', '')}/{_index(n.labels):06d}"


def _index(labels: Mapping[str, str]) -> int:
    text = labels.get("index", "0")
    return int(text) if text.isdigit() else 0
