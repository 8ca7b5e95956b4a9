"""The half of the task service that ticks: looks at Ray, judges, places, acts.

One thread ticks and is the only one that talks to Ray; all records are read and written under one lock. Each step is
recorded before it is taken (Placed, then reserve; Starting, then start; Stopping, then kill; Ended, then release),
and taking it again is harmless, so a new process goes on where a killed one stopped.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from areal_sky.adapters.ports import Clock, GangPhase, RankExit, RayCluster
from areal_sky.core.dependencies import Waits, as_numbers
from areal_sky.core.failures import backoff_s, out_of_memory
from areal_sky.core.nodeenv import HeadEnv
from areal_sky.core.nodefaults import AVOID_S, SEVERAL, NodeFaults, may_avoid
from areal_sky.core.placement import Ask, NodeRoom, NoFit, Placement, fit, occupy
from areal_sky.core.queueing import Waiting, in_order
from areal_sky.core.taskevents import (
    Ended,
    NodeAvoided,
    Place,
    Placed,
    RankExited,
    Requeued,
    Started,
    Starting,
    Stopping,
    TaskEvent,
    TaskFact,
)
from areal_sky.core.tasklife import TaskRecord, first_failure
from areal_sky.core.taskmodel import TaskSpec, TaskState
from areal_sky.core.taskverdict import Verdict, overdue, verdict
from areal_sky.run.gangs import Gangs
from areal_sky.run.journal import Journal
from areal_sky.run.metricbook import MetricBook
from areal_sky.run.nodebook import LoadSource, NodeBook
from areal_sky.run.taskbook import TaskBook
from areal_sky.run.tasklogs import TaskLogs

GRACE_S = 10.0  # from SIGTERM to SIGKILL
HOLD_AFTER_S = 300.0
RESERVE_S = 30.0  # how long Ray may take to reserve what we saw free, before the task waits again
START_S = 120.0  # how long runners may take to say that they run: Python has to start, on a busy node
RESERVE_BACKOFF_S = 5.0
JITTER = (0.8, 1.2)  # what failed together shall not come back together


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
        jitter: Callable[[], float] = lambda: random.uniform(*JITTER),
    ):
        """Reads the journal. `jitter` gives the factor of each wait between two runs. Raises StateError."""
        self.head_env = head_env
        self.grace_s = grace_s
        self._journal = journal
        self._clock = clock
        self._hub = hub
        self._jitter = jitter
        self._logs = logs or TaskLogs(Path(head_env.state_dir).expanduser() / "logs")
        self._weights = dict(head_env.weights)
        self._model_types = dict(head_env.models)
        self._lock = threading.RLock()
        self._tasks = TaskBook(journal, clock.now())
        self._book = NodeBook(head_env.groups)
        for fact in self._tasks.node_facts:
            self._book.note(fact)
        self._faults = NodeFaults()
        self._gangs = Gangs(ray)
        self._metrics = MetricBook(journal)
        self._adopted = False
        self._exits_due: list[tuple[str, RankExit]] = []
        self._not_reserved: dict[str, int] = {}  # how often in a row Ray has not reserved for a task
        self._why_waiting: dict[str, str] = {}
        self._waits = Waits()
        self._ready: dict[str, None] = {}  # waiting tasks that only wait for room
        self._later: list[tuple[float, str]] = []  # (not before, task)
        self._held_back: dict[str, frozenset[str]] = {}
        self._in_vain: list[tuple[str, TaskRecord]] = []  # (task, the one that it waits for and that ended badly)
        for r in list(self._tasks.waiting.values()):
            self._queue(r)

    # ---------------------------------------------------------------- the tick

    def tick(self, now_s: float) -> None:
        """Look at Ray, record what happened, decide, act. Raises Unreachable, StateError; the next tick goes on."""
        if not self._adopted:
            self._adopt(now_s)
        nodes, exits = self._gangs.look()
        self._exits_due += exits
        with self._lock:
            self._metrics.write()
            self._book.observe(nodes, now_s)
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
            record = by_gang.get(gang_id)
            if record is not None:
                words = self._logs.last_words(record.task_id, record.attempt, e.rank) if e.code != 0 else ""
                tail = next((line for line in reversed(words.splitlines()) if line.strip()), "").strip()[-200:]
                oom = out_of_memory(e.code, e.lost, words)
                events.append(TaskEvent(now_s, record.task_id, RankExited(e.rank, e.code, e.lost, tail, oom)))
        self._record(*events)
        self._exits_due = []

    def _evict_overdue(self, now_s: float) -> None:
        for r in [r for r in self._tasks.holding.values() if r.stop is None]:
            drains = [d for p in r.places if (d := self._book.drain_of(p.node_id)) and d.deadline_s <= now_s]
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
                late = overdue(r, now_s)
                if isinstance(late, Stopping):
                    r = self._record(TaskEvent(now_s, task_id, late))[task_id]
                if r.starting and r.stop is None and now_s > r.since_s + RESERVE_S + START_S:
                    self._requeue(r, now_s, f"its ranks did not start within {START_S:g} s")
                    continue
                self._follow(r, verdict(r, dead, now_s, self.grace_s, self._larger_accelerators(r)), now_s)
            elif dead:
                self._requeue(r, now_s, f"node {next(str(p) for p in r.places if p.node_id in dead)} died")
            elif r.stop == "cancel":
                self._end(r, now_s, Ended(TaskState.CANCELLED, r.stop_reason))
            elif r.stop is not None:
                self._requeue(r, now_s, r.stop_reason)
            elif now_s > r.since_s + RESERVE_S:
                n = self._not_reserved[task_id] = self._not_reserved.get(task_id, 0) + 1
                wait_s = backoff_s(RESERVE_BACKOFF_S, n)
                reason = f"Ray did not give it its resources within {RESERVE_S:g} s"
                self._leave(r, now_s, Requeued(reason, counted=False, not_before_s=now_s + wait_s))
        for task_id, r in list(self._tasks.waiting.items()):
            if r.spec.total_timeout_s is not None and isinstance(late := overdue(r, now_s), Ended):
                self._end(self._tasks.waiting[task_id], now_s, late)

    def _follow(self, r: TaskRecord, found: Verdict, now_s: float) -> None:
        match found:
            case Stopping():
                self._record(TaskEvent(now_s, r.task_id, found))
            case Requeued():
                if found.counted:
                    self._blame_node(r, now_s)
                    wait_s = max(0.0, found.not_before_s - now_s) * self._jitter()
                    found = replace(found, not_before_s=now_s + wait_s if wait_s else 0.0)
                self._leave(r, now_s, found)
            case Ended():
                if found.state is TaskState.FAILED:
                    self._blame_node(r, now_s)
                elif found.state is TaskState.SUCCEEDED:
                    self._faults.did_well({p.node_id for p in r.places})
                self._end(r, now_s, found)
            case _:
                pass

    def _blame_node(self, r: TaskRecord, now_s: float) -> None:
        """A task has failed by itself. Where different ones do so soon after their start, the node is to blame."""
        first = first_failure(r)
        if first is None or first.oom or first.rank >= len(r.places) or r.stop in ("timeout", "expired"):
            return
        place = r.places[first.rank]
        ran_s = first.t_s - (r.started_s if r.started_s is not None else first.t_s)
        failed = self._faults.failed(place.node_id, r.spec.command or r.spec.payload or "", ran_s, now_s)
        avoided, nodes = self._book.avoided_in_group_of(place.node_id, now_s)
        if failed >= SEVERAL and may_avoid(avoided, nodes):
            reason = f"{failed} different tasks failed there soon after their start"
            fact = NodeAvoided(place.node_id, str(place), now_s + AVOID_S, reason)
            self._journal.append([TaskEvent(now_s, "", fact)])
            self._book.note(fact)
            self._faults.forget(place.node_id)

    def _larger_accelerators(self, r: TaskRecord) -> tuple[str, ...]:
        """Accelerators of the cluster with more memory each than those that the task runs on."""
        shapes = [g.shape for g in self.head_env.groups]
        memory = {s.accelerator: s.gpu_memory_gib or 0.0 for s in shapes if s.accelerator}
        used = [a for p in r.places if (a := self._book.accelerator_of(p.node_id)) is not None]
        has = max((memory.get(a, 0.0) for a in used), default=0.0)
        allowed = {a.lower() for a in r.spec.accelerators}
        more = (a for a, gib in memory.items() if a and gib > has > 0 and (not allowed or a.lower() in allowed))
        return tuple(sorted(more))

    # ---------------------------------------------------------------- who waits for what

    def _queue(self, r: TaskRecord) -> None:
        """A task that waits: for others, for a time, or only for room."""
        if r.attempt == 0 and r.spec.after:
            failed = self._waits.add(r.task_id, r.spec.after, self._tasks.state)
            if failed is not None:
                bad = self._tasks.get(f"t{failed}")
                assert bad is not None
                self._in_vain.append((r.task_id, bad))
                return
            if r.task_id in self._waits:
                return
        if r.not_before_s > self._clock.now():
            heapq.heappush(self._later, (r.not_before_s, r.task_id))
        else:
            self._ready[r.task_id] = None

    def _settle(self, now_s: float) -> None:
        """Tasks whose time has come wait for room from now on; those that wait in vain end, and who waits for them."""
        while self._later and self._later[0][0] <= now_s:
            task_id = heapq.heappop(self._later)[1]
            if task_id in self._tasks.waiting:
                self._ready[task_id] = None
        while self._in_vain:
            events: list[TaskEvent] = []
            for task_id, bad in self._in_vain:
                if task_id in self._tasks.waiting:
                    name = f"{bad.task_id} ({bad.spec.name})" if bad.spec.name else bad.task_id
                    word = "was cancelled" if bad.state is TaskState.CANCELLED else "failed"
                    state = TaskState.CANCELLED if bad.state is TaskState.CANCELLED else TaskState.FAILED
                    events.append(TaskEvent(now_s, task_id, Ended(state, f"{name}, which it waited for, {word}")))
            self._in_vain = []
            self._record(*{e.task_id: e for e in events}.values())

    def _why(self, r: TaskRecord, now_s: float) -> str:
        """What a waiting task waits for."""
        if r.task_id in self._waits:
            left = [self._after_words(ref) for ref in r.spec.after if self._waits.left(ref)]
            return f"it comes after {', '.join(left)}"
        if r.task_id not in self._ready and r.not_before_s > now_s:
            return f"{r.reason}; not before {r.not_before_s - now_s:.0f} s from now"
        avoided = self._book.avoided(now_s)
        words = self._why_waiting.get(r.task_id) or r.reason or "it has not been looked at yet"
        return words + "".join(f"; node {a.node} is avoided: {a.reason}" for a in avoided)

    def _after_words(self, ref: str) -> str:
        numbers = as_numbers(ref) or (0, 0)
        first = self._tasks.live(f"t{numbers[0]}")
        name = f" ({first.spec.name})" if first is not None and first.spec.name else ""
        return f"{ref}{name}" + (f", {self._waits.left(ref)} of them left" if numbers[0] < numbers[1] else "")

    def _place(self, now_s: float) -> None:
        """Place as many waiting tasks as fit, best score first."""
        self._book.hold(self._tasks.holding.values(), self._gangs.reserved, now_s)
        queued = [self._tasks.waiting[t] for t in self._ready]
        waiting = {r.task_id for r in queued}
        self._held_back = {t: n for t, n in self._held_back.items() if t in waiting}
        if not queued:
            return
        rooms = self._book.rooms(now_s)
        kept: set[str] = set()  # nodes held back by gangs further up
        tried: dict[Ask, NoFit] = {}  # within one pass room only shrinks: a shape that did not fit will not
        events: list[TaskEvent] = []
        for w in in_order(map(self._waiting, queued), self.head_env.ageing_per_hour):
            record = self._tasks.waiting[w.task_id]
            ask = ask_of(record)
            found = tried.get(ask)
            if found is None:
                found = fit(ask, [room for i, room in rooms.items() if i not in kept])
            if isinstance(found, Placement):
                occupy(rooms, ask, found)
                places = tuple(
                    Place(n, *self._book.place_labels(n), d, *self._book.node_size(n))
                    for n, d in zip(found.node_ids, found.devices, strict=True)
                )
                events.append(TaskEvent(now_s, w.task_id, Placed(record.attempt + 1, places)))
                continue
            tried[ask] = found
            self._why_waiting[w.task_id] = str(found)
            if kept:
                self._why_waiting[w.task_id] += f" ({len(kept)} nodes are held back for gangs further up)"
            if now_s - w.submitted_s >= HOLD_AFTER_S:
                kept |= self._hold_back(w.task_id, ask, rooms, kept, now_s)
        self._record(*events)
        for e in events:
            self._ready.pop(e.task_id, None)
            self._why_waiting.pop(e.task_id, None)
        self._book.hold(self._tasks.holding.values(), self._gangs.reserved, now_s)

    def _hold_back(
        self, task_id: str, ask: Ask, rooms: Mapping[str, NodeRoom], kept: set[str], now_s: float
    ) -> frozenset[str]:
        """Nodes kept free for a gang that has waited long: the freest ones that would do, chosen once."""
        emptied = {i: room for i, room in self._book.emptied_rooms(now_s).items() if i not in kept}
        held = self._held_back.get(task_id)
        if held is None or not held <= set(emptied):
            freest = sorted(emptied, key=lambda i: (-rooms[i].free_gpus, -rooms[i].cpus, i))
            held = frozenset[str]()
            for n in range(1, len(freest) + 1):
                found = fit(ask, [emptied[i] for i in freest[:n]])
                if isinstance(found, Placement):
                    held = frozenset(found.node_ids)
                    break
            self._held_back[task_id] = held
        return held

    def _act(self, now_s: float) -> None:
        """Ask Ray for what the records say. What fails is asked again by the next tick."""
        with self._lock:
            holding, over = list(self._tasks.holding.values()), self._gangs.over()
        self._gangs.release(over)
        for r in holding:
            self._gangs.reserve(r)
            if r.stop is not None:
                self._gangs.kill(r, self.grace_s)
        # A reservation takes Ray a few milliseconds; waiting them out here starts the task a tick earlier.
        for _ in range(5):
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
        """Writes the events; who waits for a task that has ended is freed, or listed in `_in_vain`."""
        fresh = self._tasks.record(*events) if events else {}
        for task_id, r in fresh.items():
            if not r.ended:
                continue
            self._waits.forget(task_id)
            self._ready.pop(task_id, None)
            self._why_waiting.pop(task_id, None)
            self._not_reserved.pop(task_id, None)
            freed, lost = self._waits.ended(r.number, r.state)
            self._in_vain += [(waiter, r) for waiter in lost]
            self._ready.update((t, None) for t in freed if t in self._tasks.waiting)
        return fresh

    def _requeue(self, r: TaskRecord, now_s: float, reason: str) -> None:
        """Back to its old place, through no fault of its own."""
        self._leave(r, now_s, Requeued(reason, counted=False))

    def _end(self, r: TaskRecord, now_s: float, ended: Ended) -> None:
        self._leave(r, now_s, ended)

    def _leave(self, r: TaskRecord, now_s: float, fact: TaskFact) -> None:
        after = self._record(TaskEvent(now_s, r.task_id, fact))[r.task_id]
        if r.holds:
            self._gangs.leave(r.gang_id)
        if not after.ended:
            self._queue(after)

    def _weight(self, spec: TaskSpec) -> float:
        model_type = spec.model_type or self._model_types.get(spec.model or "")
        return self._weights.get(model_type or "", 1.0)

    def _waiting(self, r: TaskRecord) -> Waiting:
        return Waiting(r.task_id, r.number, r.spec.priority, self._weight(r.spec), r.submitted_s)


def ask_of(r: TaskRecord) -> Ask:
    return Ask(r.bundle, r.spec.bundles, r.spec.group, r.accelerators)
