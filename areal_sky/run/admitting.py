"""The admission engine (core/admission.py) as the head uses it: what the head knows in, what is to be done out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from areal_sky.core.admission import Admission, Decision, Entry, Place, Placement
from areal_sky.core.failures import suspect
from areal_sky.core.nodeenv import HeadEnv
from areal_sky.core.placement import Ask, NodeRoom, NoFit, fit
from areal_sky.core.queueing import WeightedOrder
from areal_sky.core.taskevents import Place as TaskPlace
from areal_sky.core.taskevents import Placed
from areal_sky.core.tasklife import TaskRecord
from areal_sky.core.tenancy import DriverNeed
from areal_sky.run import drivers
from areal_sky.run.nodebook import NodeBook

MIN_RUNTIME_S = 60.0  # a run that has just begun is left alone: starting costs about as much


class Admitting:
    """For the threads of one process, which share one lock outside."""

    def __init__(self, env: HeadEnv, book: NodeBook, order: WeightedOrder | None = None):
        self.order = order or WeightedOrder(env.ageing_per_hour)
        self._engine = Admission(self.order)
        self._book = book
        self._weights = dict(env.weights)
        self._model_types = dict(env.models)
        self._rooms: dict[str, NodeRoom] = {}  # what the engine was told of each node
        self._elsewhere: dict[str, TaskRecord] = {}  # waiting tasks that shall not run where they failed
        self._env = env
        self._drivers: dict[str, TaskRecord] = {}  # waiting drivers

    # ---------------------------------------------------------------- what happens

    def add(self, r: TaskRecord) -> None:
        """The task waits for room from now on, at the place that its number and first submit give it."""
        entry = self.entry(r)
        if suspect(r.failures) is not None:
            self._elsewhere[r.task_id] = r
            if others := self._others(r):
                entry = replace(entry, ask=replace(entry.ask, nodes=others))
        self._engine.submit(entry, r.served_s)
        if r.spec.backends is not None:
            self._drivers[r.task_id] = r

    def drop(self, task_id: str, now_s: float) -> None:
        """It neither waits for room nor holds any. Nothing happens when it did not."""
        self._engine.ended(task_id, now_s)
        self._elsewhere.pop(task_id, None)
        self._drivers.pop(task_id, None)

    def adopt(self, r: TaskRecord) -> None:
        """It holds its places already: it was placed by an earlier process."""
        held = r.claim or r.places
        placement = Placement(tuple(p.node_id for p in held), tuple(p.devices for p in held))
        since_s = r.placed_s if r.placed_s is not None else r.since_s
        self._hold(r, placement, since_s)

    def _hold(self, r: TaskRecord, placement: Placement, since_s: float) -> None:
        entry = self.entry(r)
        if r.spec.backends is not None:
            entry = replace(entry, ask=drivers.held_ask(r, len(placement.node_ids)))
        self._engine.adopt(entry, placement, since_s, r.served_s)

    def look(self, now_s: float) -> None:
        """The nodes as they are now, foreign work on them included."""
        known = set(self._rooms)
        fresh = {room.node_id: (room, foreign) for room, foreign in self._book.whole_with_foreign(now_s)}
        for node_id in [n for n in self._rooms if n not in fresh]:
            self._engine.drop_node(node_id)
            del self._rooms[node_id]
        for node_id, (room, foreign) in fresh.items():
            self._engine.set_node(room, foreign)
            self._rooms[node_id] = room
        if known != set(self._rooms):
            for task_id, r in list(self._elsewhere.items()):
                self._engine.withdraw(task_id)
                self.add(r)

    def decide(self, now_s: float) -> list[Decision]:
        """What is to be done now. It counts as done: `undo` what could not be recorded."""
        decisions = [self._as_driver(d, now_s) for d in self._engine.decide(now_s)]
        for task_id in [t for t in self._engine.waiting_ids if t in self._drivers] if self._drivers else ():
            r = self._drivers[task_id]
            found = drivers.over_groups(r, self._need(r), self._engine.rooms())
            if isinstance(found, Placement):
                decisions.append(self._as_driver(Place(task_id, found), now_s))
        for d in decisions:
            self._elsewhere.pop(d.task_id, None)
        return decisions

    def _as_driver(self, decision: Decision, now_s: float) -> Decision:
        """Of a driver: what it holds from now on, one GPU a bundle; of others the decision as it is."""
        r = self._drivers.pop(decision.task_id, None) if isinstance(decision, Place) else None
        if r is None or not isinstance(decision, Place):
            return decision
        placement = drivers.single_gpus(decision.placement, self._need(r).gpus)
        self._engine.ended(r.task_id, now_s)
        self._hold(r, placement, now_s)
        return Place(r.task_id, placement)

    def _need(self, r: TaskRecord) -> DriverNeed:
        need = drivers.need_of(r.spec, self._env)
        assert need is not None
        return need

    def undo(self, decisions: Iterable[Decision], waiting: Mapping[str, TaskRecord], now_s: float) -> None:
        """These were not recorded: the tasks wait on."""
        for d in decisions:
            if isinstance(d, Place) and d.task_id in waiting:
                self._engine.ended(d.task_id, now_s)
                self.add(waiting[d.task_id])

    # ---------------------------------------------------------------- what people ask

    def why(self, task_id: str) -> str:
        """Why the task waits for room; empty when it does not."""
        words = self._engine.why(task_id)
        r = self._drivers.get(task_id)
        found = drivers.over_groups(r, self._need(r), self._engine.rooms()) if r is not None else None
        return f"{words}; over all groups: {found}" if isinstance(found, NoFit) else words

    def waiting_ids(self) -> list[str]:
        """Tasks that wait for room, next first."""
        return self._engine.waiting_ids

    def standing(self, r: TaskRecord, now_s: float) -> str:
        """Its place in the queue, and every term of what gives it; empty when it does not wait for room."""
        place, waiting = self._engine.place_in_queue(r.task_id)
        if not place:
            return ""
        return f"number {place} of {waiting} in the queue: {self.order.explain(self.entry(r), r.served_s, now_s)}"

    def score(self, r: TaskRecord, now_s: float) -> float:
        """Higher goes first."""
        return self.order.score(self.entry(r), r.served_s, now_s)

    def entry(self, r: TaskRecord) -> Entry:
        """What the queue must know of the task."""
        spec = r.spec
        return Entry(
            r.task_id, r.number, self.ask(r), r.submitted_s, priority=spec.priority, weight=self.weight(r),
            kind=spec.kind, deadline_s=spec.deadline_s, estimate_s=spec.estimate_s, preemptible=spec.may_be_preempted,
            min_bundles=spec.min_bundles or 0, min_runtime_s=MIN_RUNTIME_S,
        )  # fmt: skip

    def _others(self, r: TaskRecord) -> tuple[str, ...]:
        """All nodes but the one where the task failed twice alike; empty where it would not fit on them."""
        others = [room for node_id, room in self._rooms.items() if node_id != suspect(r.failures)]
        ask = self.ask(r)
        fewest = r.spec.fewest_bundles if r.spec.backends is None else ask.count
        fits = isinstance(fit(replace(ask, count=fewest), others), Placement)
        return tuple(room.node_id for room in others) if fits else ()

    def weight(self, r: TaskRecord) -> float:
        """The weight of its model type."""
        model_type = r.spec.model_type or self._model_types.get(r.spec.model or "")
        return self._weights.get(model_type or "", 1.0)

    def ask(self, r: TaskRecord) -> Ask:
        """What it waits for."""
        need = drivers.need_of(r.spec, self._env)
        return ask_of(r) if need is None else drivers.waiting_ask(r, need)

    def placed(self, r: TaskRecord, placement: Placement) -> Placed:
        """The placement as it is recorded. A driver itself runs where its first GPU is, and holds none."""
        places = self._places(placement)
        if r.spec.backends is None:
            return Placed(r.attempt + 1, places)
        return Placed(r.attempt + 1, (replace(places[0], devices=()),), places)

    def _places(self, placement: Placement) -> tuple[TaskPlace, ...]:
        return tuple(
            TaskPlace(n, *self._book.place_labels(n), d, *self._book.node_size(n))
            for n, d in zip(placement.node_ids, placement.devices, strict=True)
        )


def ask_of(r: TaskRecord) -> Ask:
    return Ask(r.bundle, r.spec.bundles, r.spec.group, r.accelerators)
