"""Tasks in virtual time: the production engine (core/admission.py) decides, this world carries it out at once.

A preemption takes effect at once. What a stopped task loses is what it did since its last checkpoint, and `restart_s`
at its next start. It holds nothing of clocks: `next_s` says when something happens next, `step` makes it happen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush

from areal_sky.core.admission import PATIENCE_S, Admission, Entry, OrderPolicy, Place, Pool, Preempt
from areal_sky.core.gangs import Ask
from areal_sky.core.room import empty_room
from areal_sky.core.taskmodel import PREEMPTIBLE_KINDS
from areal_sky.run.simulation.result import TaskRow
from areal_sky.run.simulation.simtask import Clairvoyance, Life, SimTask, VirtualNode

SETTLE_S = 1.0  # some of what the engine does it does at most once a second: it is asked again after each event


class TaskWorld:
    """See the module. `start_s` is the Unix time of the start; all other times are given in Unix time."""

    def __init__(
        self,
        start_s: float,
        order: OrderPolicy,
        pools: Iterable[Pool] = (),
        *,
        weights: Mapping[str, float] | None = None,
        known: Clairvoyance | None = None,
        patience_s: float = PATIENCE_S,
        preemptible: bool = True,
        min_runtime_s: float = 0.0,
    ):
        """`weights` by model type. `preemptible` False: nobody is. `known`: filled as tasks come."""
        self.start_s = start_s
        self.order = order
        self._pools = {p.name: p for p in pools}
        self._engine = Admission(order, self._pools.values(), patience_s=patience_s)
        self._weights = weights or {}
        self._needs_s = (known or Clairvoyance()).needs_s
        self._preemptible = preemptible
        self._min_runtime_s = min_runtime_s
        self._lives: dict[str, Life] = {}
        self._running: dict[str, Life] = {}
        self._arrivals: list[tuple[float, int, SimTask]] = []
        self._ends: list[tuple[float, int, str, int]] = []
        self._again_s = math.inf
        self._dirty = False
        self.nodes: dict[str, VirtualNode] = {}
        self.entries: dict[str, Entry] = {}  # of those that wait or run
        self.events = 0
        self.queue_version = 0  # changes whenever who waits has changed
        self.on_start: Callable[[SimTask, float], None] | None = None
        self.on_stop: Callable[[SimTask, float], None] | None = None
        self.on_node: Callable[[VirtualNode], None] | None = None  # what runs there has changed

    # ---------------------------------------------------------------- what is told

    def expect(self, tasks: Iterable[SimTask]) -> None:
        """These will come at their time."""
        for task in tasks:
            heappush(self._arrivals, (self.start_s + task.submitted_s, len(self._lives) + 1, task))
            self._lives[task.task_id] = Life(task)

    def add_node(self, node: VirtualNode, now_s: float, market: str = "") -> None:
        node.idle_since_s = now_s
        self.nodes[node.node_id] = node
        self._engine.set_node(empty_room(node.node_id, node.group, node.shape, node.node_id, market))
        self._dirty = True

    def drain_node(self, node_id: str) -> None:
        """It takes no more tasks."""
        node = self.nodes[node_id]
        if not node.draining:
            node.draining, node.view = True, None
            self._engine.drop_node(node_id)
            self._dirty = True

    def remove_node(self, node_id: str, now_s: float, reclaimed: bool) -> None:
        """It is gone. What ran there waits again. `reclaimed`: not by us."""
        node = self.nodes.pop(node_id, None)
        if node is None:
            return
        self._engine.drop_node(node_id)
        self.evict(node, now_s, reclaimed)
        self._dirty = True

    def evict(self, node: VirtualNode, now_s: float, reclaimed: bool) -> None:
        """Who runs there must stop now."""
        for task_id in list(node.tasks):
            life = self._running[task_id]
            life.reclaims += reclaimed
            life.preemptions += not reclaimed
            self._stop(life, now_s)

    def notice(self, node_id: str, now_s: float) -> None:
        """The node says that it will go: who runs there writes a checkpoint."""
        for task_id in self.nodes[node_id].tasks if node_id in self.nodes else ():
            life = self._running[task_id]
            if life.task.checkpoint_s is not None:
                life.saved_s = now_s
                self._engine.progress(task_id, now_s)

    def finish(self, task_id: str, now_s: float) -> None:
        """A task that runs until told has done its work, or is not needed any more."""
        life = self._lives[task_id]
        if life.ended_s is not None:
            return
        if task_id in self._running:
            life.served_s += now_s - life.since_s
            self._leave(life, now_s)
        self._end(life, now_s)

    # ---------------------------------------------------------------- time

    def next_s(self) -> float:
        """When something happens here next."""
        ends = self._ends
        while ends and self._lives[ends[0][2]].starts != ends[0][3]:
            heappop(ends)
        return min(
            ends[0][0] if ends else math.inf,
            self._arrivals[0][0] if self._arrivals else math.inf,
            self._engine.next_change_s(),
            self._again_s,
        )

    def step(self, now_s: float) -> None:
        """All that happens up to now: ends, submits, and what the engine decides then."""
        happened = self._dirty
        ends, arrivals = self._ends, self._arrivals
        while ends and ends[0][0] <= now_s:
            _, _, task_id, start = heappop(ends)
            life = self._lives[task_id]
            if life.starts == start:
                happened = True
                life.served_s += now_s - life.since_s
                self._leave(life, now_s)
                self._end(life, now_s)
        while arrivals and arrivals[0][0] <= now_s:
            _, number, task = heappop(arrivals)
            if self._lives[task.task_id].ended_s is None:
                happened = True
                self._submit(task, number, now_s)
        follow_up = self._again_s <= now_s
        if not (happened or follow_up or self._engine.next_change_s() <= now_s):
            return
        self._dirty = False
        acted = self._decide(now_s)
        self._again_s = now_s + SETTLE_S if acted or happened or not follow_up else math.inf

    # ---------------------------------------------------------------- what is seen

    @property
    def unfinished(self) -> int:
        """Tasks that have not ended, those to come included."""
        return len(self.entries) + len(self._arrivals)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def arrivals_left(self) -> int:
        return len(self._arrivals)

    def waiting(self, most: int) -> Sequence[Entry]:
        """Who waits for room that a machine could give, next first."""
        used = self._used() if self._pools else {}
        found: list[Entry] = []
        for task_id in self._engine.waiting_ids:
            entry = self.entries[task_id]
            pool = self._pools.get(entry.pool or "")
            if pool is not None:
                limit = pool.max_gpus if pool.borrow else pool.guaranteed_gpus
                if used.get(pool.name, 0.0) + entry.ask.bundle.gpus * entry.ask.count > limit + 1e-6:
                    continue
            found.append(entry)
            if len(found) == most:
                break
        return found

    def score(self, entry: Entry, now_s: float) -> float:
        """Higher goes first."""
        return -self.order.key(entry, self._lives[entry.task_id].served_s, now_s)[0]

    def waiting_gpus(self) -> tuple[int, float]:
        """(tasks, GPUs) that wait."""
        waiting = [e for task_id, e in self.entries.items() if task_id not in self._running]
        return len(waiting), sum(e.ask.bundle.gpus * e.ask.count for e in waiting)

    def row(self, task_id: str) -> TaskRow:
        """What has become of a task; times to the millisecond."""
        life = self._lives[task_id]
        task = life.task
        ideal_s = task.duration_s
        if ideal_s is None:
            ideal_s = life.ended_s - (life.first_s or life.ended_s) if life.ended_s is not None else life.served_s
        return TaskRow(
            task_id=task_id, tenant=task.tenant, model=task.model, kind=task.kind, gpus=task.gpus,
            submitted_s=round(task.submitted_s, 3), started_s=self._since(life.first_s),
            ended_s=self._since(life.ended_s), ideal_s=round(ideal_s, 3), deadline_s=task.deadline_s,
            lost_work_s=round(life.lost_s, 3), preemptions=life.preemptions, reclaims=life.reclaims,
            outcome=life.outcome,
        )  # fmt: skip

    def rows(self) -> tuple[TaskRow, ...]:
        return tuple(self.row(task_id) for task_id in self._lives)

    # ---------------------------------------------------------------- how

    def _since(self, t_s: float | None) -> float | None:
        return None if t_s is None else round(t_s - self.start_s, 3)

    def _submit(self, task: SimTask, number: int, now_s: float) -> None:
        entry = self.entries[task.task_id] = Entry(
            task_id=task.task_id, number=number, ask=Ask(task.bundle, task.bundles, task.group, task.accelerators),
            submitted_s=now_s, priority=task.priority, weight=self._weights.get(task.model_type, 1.0), kind=task.kind,
            pool=task.model_type if task.model_type in self._pools else None, estimate_s=task.estimate_s,
            deadline_s=None if task.deadline_s is None else self.start_s + task.deadline_s,
            preemptible=self._may_stop(task), min_runtime_s=self._min_runtime_s, like=task.like,
        )  # fmt: skip
        self._needs_s[task.task_id] = math.inf if task.duration_s is None else task.duration_s
        self._engine.submit(entry)
        self.events += 1
        self.queue_version += 1

    def _may_stop(self, task: SimTask) -> bool:
        wanted = task.kind in PREEMPTIBLE_KINDS if task.preemptible is None else task.preemptible
        return self._preemptible and wanted

    def _decide(self, now_s: float) -> bool:
        acted = False
        while True:
            stopped = False
            for decision in self._engine.decide(now_s):
                acted = True
                life = self._lives[decision.task_id]
                if isinstance(decision, Place):
                    self._start(life, decision.placement.node_ids, now_s)
                elif isinstance(decision, Preempt):
                    stopped = True
                    life.preemptions += 1
                    self._stop(life, now_s)
            if not stopped:
                return acted

    def _start(self, life: Life, node_ids: Sequence[str], now_s: float) -> None:
        task, bundle = life.task, life.task.bundle
        life.overhead_s = task.restart_s if life.starts else 0.0
        life.starts += 1
        life.since_s = now_s
        if life.first_s is None:
            life.first_s = now_s
        self._running[task.task_id] = life
        nodes: dict[str, VirtualNode] = {}
        for node_id in node_ids:
            node = nodes[node_id] = self.nodes[node_id]
            free = node.free
            free[0] -= bundle.gpus
            free[1] -= bundle.cpus
            free[2] -= bundle.memory_gib
            node.tasks[task.task_id] = node.tasks.get(task.task_id, 0) + 1
        life.nodes = tuple(nodes.values())
        for node in life.nodes:
            node.idle_since_s = node.view = None
            if self.on_node is not None:
                self.on_node(node)
        left_s = self._needs_s[task.task_id] - life.served_s
        if left_s < math.inf:
            heappush(self._ends, (now_s + left_s, life.starts, task.task_id, life.starts))
        self.events += 1
        self.queue_version += 1
        if self.on_start is not None:
            self.on_start(task, now_s)

    def _stop(self, life: Life, now_s: float) -> None:
        """It must leave its nodes, and waits again."""
        task = life.task
        ran_s = now_s - life.since_s
        worked_s = max(0.0, ran_s - life.overhead_s)
        safe_s = life.safe_s(worked_s)
        lost_s = life.done_s + worked_s - safe_s
        life.done_s = safe_s
        life.lost_s += lost_s + task.restart_s
        life.served_s += ran_s
        if task.duration_s is not None:
            self._needs_s[task.task_id] = life.served_s + task.restart_s + task.duration_s - safe_s
        self._leave(life, now_s)
        self._engine.requeue(task.task_id, life.served_s, now_s)
        self._dirty = True
        self.events += 1
        self.queue_version += 1

    def _leave(self, life: Life, now_s: float) -> None:
        task, bundle = life.task, life.task.bundle
        del self._running[task.task_id]
        for node in life.nodes:
            count = node.tasks.pop(task.task_id)
            free = node.free
            free[0] += bundle.gpus * count
            free[1] += bundle.cpus * count
            free[2] += bundle.memory_gib * count
            node.view = None
            if not node.tasks:
                node.idle_since_s = now_s
            if self.on_node is not None:
                self.on_node(node)
        life.nodes = ()
        life.saved_s = None
        life.starts += 1  # an end that was foreseen is void
        if self.on_stop is not None:
            self.on_stop(task, now_s)

    def _end(self, life: Life, now_s: float) -> None:
        task_id = life.task.task_id
        life.ended_s, life.outcome = now_s, "succeeded"
        self._engine.ended(task_id, now_s)
        if self.entries.pop(task_id, None) is not None:
            self.events += 1
            self.queue_version += 1
        self._dirty = True

    def _used(self) -> dict[str, float]:
        used: dict[str, float] = {}
        for task_id, life in self._running.items():
            pool = self.entries[task_id].pool
            if pool is not None:
                used[pool] = used.get(pool, 0.0) + life.task.gpus
        return used
