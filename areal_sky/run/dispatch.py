"""The half of the task service that ticks: looks at Ray, judges, places, acts.

One thread ticks and is the only one that talks to Ray; all records are read and written under one lock. Each step is
recorded before it is taken (Placed, then reserve; Starting, then start; Stopping, then kill; Ended, then release),
and taking it again is harmless, so a new process goes on where a killed one stopped.

Order: by score (core/queueing). Smaller or lower tasks may pass a gang that does not fit. Once a gang has waited
HOLD_AFTER_S and would fit if the tasks on the live nodes ended, just enough nodes for it are held back from tasks
behind it, until it is placed: no gang starves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_sky.adapters.ports import Clock, GangPhase, RankExit, RankStart, RayCluster
from areal_sky.core import tasklife, usage
from areal_sky.core.nodeenv import HeadEnv
from areal_sky.core.placement import Ask, NodeRoom, NoFit, Placement, fit, occupy
from areal_sky.core.queueing import Waiting, in_order
from areal_sky.core.taskevents import (
    Ended,
    Fact,
    Place,
    Placed,
    RankExited,
    Requeued,
    Started,
    Starting,
    Stopping,
    TaskEvent,
)
from areal_sky.core.tasklife import TaskRecord
from areal_sky.core.taskmodel import TaskSpec, TaskState
from areal_sky.errors import ArealSkyError
from areal_sky.run.journal import Journal
from areal_sky.run.nodebook import LoadSource, NodeBook
from areal_sky.run.tasklogs import TaskLogs

log = logging.getLogger(__name__)

HOLD_AFTER_S = 300.0
GRACE_S = 10.0  # from SIGTERM to SIGKILL
RESERVE_S = 30.0  # how long Ray may take to reserve what we saw free, before the task waits again


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
    ):
        """Reads the journal. Raises StateError."""
        self.head_env = head_env
        self.grace_s = grace_s
        self._ray = ray
        self._journal = journal
        self._clock = clock
        self._hub = hub
        self._logs = logs or TaskLogs(Path(head_env.state_dir).expanduser() / "logs")
        self._weights = dict(head_env.weights)
        self._model_types = dict(head_env.models)
        self._lock = threading.RLock()
        self._book = NodeBook(head_env.groups)
        events = journal.read()
        self._records, drains = tasklife.fold(events)
        self._past_holds = usage.past_holds(events)
        self._live = {t: r for t, r in self._records.items() if not r.ended}
        for d in drains:
            self._book.drain(d)
        self._metrics: dict[str, dict[str, float]] = {}
        for task_id, _, _, values in journal.metrics(limit=10_000):
            self._metrics[task_id] = {**self._metrics.get(task_id, {}), **values}
        self._metrics_due: list[tuple[str, float, int, Mapping[str, float]]] = []
        self._why_waiting: dict[str, str] = {}
        self._held_back: dict[str, frozenset[str]] = {}
        self._exits_due: list[tuple[str, RankExit]] = []
        # What this process has asked Ray for; a new process asks again.
        self._adopted = False
        self._reserved: set[str] = set()
        self._launched: set[str] = set()
        self._killed: set[str] = set()
        self._to_release: set[str] = set()

    # ---------------------------------------------------------------- the tick

    def tick(self, now_s: float) -> None:
        """Look at Ray, record what happened, decide, act. Raises Unreachable, StateError; the next tick goes on."""
        if not self._adopted:
            self._adopt(now_s)
        self._exits_due += self._ray.exits()
        nodes = self._ray.nodes()
        with self._lock:
            if self._metrics_due:
                self._journal.append_metrics(self._metrics_due)
                self._metrics_due = []
            self._book.observe(nodes, now_s)
            self._take_exits(now_s)
            self._evict_overdue(now_s)
            self._judge(now_s)
            self._place(now_s)
        self._act(now_s)

    def _adopt(self, now_s: float) -> None:
        """Take over what an earlier process left in Ray; remove gangs that no live task knows."""
        gangs = self._ray.gangs()
        with self._lock:
            holding = [r for r in self._live.values() if r.holds]
        for r in holding:
            if r.state is TaskState.RUNNING:
                self._ray.adopt(r.gang_id, r.spec.bundles)  # a missing runner comes up in exits()
            elif r.starting:
                # It may have been started, whole or in part, or not: only a whole gang is taken over.
                whole = r.gang_id in gangs and self._ray.adopt(r.gang_id, r.spec.bundles)
                with self._lock:
                    if whole:
                        self._record(TaskEvent(now_s, r.task_id, Started()))
                    else:
                        self._requeue(r, now_s, "the head was restarted while it was being started")
        with self._lock:
            live = {r.gang_id for r in self._live.values() if r.holds}
            self._to_release |= set(gangs) - live
            self._adopted = True

    def _take_exits(self, now_s: float) -> None:
        by_gang = {r.gang_id: r for r in self._live.values() if r.holds}
        events: list[TaskEvent] = []
        for gang_id, e in self._exits_due:
            record = by_gang.get(gang_id)
            if record is not None:
                tail = self._logs.tail(record.task_id, record.attempt, e.rank) if e.code else ""
                events.append(TaskEvent(now_s, record.task_id, RankExited(e.rank, e.code, e.lost, tail)))
        self._record(*events)
        self._exits_due = []

    def _evict_overdue(self, now_s: float) -> None:
        for r in [r for r in self._live.values() if r.holds and r.stop is None]:
            drains = [d for p in r.places if (d := self._book.drain_of(p.node_id)) and d.deadline_s <= now_s]
            if drains:
                reason = f"replica {drains[0].replica} is leaving: {drains[0].reason}"
                if r.state is TaskState.PLACED and not r.starting:
                    self._requeue(r, now_s, reason)
                else:
                    self._record(TaskEvent(now_s, r.task_id, Stopping("evict", reason)))

    def _judge(self, now_s: float) -> None:
        for r in [r for r in self._live.values() if r.holds]:
            dead = self._book.dead_among(r)
            if r.state is TaskState.RUNNING:
                self._follow(r, tasklife.verdict(r, dead, now_s, self.grace_s), now_s)
                continue
            if dead:
                self._requeue(r, now_s, f"node {next(str(p) for p in r.places if p.node_id in dead)} died")
            elif r.stop == "cancel" and r.gang_id not in self._launched:
                self._end(r, now_s, Ended(TaskState.CANCELLED, r.stop_reason))
            elif r.stop is not None and r.gang_id not in self._launched:
                self._requeue(r, now_s, r.stop_reason)
            elif r.gang_id not in self._launched and now_s > r.since_s + RESERVE_S:
                self._requeue(r, now_s, f"Ray did not give it its resources within {RESERVE_S:g} s")

    def _follow(self, r: TaskRecord, verdict: tasklife.Verdict, now_s: float) -> None:
        match verdict:
            case Stopping():
                self._record(TaskEvent(now_s, r.task_id, verdict))
            case Requeued():
                self._requeue(r, now_s, verdict.reason, counted=verdict.counted)
            case Ended():
                self._end(r, now_s, verdict)
            case _:
                pass

    def _place(self, now_s: float) -> None:
        """Place as many waiting tasks as fit, best score first."""
        self._book.hold(self._live.values(), self._reserved, now_s)
        queued = [r for r in self._live.values() if r.state is TaskState.QUEUED]
        waiting = {r.task_id for r in queued}
        self._held_back = {t: n for t, n in self._held_back.items() if t in waiting}
        if not queued:
            return
        rooms = self._book.rooms()
        kept: set[str] = set()  # nodes held back by gangs further up
        tried: dict[Ask, NoFit] = {}  # within one pass room only shrinks: a shape that did not fit will not
        events: list[TaskEvent] = []
        for w in in_order(map(self._waiting, queued), self.head_env.ageing_per_hour):
            record = self._records[w.task_id]
            ask = ask_of(record.spec)
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
                kept |= self._hold_back(w.task_id, ask, rooms, kept)
        self._record(*events)
        self._book.hold(self._live.values(), self._reserved, now_s)

    def _hold_back(self, task_id: str, ask: Ask, rooms: Mapping[str, NodeRoom], kept: set[str]) -> frozenset[str]:
        """Nodes kept free for a gang that has waited long: the freest ones that would do, chosen once."""
        emptied = {i: room for i, room in self._book.emptied_rooms().items() if i not in kept}
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
            release = list(self._to_release)
            holding = [r for r in self._live.values() if r.holds]
        for gang_id in release:
            if self._tried("release", lambda g=gang_id: self._ray.release(g)):
                self._to_release.discard(gang_id)
        for r in holding:
            if r.state is TaskState.PLACED and not r.starting and r.gang_id not in self._reserved:
                nodes = [p.node_id for p in r.places]
                if self._tried("reserve", lambda r=r, n=nodes: self._ray.reserve(r.gang_id, r.spec.bundle, n)):
                    self._reserved.add(r.gang_id)
            if (
                r.state is TaskState.RUNNING
                and r.stop is not None
                and r.gang_id not in self._killed
                and self._tried("stop", lambda r=r: self._ray.kill(r.gang_id, self.grace_s))
            ):
                self._killed.add(r.gang_id)
        # A reservation takes Ray a few milliseconds; waiting them out here starts the task a tick earlier.
        for _ in range(5):
            waiting = [r for r in holding if r.gang_id in self._reserved and not self._start_if_ready(r.task_id, now_s)]
            if not waiting:
                break
            time.sleep(0.004)

    def _start_if_ready(self, task_id: str, now_s: float) -> bool:
        """False while Ray is still reserving."""
        r = self._records[task_id]
        if r.state is not TaskState.PLACED or r.gang_id not in self._reserved:
            return True
        phase = GangPhase.READY
        if not r.starting:
            phase = self._ray.gang_phase(r.gang_id)
        with self._lock:
            r = self._records[task_id]
            if r.state is not TaskState.PLACED or r.stop is not None:
                return True
            if phase is GangPhase.GONE:
                self._requeue(r, now_s, "its placement group vanished from Ray")
                return True
            if phase is not GangPhase.READY:
                return False
            if not r.starting:
                self._record(TaskEvent(now_s, task_id, Starting()))
        if r.gang_id not in self._launched:
            if not self._tried("start", lambda: self._ray.start(r.gang_id, r.spec.bundle, self._rank_starts(r))):
                return True
            self._launched.add(r.gang_id)
        with self._lock:
            if self._records[task_id].state is TaskState.PLACED:
                self._record(TaskEvent(self._clock.now(), task_id, Started()))
        return True

    def _rank_starts(self, r: TaskRecord) -> list[RankStart]:
        return [
            RankStart(rank, r.spec.command, r.spec.payload, dict(r.spec.envs), r.spec.kind)
            for rank in range(r.spec.bundles)
        ]

    def _tried(self, what: str, call: Any) -> bool:
        try:
            call()
        except ArealSkyError as e:
            log.warning("cannot %s now, trying again: %s", what, e)
            return False
        return True

    # ---------------------------------------------------------------- records

    def _record(self, *events: TaskEvent) -> None:
        """Journal first, memory after: what is not on disk has not happened."""
        if not events:
            return
        fresh: dict[str, TaskRecord] = {}
        ended: list[usage.Hold] = []
        for e in events:
            before = fresh.get(e.task_id) or self._records.get(e.task_id)
            fresh[e.task_id] = tasklife.apply(before, e)
            ended += usage.released(before, fresh[e.task_id])
        self._journal.append(events)
        self._past_holds += ended
        self._records.update(fresh)
        self._live.update(fresh)
        for task_id in [t for t, r in fresh.items() if r.ended]:
            del self._live[task_id]

    def _requeue(self, r: TaskRecord, now_s: float, reason: str, *, counted: bool = False) -> None:
        self._leave(r, now_s, Requeued(reason, counted))

    def _end(self, r: TaskRecord, now_s: float, ended: Ended) -> None:
        self._leave(r, now_s, ended)

    def _leave(self, r: TaskRecord, now_s: float, fact: Fact) -> None:
        self._record(TaskEvent(now_s, r.task_id, fact))
        self._why_waiting.pop(r.task_id, None)
        if r.holds:
            self._to_release.add(r.gang_id)
            self._reserved.discard(r.gang_id)
            self._launched.discard(r.gang_id)
            self._killed.discard(r.gang_id)

    def _weight(self, spec: TaskSpec) -> float:
        model_type = spec.model_type or self._model_types.get(spec.model or "")
        return self._weights.get(model_type or "", 1.0)

    def _waiting(self, r: TaskRecord) -> Waiting:
        return Waiting(r.task_id, r.number, r.spec.priority, self._weight(r.spec), r.submitted_s)


def ask_of(spec: TaskSpec) -> Ask:
    return Ask(spec.bundle, spec.bundles, spec.group, spec.accelerators)
