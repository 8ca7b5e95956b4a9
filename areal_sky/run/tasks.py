"""The in-cluster task service: queue, gangs, attempts. Driven by `tick`; asked by HTTP threads.

One thread ticks and is the only one that talks to Ray; every other method only reads or records under a lock, so no
caller waits for Ray. Each step is recorded before it is taken (Placed, then reserve; Starting, then start; Stopping,
then kill; Ended, then release), and taking it again is harmless, so a new service goes on where a killed one stopped.

Order: by score (core/queueing). Smaller or lower tasks may pass a gang that does not fit. Once a gang has waited
HOLD_AFTER_S and would fit if the tasks on the live nodes ended, just enough nodes for it are held back from tasks
behind it, until it is placed: no gang starves.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_sky.adapters.ports import Clock, GangPhase, RankExit, RankStart, RayCluster
from areal_sky.core import tasklife
from areal_sky.core.model import HEAD_GROUP, GangDemand, TaskSpec, TaskState
from areal_sky.core.nodeenv import HeadEnv
from areal_sky.core.placement import Ask, NodeRoom, NoFit, Placement, could_ever_fit, fit, occupy
from areal_sky.core.queueing import Waiting, explain, in_order, order_key, score
from areal_sky.core.taskevents import (
    Draining,
    Ended,
    Fact,
    Place,
    Placed,
    RankExited,
    Requeued,
    Started,
    Starting,
    Stopping,
    Submitted,
    TaskEvent,
    tell,
)
from areal_sky.core.tasklife import TaskRecord
from areal_sky.core.view import HeadView
from areal_sky.errors import ArealSkyError, InvalidInput, NotFound, Refused
from areal_sky.run.journal import Journal
from areal_sky.run.nodebook import LoadSource, NodeBook
from areal_sky.run.tasklogs import TaskLogs

log = logging.getLogger(__name__)

HOLD_AFTER_S = 300.0
GRACE_S = 10.0  # from SIGTERM to SIGKILL
RESERVE_S = 30.0  # how long Ray may take to reserve what we saw free, before the task waits again
MAX_METRICS = 100  # values per report


class TaskService:
    """See the module. `hub` gives GPU loads; `task_token` lets tasks report metrics and submit further tasks."""

    def __init__(
        self,
        ray: RayCluster,
        journal: Journal,
        clock: Clock,
        head_env: HeadEnv,
        hub: LoadSource | None = None,
        *,
        logs: TaskLogs | None = None,
        task_token: str = "",
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
        self._task_token = task_token
        self._weights = dict(head_env.weights)
        self._model_types = dict(head_env.models)
        self._lock = threading.RLock()
        self._book = NodeBook(head_env.groups)
        self._records, drains = tasklife.fold(journal.read())
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

    # ---------------------------------------------------------------- asked by people, tasks, the controller

    def submit(self, spec: TaskSpec) -> dict[str, Any]:
        """{"task_id", "status", "reason"}: SCHEDULED when it is placed at once, else QUEUED with the reason.

        Raises InvalidInput, Refused for a gang that the cluster at its largest could not run, StateError.
        """
        with self._lock:
            now_s = self._clock.now()
            known = next((r for r in self._records.values() if _same_submit(r.spec, spec)), None)
            if known is not None:
                return self._submit_answer(known)
            self._check(spec)
            number = len(self._records) + 1
            task_id = f"t{number}"
            self._record(TaskEvent(now_s, task_id, Submitted(number, spec)))
            if self._book.seen and self._adopted:
                self._place(now_s)
            return self._submit_answer(self._records[task_id])

    def get(self, task_id: str) -> dict[str, Any]:
        """The task as JSON (core/tasklife.view). Raises NotFound."""
        with self._lock:
            return self._view(self._known(task_id), self._clock.now())

    def list(self, state: str | None = None) -> list[dict[str, Any]]:
        """Holding tasks by start, then waiting ones next first, then ended ones latest first.

        `state`: a task state, or `active` for all that have not ended. Raises InvalidInput.
        """
        states = {s.value for s in TaskState}
        if state is not None and state.upper() not in states | {"ACTIVE"}:
            raise InvalidInput(f"state {state!r} is none of active, {', '.join(sorted(states)).lower()}")
        with self._lock:
            now_s = self._clock.now()
            rate = self.head_env.ageing_per_hour

            def place(r: TaskRecord) -> tuple[float, ...]:
                if r.ended:
                    return (2, -(r.ended_s or 0), -r.number)
                if r.holds:
                    return (0, r.since_s, r.number)
                return (1, *order_key(self._waiting(r), rate))

            wanted = [
                r
                for r in self._records.values()
                if state is None or r.state.value == state.upper() or (state.upper() == "ACTIVE" and not r.ended)
            ]
            return [self._view(r, now_s) for r in sorted(wanted, key=place)]

    def story(self, task_id: str) -> list[dict[str, Any]]:
        """What happened to the task, oldest first, ending with what it waits for. Raises NotFound, StateError."""
        with self._lock:
            now_s = self._clock.now()
            record = self._known(task_id)
            lines = [{"t_s": e.t_s, "text": tell(e)} for e in self._journal.read(task_id)]
            if record.state is TaskState.QUEUED:
                waiting = self._waiting(record)
                queue = in_order(
                    (self._waiting(r) for r in self._live.values() if r.state is TaskState.QUEUED),
                    self.head_env.ageing_per_hour,
                )
                place = [w.task_id for w in queue].index(task_id) + 1
                terms = explain(waiting, self.head_env.ageing_per_hour, now_s)
                lines.append({"t_s": now_s, "text": f"number {place} of {len(queue)} in the queue: {terms}"})
                lines.append({"t_s": now_s, "text": f"waits because {self._reason(record)}"})
            return lines

    def cancel(self, task_id: str) -> dict[str, Any]:
        """Ends the task: at once where it waits, by SIGTERM and after a grace SIGKILL where it runs.

        Cancelling what has ended changes nothing. Raises NotFound, StateError.
        """
        with self._lock:
            now_s = self._clock.now()
            record = self._known(task_id)
            if record.state is TaskState.QUEUED or (record.state is TaskState.PLACED and not record.starting):
                self._end(record, now_s, Ended(TaskState.CANCELLED, "cancelled by the user"))
            elif record.holds and record.stop != "cancel":
                self._record(TaskEvent(now_s, task_id, Stopping("cancel", "cancelled by the user")))
            return self._view(self._records[task_id], now_s)

    def logs(
        self, task_id: str, *, stream: str = "out", rank: int = 0, offset: int = 0, attempt: int | None = None
    ) -> dict[str, Any]:
        """{"text", "next_offset", "ended", "attempt"}; `ended`: nothing more will come.

        Raises NotFound, InvalidInput, StateError.
        """
        with self._lock:
            record = self._known(task_id)
            if rank >= record.spec.bundles:
                raise InvalidInput(f"{task_id} has ranks 0 to {record.spec.bundles - 1}")
            chosen = record.attempt if attempt is None else attempt
            over = record.ended or chosen < record.attempt
        text, next_offset, at_end = self._logs.read(task_id, chosen, rank, stream, offset)
        return {"text": text, "next_offset": next_offset, "ended": over and at_end, "attempt": chosen}

    def push_log(self, task_id: str, attempt: int, rank: int, stream: str, offset: int, data: bytes) -> int:
        """A runner's chunk; returns the offset wanted next. Raises NotFound, InvalidInput, StateError."""
        with self._lock:
            self._known(task_id)
        return self._logs.append(task_id, attempt, rank, stream, offset, data)

    def track_metrics(self, task_id: str, metrics: Mapping[str, float]) -> None:
        """Records values that a task reports of itself. Written with the next tick. Raises NotFound, InvalidInput."""
        if len(metrics) > MAX_METRICS:
            raise InvalidInput(f"more than {MAX_METRICS} metrics in one report")
        for name, value in metrics.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise InvalidInput(f"metric {name[:40]!r} is not a finite number")
        with self._lock:
            record = self._known(task_id)
            values = {str(k)[:64]: float(v) for k, v in metrics.items()}
            self._metrics[task_id] = {**self._metrics.get(task_id, {}), **values}
            self._metrics_due.append((task_id, self._clock.now(), record.attempt, values))

    def drain_replica(self, replica: str, reason: str, deadline_s: float) -> int:
        """No new work on the replica's live nodes; what runs there at `deadline_s` is requeued. Returns the nodes.

        Repeating it changes nothing, except that a new deadline replaces the old one. Raises StateError.
        """
        with self._lock:
            node_ids = self._book.node_ids_of(replica)
            marked = [self._book.drain_of(n) for n in node_ids]
            if any(d is None or d.deadline_s != deadline_s for d in marked):
                draining = Draining(replica, node_ids, deadline_s, reason)
                self._journal.append([TaskEvent(self._clock.now(), "", draining)])
                self._book.drain(draining)
            return len(node_ids)

    def evict_replica(self, replica: str, reason: str) -> int:
        """Like `drain_replica` with a deadline of now: tasks there end and wait again at their old place."""
        with self._lock:
            now_s = self._clock.now()
            nodes = self.drain_replica(replica, reason, now_s)
            self._evict_overdue(now_s)
            return nodes

    def view(self) -> HeadView:
        """Nodes, loads and unmet demand, as of the latest tick."""
        with self._lock:
            now_s = self._clock.now()
            queued = [r for r in self._live.values() if r.state is TaskState.QUEUED]
            rate = self.head_env.ageing_per_hour
            demand = tuple(
                GangDemand(
                    r.task_id, r.spec.group, r.spec.bundles, r.spec.bundle, r.spec.accelerators,
                    score(self._waiting(r), rate, now_s), now_s - r.submitted_s,
                )
                for r in sorted(queued, key=lambda r: order_key(self._waiting(r), rate))
            )  # fmt: skip
            return HeadView(
                now_s,
                self._book.node_views(),
                self._book.loads(self._hub, now_s),
                demand,
                running_tasks=sum(1 for r in self._live.values() if r.holds),
                waiting_tasks=len(queued),
            )

    def busy(self) -> bool:
        """Whether any task waits or runs."""
        with self._lock:
            return bool(self._live)

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
            ask = _ask(record.spec)
            found = tried.get(ask)
            if found is None:
                found = fit(ask, [room for i, room in rooms.items() if i not in kept])
            if isinstance(found, Placement):
                occupy(rooms, ask, found)
                places = tuple(
                    Place(n, *self._book.place_labels(n), devices=d)
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
        envs = {**r.spec.envs, "AREAL_SKY_TOKEN": self._task_token}
        return [
            RankStart(rank, r.spec.command, r.spec.payload, dict(envs), r.spec.kind)
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
        for e in events:
            fresh[e.task_id] = tasklife.apply(fresh.get(e.task_id) or self._records.get(e.task_id), e)
        self._journal.append(events)
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

    def _known(self, task_id: str) -> TaskRecord:
        record = self._records.get(task_id)
        if record is None:
            raise NotFound(f"no task {task_id[:40]!r} in cluster {self.head_env.cluster}")
        return record

    def _weight(self, spec: TaskSpec) -> float:
        model_type = spec.model_type or self._model_types.get(spec.model or "")
        return self._weights.get(model_type or "", 1.0)

    def _waiting(self, r: TaskRecord) -> Waiting:
        return Waiting(r.task_id, r.number, r.spec.priority, self._weight(r.spec), r.submitted_s)

    def _check(self, spec: TaskSpec) -> None:
        groups = [g.name for g in self.head_env.groups]
        if groups and spec.group is not None and spec.group not in (*groups, HEAD_GROUP):
            raise InvalidInput(f"group: there is no group {spec.group!r} (known: {', '.join(groups)})")
        ask = _ask(spec)
        if isinstance(fit(ask, self._book.whole_rooms()), Placement):
            return
        why_never = could_ever_fit(ask, self.head_env.groups, self.head_env.shape)
        if why_never is not None:
            raise Refused(why_never)

    def _submit_answer(self, r: TaskRecord) -> dict[str, Any]:
        status = "QUEUED" if r.state is TaskState.QUEUED else "SCHEDULED"
        return {"task_id": r.task_id, "status": status, "reason": self._reason(r)}

    def _reason(self, r: TaskRecord) -> str:
        if r.state is TaskState.QUEUED:
            return self._why_waiting.get(r.task_id) or r.reason or "it has not been looked at yet"
        return r.stop_reason if r.holds else r.reason

    def _view(self, r: TaskRecord, now_s: float) -> dict[str, Any]:
        points = score(self._waiting(r), self.head_env.ageing_per_hour, now_s)
        return tasklife.view(
            r, weight=self._weight(r.spec), score=points if r.state is TaskState.QUEUED else None,
            reason=self._reason(r), metrics=self._metrics.get(r.task_id, {}), now_s=now_s,
        )  # fmt: skip


def _ask(spec: TaskSpec) -> Ask:
    return Ask(spec.bundle, spec.bundles, spec.group, spec.accelerators)


def _same_submit(old: TaskSpec, new: TaskSpec) -> bool:
    return new.submit_key is not None and old.submit_key == new.submit_key
