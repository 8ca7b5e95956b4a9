"""The admission engine (core/admission.py) as the head uses it: what the head knows in, what is to be done out."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from areal_sky.core.admission import Admission, Decision, Entry, Place, Placement, Pool, Restore, Shrink
from areal_sky.core.failures import suspect
from areal_sky.core.nodeenv import HeadEnv
from areal_sky.core.placement import Ask, NodeRoom, NoFit, fit
from areal_sky.core.queueing import LearningOrder, OrderPolicy, WeightedOrder
from areal_sky.core.tasklife import TaskRecord
from areal_sky.core.taskmodel import TaskState
from areal_sky.core.tenancy import DriverNeed
from areal_sky.errors import InvalidInput
from areal_sky.run import drivers
from areal_sky.run.expected import Expected
from areal_sky.run.nodebook import NodeBook
from areal_sky.run.plugins import order_policy
from areal_sky.spec.cluster import SchedulingSpec
from areal_sky.units import format_duration

KEEP_FREE_S = 20.0  # how often it is looked what is to be kept free for drivers
MIN_RUNTIME_S = 60.0  # a run that has just begun is left alone: starting costs about as much


class Admitting:
    """For the threads of one process, which share one lock outside."""

    def __init__(
        self, env: HeadEnv, book: NodeBook, order: OrderPolicy | None = None, min_runtime_s: float = MIN_RUNTIME_S
    ):
        self.order: OrderPolicy = order or order_of(env)
        pools = [Pool(p.name, p.guaranteed_gpus, math.inf if p.max_gpus is None else p.max_gpus, p.borrow)
                 for p in env.pools]  # fmt: skip
        self._engine = Admission(self.order, pools)
        self._shares = env.pools
        self._pools = {p.model_type: p.name for p in env.pools}
        self._book = book
        self._min_runtime_s = min_runtime_s
        self._weights = dict(env.weights)
        self._model_types = dict(env.models)
        self._rooms: dict[str, NodeRoom] = {}  # what the engine was told of each node
        self._ranks: dict[str, list[int]] = {}  # the engine numbers the ranks that a task has anew from 0
        self._lent: dict[str, list[int]] = {}
        self._elsewhere: dict[str, TaskRecord] = {}  # waiting tasks that shall not run where they failed
        self._env = env
        # An order that learns predicts by itself, and weighs users' estimates: it is not to take ours for theirs.
        self._expected = None if isinstance(self.order, LearningOrder) else Expected()
        self._drivers: dict[str, TaskRecord] = {}  # waiting drivers
        self._withheld: set[str] = set()  # those of them that the engine does not know now
        self._kept_free_s = -math.inf

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

    def drop(self, task_id: str, now_s: float, *, finished: bool = False) -> None:
        """It neither waits for room nor holds any. Nothing happens when it did not.

        `finished`: it has ended by itself, so that others like it may be expected to run about as long.
        """
        self._engine.ended(task_id, now_s, finished=finished)
        for known in (self._elsewhere, self._ranks, self._lent, self._drivers):
            known.pop(task_id, None)
        self._withheld.discard(task_id)

    def ended(self, r: TaskRecord) -> None:
        """The task has come to its end."""
        self.drop(r.task_id, r.since_s, finished=r.state is TaskState.SUCCEEDED)
        if self._expected is not None:
            self._expected.ended(r)

    def adopt(self, r: TaskRecord) -> None:
        """It holds its places already: it was placed by an earlier process."""
        held = r.claim or r.held
        placement = Placement(tuple(p.node_id for p in held), tuple(p.devices for p in held))
        self._hold(r, placement, r.placed_s if r.placed_s is not None else r.since_s)
        self._ranks[r.task_id] = [rank for rank in range(len(r.claim or r.places)) if rank not in r.gone]
        if r.checkpoint_s is not None:
            self._engine.progress(r.task_id, r.checkpoint_s)

    def _hold(self, r: TaskRecord, placement: Placement, since_s: float) -> None:
        entry = self.entry(r)
        if r.spec.backends is not None:
            entry = replace(entry, ask=drivers.held_ask(r, len(placement.node_ids)))
        self._engine.adopt(entry, placement, since_s, r.served_s)

    def teach(self, ended: Iterable[TaskRecord]) -> None:
        """Who learns is told of the tasks that an earlier process saw end, the earliest first."""
        for r in ended:
            if self._expected is not None:
                self._expected.ended(r)
            elif isinstance(self.order, LearningOrder):
                entry = self.entry(r)
                self.order.key(entry, 0.0, r.submitted_s)
                self.order.ended(entry, r.served_s, r.state is TaskState.SUCCEEDED)

    def progress(self, task_id: str, checkpoint_s: float) -> None:
        """The running task has a checkpoint of its work up to then."""
        self._engine.progress(task_id, checkpoint_s)

    def shrunk(self, task_id: str, ranks: Collection[int], now_s: float) -> None:
        """These ranks of an elastic gang are gone."""
        mine = self._ranks[task_id]
        self._engine.shrunk(task_id, [i for i, rank in enumerate(mine) if rank in ranks], now_s)
        self._ranks[task_id] = [rank for rank in mine if rank not in ranks]

    def lend(self, r: TaskRecord, now_s: float) -> None:
        """The task lends the room of all its ranks; nothing happens while it cannot (it is being ended)."""
        if self.has_lent(r.task_id) or not r.world or r.claim:
            return
        try:
            self._engine.lend(r.task_id, range(len(self._ranks[r.task_id])), now_s)
        except InvalidInput:
            return
        self._lent[r.task_id], self._ranks[r.task_id] = self._ranks[r.task_id], []

    def take_back(self, task_id: str, now_s: float) -> None:
        """It needs its room again; who has borrowed it is ended by what `decide` says next."""
        self._engine.take_back(task_id, now_s)

    def has_lent(self, task_id: str) -> bool:
        """Whether the room that it has lent is not its own again yet."""
        return task_id in self._lent

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
                self._engine.ended(task_id, now_s, finished=False)
                self.add(r)

    def decide(self, now_s: float) -> list[Decision]:
        """What is to be done now. It counts as done: `undo` what could not be recorded."""
        self._withhold(now_s)
        self._keep_free(now_s)
        decisions = [self._as_driver(d, now_s) for d in self._engine.decide(now_s)]
        decisions += [self._as_driver(d, now_s) for d in self._over_groups()]
        for d in decisions:
            match d:
                case Place():
                    self._elsewhere.pop(d.task_id, None)
                    self._ranks[d.task_id] = list(range(len(d.placement.node_ids)))
                case Restore():
                    self._ranks[d.task_id] = [*self._ranks[d.task_id], *self._lent.pop(d.task_id, [])]
                case _:
                    pass
        return decisions

    def _withhold(self, now_s: float) -> None:
        """While room is lent no driver starts: Ray, where it makes its groups, knows nothing of loans."""
        for task_id, r in self._drivers.items():
            if self._lent and task_id not in self._withheld:
                self._engine.ended(task_id, now_s, finished=False)
                self._withheld.add(task_id)
            elif not self._lent and task_id in self._withheld:
                self._withheld.discard(task_id)
                self._engine.submit(self.entry(r), r.served_s)

    def _keep_free(self, now_s: float) -> None:
        """Nodes for the first driver in line that no node group alone can hold, so that smaller tasks let it in."""
        if not self._drivers or 0 <= now_s - self._kept_free_s < KEEP_FREE_S:
            return
        self._kept_free_s = now_s
        freest = sorted(self._engine.rooms(), key=lambda x: (-x.free_gpus, x.node_id))
        whole = [self._rooms[x.node_id] for x in freest]
        for task_id in self._engine.waiting_ids:
            r = self._drivers.get(task_id)
            if r is None or isinstance(fit(self.ask(r), whole), Placement):
                continue  # the engine itself reserves for what fits into one group
            if nodes := drivers.to_keep_free(r, self._need(r), whole):
                self._engine.reserve(task_id, nodes, now_s)
                return

    def _over_groups(self) -> list[Place]:
        """Drivers for which no node group alone has room, but several together. Reservations come first."""
        waiting = [r for t, r in self._drivers.items() if t not in self._withheld]
        free = sum(room.free_gpus for room in self._engine.rooms()) if waiting else 0.0
        if all(self._need(r).gpus > free for r in waiting):
            return []
        for task_id in self._engine.waiting_ids:
            r = self._drivers.get(task_id)
            found = drivers.over_groups(r, self._need(r), self._engine.rooms()) if r is not None else None
            if isinstance(found, Placement):
                return [Place(task_id, found)]  # one at a time: the next tick comes soon
            if self._engine.reservation(task_id) is not None:
                break
        return []

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

    def ranks_of(self, shrink: Shrink) -> tuple[int, ...]:
        """The task's own numbers of the ranks that it shall give up."""
        mine = self._ranks[shrink.task_id]
        return tuple(mine[i] for i in shrink.ranks)

    def undo(self, decisions: Iterable[Decision], waiting: Mapping[str, TaskRecord], now_s: float) -> None:
        """These were not recorded: the tasks wait on."""
        for d in decisions:
            if isinstance(d, Place) and d.task_id in waiting:
                self._engine.ended(d.task_id, now_s, finished=False)
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
        return f"number {place} of {waiting} in the queue: {self.terms(r, now_s)}"

    def terms(self, r: TaskRecord, now_s: float) -> str:
        """What its place in the order comes from, term by term."""
        entry = self.entry(r)
        if isinstance(self.order, WeightedOrder):
            return self.order.explain(entry, r.served_s, now_s)
        key, _ = self.order.key(entry, r.served_s, now_s)
        had = f", has had {format_duration(int(r.served_s), 2)} of service" if r.served_s >= 1 else ""
        return f"key {key:.2f} by {type(self.order).__name__}, lower goes first{had}"

    def score(self, r: TaskRecord, now_s: float) -> float:
        """Higher goes first."""
        if isinstance(self.order, WeightedOrder):
            return self.order.score(self.entry(r), r.served_s, now_s)
        return -self.order.key(self.entry(r), r.served_s, now_s)[0]

    def entry(self, r: TaskRecord) -> Entry:
        """What the queue must know of the task."""
        spec = r.spec
        estimate_s = spec.estimate_s if self._expected is None else self._expected.estimate_s(r)
        return Entry(
            r.task_id, r.number, self.ask(r), r.submitted_s, priority=spec.priority, weight=self.weight(r),
            kind=spec.kind, deadline_s=spec.deadline_s, estimate_s=estimate_s,
            preemptible=spec.may_be_preempted, min_bundles=spec.min_bundles or 0, min_runtime_s=self._min_runtime_s,
            like=spec.title, pool=self._pools.get(self._model_type(r) or ""),
        )  # fmt: skip

    def _others(self, r: TaskRecord) -> tuple[str, ...]:
        """All nodes but the one where the task failed twice alike; empty where it would not fit on them."""
        others = [room for node_id, room in self._rooms.items() if node_id != suspect(r.failures)]
        ask = self.ask(r)
        fewest = r.spec.fewest_bundles if r.spec.backends is None else ask.count
        fits = isinstance(fit(replace(ask, count=fewest), others), Placement)
        return tuple(room.node_id for room in others) if fits else ()

    def no_machine_helps(self, holding: Iterable[TaskRecord]) -> Callable[[TaskRecord], bool]:
        """Tells of a waiting task whether its pool has as many GPUs as it may have: then more nodes change nothing."""
        limits = {p.model_type: p.max_gpus if p.borrow else p.guaranteed_gpus for p in self._shares}
        used: dict[str | None, float] = {}
        for x in holding:
            used[self._model_type(x)] = used.get(self._model_type(x), 0.0) + x.bundle.gpus * len(x.held)

        def used_up(r: TaskRecord) -> bool:
            kind = self._model_type(r)
            limit = limits.get(kind or "")
            return limit is not None and used.get(kind, 0.0) + r.bundle.gpus * r.spec.fewest_bundles > limit + 1e-6

        return used_up

    def weight(self, r: TaskRecord) -> float:
        """The weight of its model type."""
        return self._weights.get(self._model_type(r) or "", 1.0)

    def ask(self, r: TaskRecord) -> Ask:
        """What it waits for."""
        need = drivers.need_of(r.spec, self._env)
        return ask_of(r) if need is None else drivers.waiting_ask(r, need)

    def _model_type(self, r: TaskRecord) -> str | None:
        return r.spec.model_type or self._model_types.get(r.spec.model or "")


def order_of(env: HeadEnv) -> OrderPolicy:
    """The order that `scheduling.strategy` names. Raises InvalidInput when there is none of that name."""
    return order_policy(SchedulingSpec(strategy=env.strategy, ageing_per_hour=env.ageing_per_hour))


def ask_of(r: TaskRecord) -> Ask:
    return Ask(r.bundle, r.spec.bundles, r.spec.group, r.accelerators)
