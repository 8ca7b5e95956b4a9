"""The half of the task service that ticks: looks at Ray, judges, places, acts.

One thread ticks and is the only one that talks to Ray; all records are read and written under one lock. Each step is
recorded before it is taken (Placed, then reserve; Starting, then start; Stopping, then kill; Ended, then release),
and taking it again is harmless, so a new process goes on where a killed one stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from areal_sky.adapters.ports import Clock, GangPhase, RankExit, RayCluster
from areal_sky.core.admission import Decision, Preempt, Regrow, Shrink
from areal_sky.core.admission import Place as PlaceDecision
from areal_sky.core.failures import backoff_s, last_line, out_of_memory
from areal_sky.core.nodeenv import HeadEnv
from areal_sky.core.queueing import OrderPolicy
from areal_sky.core.stopwatch import Stopwatch
from areal_sky.core.taskevents import (
    Ended,
    RankExited,
    Requeued,
    Shrinking,
    Shrunk,
    Started,
    Starting,
    Stopping,
    TaskEvent,
    TaskFact,
)
from areal_sky.core.tasklife import TaskRecord
from areal_sky.core.taskmodel import TaskState
from areal_sky.core.taskverdict import Verdict, overdue, shrunk, verdict
from areal_sky.errors import StateError
from areal_sky.run.admitting import MIN_RUNTIME_S, Admitting
from areal_sky.run.gangs import Gangs
from areal_sky.run.health import NodeHealth
from areal_sky.run.journal import Journal
from areal_sky.run.lending import borrowers, lent_devices, may_lend, placed
from areal_sky.run.metricbook import MetricBook
from areal_sky.run.nodebook import LoadSource, NodeBook
from areal_sky.run.peaks import PeakBook
from areal_sky.run.pending import Pending, jitter
from areal_sky.run.taskbook import TaskBook
from areal_sky.run.tasklogs import TaskLogs

GRACE_S = 10.0  # from SIGTERM to SIGKILL
RESERVE_S = 30.0  # how long Ray may take to reserve what we saw free, before the task waits again
START_S = 120.0  # how long runners may take to say that they run: Python has to start, on a busy node
RESERVE_BACKOFF_S = 5.0


class Dispatch:
    """See the module. TaskService adds what people and tasks may ask."""

    def __init__(
        self,
        ray: RayCluster,
        journal: Journal,
        clock: Clock,
        head_env: HeadEnv,
        hub: LoadSource | None = None,
        *,
        logs: TaskLogs | None = None,
        grace_s: float = GRACE_S,
        order: OrderPolicy | None = None,
        min_runtime_s: float = MIN_RUNTIME_S,
        jitter: Callable[[], float] = jitter,
        steady: Callable[[], float] | None = None,
    ):
        """Reads the journal; raises StateError. `jitter`: factor of each pause. `steady`: a clock that never jumps."""
        self.head_env = head_env
        self.grace_s = grace_s
        self._journal = journal
        self._clock = clock
        self._hub = hub
        self._jitter = jitter
        self._steady, self._watch = steady, Stopwatch()
        self._logs = logs or TaskLogs(Path(head_env.state_dir).expanduser() / "logs")
        self._lock = threading.RLock()
        self._tasks = TaskBook(journal, clock.now())
        self._book = NodeBook(head_env.groups)
        for fact in self._tasks.node_facts:
            self._book.note(fact)
        self._admitting = Admitting(head_env, self._book, order, min_runtime_s)
        self._health = NodeHealth(self._book, head_env)
        self._gangs = Gangs(ray)
        self._metrics = MetricBook(journal)
        self._peaks = PeakBook(head_env, hub, self._metrics)
        self.news = threading.Event()  # somebody asked for something: the next tick need not wait
        self._adopted = False
        self._exits_due: list[tuple[str, RankExit]] = []
        self._owed: list[Decision] = []  # decided, but not on disk yet
        self._not_reserved: dict[str, int] = {}  # how often in a row Ray has not reserved for a task
        self._pending = Pending(self._tasks)
        self._admitting.teach(self._tasks.recent.values())
        for r in self._tasks.holding.values():
            self._admitting.adopt(r)
        for r in list(self._tasks.waiting.values()):
            self._queue(r)

    # ---------------------------------------------------------------- the tick

    def tick(self, now_s: float) -> None:
        """Look at Ray, record what happened, decide, act. Raises Unreachable, StateError; the next tick goes on."""
        self.news.clear()
        self._watch.look(now_s if self._steady is None else self._steady())
        if not self._adopted:
            self._adopt(now_s)
        nodes, exits, foreign = self._gangs.look(list(self._tasks.holding.values()))
        self._exits_due += exits
        with self._lock:
            self._metrics.write()
            self._book.observe(nodes, now_s, foreign)
            self._take_exits(now_s)
            self._evict_overdue(now_s)
            self._judge(now_s)
            self._settle(now_s)
            self._place(now_s)
        self._act(now_s)

    def _adopt(self, now_s: float) -> None:
        """Take over what an earlier process left in Ray; remove gangs that no live task knows."""
        with self._lock:
            holding = list(self._tasks.holding.values())
        broken = self._gangs.adopt(holding)
        with self._lock:
            for r in broken:
                self._requeue(r, now_s, "the head was restarted while it was being started")
            self._adopted = True

    def _take_exits(self, now_s: float) -> None:
        by_gang = {r.gang_id: r for r in self._tasks.holding.values()}
        events: list[TaskEvent] = []
        for gang_id, e in self._exits_due:
            if (record := by_gang.get(gang_id)) is not None:
                words = self._logs.last_words(record.task_id, record.attempt, e.rank) if e.code != 0 else ""
                fact = RankExited(e.rank, e.code, e.lost, last_line(words), out_of_memory(e.code, e.lost, words))
                events.append(TaskEvent(now_s, record.task_id, fact))
        self._record(*events)
        self._exits_due = []

    def _evict_overdue(self, now_s: float) -> None:
        for r in [r for r in self._tasks.holding.values() if r.stop is None]:
            drains = [d for n in r.all_nodes if (d := self._book.drain_of(n)) and d.deadline_s <= now_s]
            if drains:
                reason = f"replica {drains[0].replica} is leaving: {drains[0].reason}"
                if r.state is TaskState.PLACED and not r.starting:
                    self._requeue(r, now_s, reason)
                else:
                    self._record(TaskEvent(now_s, r.task_id, Stopping("evict", reason)))

    def _judge(self, now_s: float) -> None:
        for task_id in list(self._tasks.holding):
            r = self._tasks.holding[task_id]
            if r.starting and self._gangs.all_up(r):
                r = self._record(TaskEvent(now_s, task_id, Started()))[task_id]
            dead = self._book.dead_among(r)
            if self._gangs.is_launched(r.gang_id):
                if isinstance(late := self._overdue(r, now_s), Stopping):
                    r = self._record(TaskEvent(now_s, task_id, late))[task_id]
                if r.starting and r.stop is None and now_s > r.since_s + RESERVE_S + START_S:
                    self._requeue(r, now_s, f"its ranks did not start within {START_S:g} s")
                    continue
                if gone := shrunk(r, dead, now_s, self.grace_s):
                    r = self._record(TaskEvent(now_s, task_id, Shrunk(gone)))[task_id]
                    self._admitting.shrunk(task_id, gone, now_s)
                self._lend(r, now_s)
                self._follow(r, verdict(r, dead, now_s, self.grace_s, self._health.larger_accelerators(r)), now_s)
            elif dead:
                self._requeue(r, now_s, f"node {next(str(p) for p in r.places if p.node_id in dead)} died")
            elif r.stop == "cancel":
                self._leave(r, now_s, Ended(TaskState.CANCELLED, r.stop_reason))
            elif r.stop is not None:
                self._requeue(r, now_s, r.stop_reason)
            elif now_s > r.since_s + RESERVE_S:
                n = self._not_reserved[task_id] = self._not_reserved.get(task_id, 0) + 1
                reason = f"Ray did not give it its resources within {RESERVE_S:g} s"
                later_s = now_s + backoff_s(RESERVE_BACKOFF_S, n)
                self._leave(r, now_s, Requeued(reason, counted=False, not_before_s=later_s))
        for r in list(self._tasks.waiting.values()):
            if r.spec.total_timeout_s is not None and isinstance(late := self._overdue(r, now_s), Ended):
                self._leave(r, now_s, late)

    def _overdue(self, r: TaskRecord, now_s: float) -> Stopping | Ended | None:
        watch = self._watch.elapsed_s
        return overdue(r, watch(r.gang_id, r.started_s, now_s), watch(r.task_id, r.first_started_s, now_s))

    def _follow(self, r: TaskRecord, found: Verdict, now_s: float) -> None:
        match found:
            case Stopping():
                self._record(TaskEvent(now_s, r.task_id, found))
            case Requeued():
                if found.counted:
                    self._blame_node(r, now_s)
                    wait_s = max(0.0, found.not_before_s - now_s) * self._jitter()
                    found = replace(found, not_before_s=now_s + wait_s if wait_s else 0.0)
                self._leave(r, now_s, self._health.if_it_can_fit(r, found))
            case Ended():
                if found.state is TaskState.FAILED:
                    self._blame_node(r, now_s)
                elif found.state is TaskState.SUCCEEDED:
                    self._health.did_well(r)
                self._leave(r, now_s, found)
            case _:
                pass

    def _blame_node(self, r: TaskRecord, now_s: float) -> None:
        """A task has failed by itself: perhaps it was the node."""
        if (fact := self._health.failed(r, now_s)) is not None:
            self._journal.append([TaskEvent(now_s, "", fact)])
            self._book.note(fact)

    # ---------------------------------------------------------------- who waits for what

    def _queue(self, r: TaskRecord) -> None:
        """A task that waits: for others, for a time, or only for room."""
        if not self._pending.add(r, self._clock.now()):
            self._admitting.add(r)

    def _settle(self, now_s: float) -> None:
        """Tasks whose time has come wait for room from now on; those that wait in vain end, and who waits for them."""
        for r in self._pending.due(now_s):
            self._admitting.add(r)
        while events := self._pending.in_vain(now_s):
            self._record(*events)

    def _why(self, r: TaskRecord, now_s: float) -> str:
        """What a waiting task waits for."""
        if pending := self._pending.why(r, now_s):
            return pending
        words = self._admitting.why(r.task_id) or r.reason or "it has not been looked at yet"
        return words + "".join(f"; node {a.node} is avoided: {a.reason}" for a in self._book.avoided(now_s))

    def _place(self, now_s: float) -> None:
        """What the admission engine decides is recorded; what cannot be recorded has not happened."""
        self._book.hold(self._tasks.holding.values(), self._gangs.reserved, now_s)
        self._admitting.look(now_s)
        decisions, self._owed = [*self._owed, *self._admitting.decide(now_s)], []
        try:
            self._record(*(e for d in decisions if (e := self._event(d, now_s)) is not None))
        except StateError:
            self._admitting.undo(decisions, self._tasks.waiting, now_s)
            self._owed = [d for d in decisions if not isinstance(d, PlaceDecision)]
            raise
        if decisions:
            self._book.hold(self._tasks.holding.values(), self._gangs.reserved, now_s)

    def _event(self, d: Decision, now_s: float) -> TaskEvent | None:
        """A decision as a fact."""
        r = self._tasks.live(d.task_id)
        if r is None:
            return None
        match d:
            case PlaceDecision():
                lenders = [x for x in self._tasks.holding.values() if self._admitting.has_lent(x.task_id)]
                lent = lent_devices((x, self._gangs.gpu_ids(x)) for x in lenders)
                return TaskEvent(now_s, d.task_id, placed(r, d.placement, lent, self._book))
            case (Preempt() | Regrow()) if r.holds and r.stop is None:
                kind = "preempt" if isinstance(d, Preempt) else "regrow"
                return TaskEvent(now_s, d.task_id, Stopping(kind, d.reason))
            case Shrink() if r.holds and r.stop is None:
                return TaskEvent(now_s, d.task_id, Shrinking(self._admitting.ranks_of(d), d.reason))
        return None

    def _lend(self, r: TaskRecord, now_s: float) -> None:
        """A task in a low phase lends its GPUs; after it, who has borrowed them goes."""
        if r.phase_low:
            if r.stop is None and may_lend(r, self._gangs.gpu_ids(r)):
                self._admitting.lend(r, now_s)
            return
        if self._admitting.has_lent(r.task_id):
            self._admitting.take_back(r.task_id, now_s)
        for other in borrowers(r, self._tasks.holding.values()):
            if other.stop is None:
                reason = f"its GPUs were lent by {r.task_id}, which needs them again"
                self._record(TaskEvent(now_s, other.task_id, Stopping("preempt", reason)))

    def _act(self, now_s: float) -> None:
        """Ask Ray for what the records say. What fails is asked again by the next tick."""
        with self._lock:
            holding = list(self._tasks.holding.values())
            over = self._gangs.over(holding)
        self._gangs.release(over)
        for r in holding:
            self._gangs.reserve(r)
            if r.stop is not None:
                self._gangs.kill(r, self.grace_s)
            self._gangs.kill_ranks(r, self.grace_s)
            self._gangs.release_ranks(r)
        # A reservation takes Ray some milliseconds; waiting them out here starts the task a tick earlier.
        for _ in range(20):
            reserved = [r for r in holding if r.gang_id in self._gangs.reserved]
            waiting = [r for r in reserved if not self._start_if_ready(r.task_id, now_s)]
            if not waiting:
                break
            time.sleep(0.004)

    def _start_if_ready(self, task_id: str, now_s: float) -> bool:
        """False while Ray is still reserving."""
        r = self._tasks.holding.get(task_id)
        if r is None or r.state is not TaskState.PLACED or r.gang_id not in self._gangs.reserved:
            return True
        phase = GangPhase.READY if r.starting else self._gangs.phase(r.gang_id)
        with self._lock:
            r = self._tasks.holding.get(task_id)
            if r is None or r.state is not TaskState.PLACED or (r.stop is not None and not r.starting):
                return True
            if phase is GangPhase.GONE:
                self._requeue(r, now_s, "its placement group vanished from Ray")
                return True
            if phase is not GangPhase.READY:
                return False
            if not r.starting:
                r = self._record(TaskEvent(now_s, task_id, Starting()))[task_id]
                self._not_reserved.pop(task_id, None)
        if r.stop is None:
            self._gangs.start(r)
        return True

    # ---------------------------------------------------------------- records

    def _record(self, *events: TaskEvent) -> dict[str, TaskRecord]:
        """Writes the events; who waited for a task that has ended well waits for room from now on."""
        fresh = self._tasks.record(*events) if events else {}
        for task_id, r in fresh.items():
            if r.ended:
                self._admitting.ended(r)
                self._not_reserved.pop(task_id, None)
                for freed in self._pending.ended(r):
                    self._admitting.add(freed)
        return fresh

    def _requeue(self, r: TaskRecord, now_s: float, reason: str) -> None:
        """Back to its old place, through no fault of its own."""
        self._leave(r, now_s, Requeued(reason, counted=False))

    def _leave(self, r: TaskRecord, now_s: float, fact: TaskFact) -> None:
        after = self._record(TaskEvent(now_s, r.task_id, fact))[r.task_id]
        self._watch.forget([r.gang_id, r.task_id] if after.ended else [r.gang_id])
        if r.holds:
            self._gangs.leave(r.gang_id)
        if not after.ended:
            self._admitting.drop(r.task_id, now_s)
            self._queue(after)
        self._peaks.left(r, now_s)
