"""The in-cluster task service: queue, gangs, attempts.

Every method here may be called from any thread and only reads or records: nobody waits for Ray, which only `tick`
(see run/dispatch.py) talks to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal_sky.core.dependencies import reference
from areal_sky.core.model import GangDemand
from areal_sky.core.taskevents import Checkpointed, Draining, Ended, PhaseChanged, Stopping, TaskEvent, tell
from areal_sky.core.tasklife import TaskRecord
from areal_sky.core.taskmodel import TaskSpec, TaskState
from areal_sky.core.taskview import view
from areal_sky.core.usage import Usage
from areal_sky.core.view import HeadView
from areal_sky.errors import InvalidInput, NotFound, Refused, Unreachable
from areal_sky.run.lending import borrowers
from areal_sky.run.submission import submitted
from areal_sky.run.tending import Tending

MAX_REASONS = 100  # that the answer to one submit tells; `story` tells the others
MAX_DEMAND = 1000  # gangs that scaling is told of; the first in the queue
STALE_S = 10.0  # a view older than this is none


class TaskService(Tending):
    """What people, tasks and the controller may ask. `hub` (run/hub.py) gives the GPU loads."""

    def submit(self, spec: TaskSpec) -> dict[str, Any]:
        """{"task_id", "status", "reason", "warnings"}; SCHEDULED: placed at once, else QUEUED with the reason.

        An array answers for its first copy, with all of them as "task_ids" (`t5..t9`). Raises as `submit_many`.
        """
        answer = self.submit_many([spec])
        return {**answer["tasks"][0], "warnings": answer["warnings"]}

    def submit_many(self, specs: Sequence[TaskSpec]) -> dict[str, Any]:
        """Queues all of them, or none, in one transaction: {"tasks": one answer per spec, "warnings": [...]}.

        Of more than 100, the answers after the first 100 leave their reasons to `story`.

        They may wait for each other (`after`) by name. A spec whose `submit_key` is known is not queued again.
        Raises InvalidInput, Refused for a gang that the cluster at its largest could not run (or for a deadline that
        cannot be met where `if_late` is `refuse`), AlreadyExists for a known key with other work, StateError.
        """
        with self._lock:
            now_s = self._clock.now()
            rooms, learnt = self._book.whole_rooms(), self._peaks.corrections()
            submission = submitted(specs, self._tasks, rooms, self.head_env, now_s, learnt)
            for r in self._record(*submission.events).values():
                self._queue(r)
            self._settle(now_s)
            if submission.events and self._book.seen_s is not None and self._adopted:
                self._place(now_s)
                self.news.set()
            tasks = [
                self._submit_answer(task_id, copies, now_s, tell=i < MAX_REASONS)
                for i, (task_id, copies) in enumerate(submission.tasks)
            ]
            return {"tasks": tasks, "warnings": submission.warnings}

    def get(self, task_id: str) -> dict[str, Any]:
        """The task as JSON (core/tasklife.view). Raises NotFound."""
        with self._lock:
            return self._view(self._known(task_id), self._clock.now())

    def list(
        self,
        state: str | None = None,
        labels: Mapping[str, str] | None = None,
        limit: int | None = None,
        explain: bool = False,
    ) -> list[dict[str, Any]]:
        """Holding tasks by start, then waiting ones next first, then the latest 1,000 that ended, latest first.

        `state`: a task state, or `active` for all that have not ended. `labels`: only tasks that have all of these.
        `explain`: waiting tasks tell every term of their place in the order ("terms"). Raises InvalidInput.
        """
        states = {s.value for s in TaskState}
        if state is not None and state.upper() not in states | {"ACTIVE"}:
            raise InvalidInput(f"state {state!r} is none of active, {', '.join(sorted(states)).lower()}")
        with self._lock:
            now_s = self._clock.now()
            place = {task_id: i for i, task_id in enumerate(self._admitting.waiting_ids())}

            def order(r: TaskRecord) -> tuple[float, ...]:
                if r.ended:
                    return (3, -(r.ended_s or 0), -r.number)
                if r.holds:
                    return (0, r.since_s, r.number)
                return (1, place[r.task_id]) if r.task_id in place else (2, r.number)

            asked = set((labels or {}).items())
            wanted = [
                r
                for r in self._tasks
                if (state is None or r.state.value == state.upper() or (state.upper() == "ACTIVE" and not r.ended))
                and asked <= set(r.spec.labels.items())
            ]
            shown = sorted(wanted, key=order)[:limit]
            terms = {r.task_id: self._admitting.terms(r, now_s) for r in shown if r.task_id in place} if explain else {}
            return [{**self._view(r, now_s), "terms": terms.get(r.task_id, "")} for r in shown]

    def story(self, task_id: str) -> list[dict[str, Any]]:
        """What happened to the task, oldest first, ending with what it waits for. Raises NotFound, StateError."""
        with self._lock:
            now_s = self._clock.now()
            record = self._known(task_id)
            lines = [{"t_s": e.t_s, "text": tell(e)} for e in self._journal.read(task_id)]
            self._metrics.write()
            if (reported := self._metrics.words(task_id)) is not None:
                lines.append({"t_s": reported[0], "text": reported[1]})
            if self.alert_lines is not None:
                lines += [{"t_s": t_s, "text": text} for t_s, text in self.alert_lines(task_id)]
            lines.sort(key=lambda line: line["t_s"])
            if record.state is TaskState.QUEUED:
                if standing := self._admitting.standing(record, now_s):
                    lines.append({"t_s": now_s, "text": standing})
                lines.append({"t_s": now_s, "text": f"waits because {self._reason(record, now_s)}"})
            return lines

    def cancel(self, task_id: str) -> dict[str, Any]:
        """Ends the task: at once where it waits, by SIGTERM and after a grace SIGKILL where it runs.

        Cancelling what has ended changes nothing. Raises NotFound, StateError.
        """
        with self._lock:
            now_s = self._clock.now()
            record = self._known(task_id)
            if record.state is TaskState.QUEUED or (record.state is TaskState.PLACED and not record.starting):
                self._leave(record, now_s, Ended(TaskState.CANCELLED, "cancelled by the user"))
            elif record.holds and record.stop != "cancel":
                self._record(TaskEvent(now_s, task_id, Stopping("cancel", "cancelled by the user")))
            self._settle(now_s)
            self.news.set()
            return self._view(self._known(task_id), now_s)

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

    def track_metrics(self, task_id: str, metrics: Mapping[str, float], rank: int | None = None) -> None:
        """Records values that a task (or one rank of it) reports of itself; NaN and infinities are news, too.

        Written with the next tick. Raises NotFound, InvalidInput.
        """
        with self._lock:
            now_s, record = self._clock.now(), self._known(task_id)
            values = self._metrics.take(task_id, record.attempt, metrics, now_s)
        if self.on_report is not None:
            self.on_report(task_id, record.attempt, values, now_s, rank)

    def metrics(self, task_id: str, limit: int = 1000) -> list[dict[str, Any]]:
        """What it has reported of itself, oldest of the latest first. Raises NotFound, StateError."""
        with self._lock:
            self._known(task_id)
            self._metrics.write()
            rows = self._journal.metrics(task_id, limit)
        return [{"t_s": t_s, "attempt": attempt, "metrics": values} for _, t_s, attempt, values in rows]

    def checkpointed(self, task_id: str) -> None:
        """The task's work up to now is safe. Raises NotFound, Refused where it does not run, StateError."""
        with self._lock:
            self._report(task_id, Checkpointed())
            self._admitting.progress(task_id, self._clock.now())

    def enter_phase(self, task_id: str, name: str, low: bool) -> None:
        """The task is in this phase from now on; `low`: it leaves its GPUs idle meanwhile.

        Raises NotFound, InvalidInput, Refused where it does not run, StateError.
        """
        if not 1 <= len(name) <= 64 or not name.isprintable():
            raise InvalidInput("phase: expected a name of 1 to 64 printable characters")
        with self._lock:
            self._report(task_id, PhaseChanged(name, low))
            r = self._known(task_id)
            if r.started_s is not None:
                self._lend(r, self._clock.now())

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
                self._book.note(draining)
            return len(node_ids)

    def evict_replica(self, replica: str, reason: str) -> int:
        """Like `drain_replica` with a deadline of now: tasks there end and wait again at their old place."""
        with self._lock:
            now_s = self._clock.now()
            nodes = self.drain_replica(replica, reason, now_s)
            self._evict_overdue(now_s)
            return nodes

    def view(self) -> HeadView:
        """Nodes, loads and unmet demand, as of the latest tick.

        Raises Unreachable when that was too long ago: nobody shall take old news for dead or idle nodes.
        """
        with self._lock:
            now_s = self._clock.now()
            seen_s = self._book.seen_s
            if seen_s is None or now_s - seen_s > STALE_S:
                since = "yet" if seen_s is None else f"for {now_s - seen_s:.0f} s"
                raise Unreachable(f"the head has not seen Ray {since}")
            in_vain = self._admitting.no_machine_helps(self._tasks.holding.values())
            queued = [r for t in self._admitting.waiting_ids() if not in_vain(r := self._tasks.waiting[t])]
            demand = tuple(
                GangDemand(
                    r.task_id, r.spec.group, r.spec.fewest_bundles if r.spec.backends is None else ask.count,
                    ask.bundle, r.accelerators, self._admitting.score(r, now_s), now_s - r.submitted_s,
                )
                for r in queued[:MAX_DEMAND]
                for ask in (self._admitting.ask(r),)
            )  # fmt: skip
            return HeadView(
                seen_s,
                self._book.node_views(),
                self._book.loads(self._hub, now_s),
                demand,
                running_tasks=len(self._tasks.holding),
                waiting_tasks=len(self._tasks.waiting),
            )

    def usage(self, since_s: float = 0.0) -> Usage:
        """Who held which part of which node: all holds that were open at or after `since_s` (Unix time)."""
        with self._lock:
            now_s = self._clock.now()
            return Usage(now_s, tuple(self._tasks.holds(since_s)))

    def busy(self) -> bool:
        """Whether any task waits or runs."""
        with self._lock:
            return bool(self._tasks.holding or self._tasks.waiting)

    # ---------------------------------------------------------------- how

    def _known(self, task_id: str) -> TaskRecord:
        record = self._tasks.get(task_id)
        if record is None:
            raise NotFound(f"no task {task_id[:40]!r} in cluster {self.head_env.cluster}")
        return record

    def _report(self, task_id: str, fact: Checkpointed | PhaseChanged) -> None:
        record = self._known(task_id)
        if not record.holds:
            raise Refused(f"{task_id} does not run: it is {record.state.value.lower()}")
        if isinstance(fact, PhaseChanged) and (record.phase, record.phase_low) == (fact.name, fact.low):
            return
        self._record(TaskEvent(self._clock.now(), task_id, fact))

    def _submit_answer(self, task_id: str, copies: int, now_s: float, tell: bool) -> dict[str, Any]:
        r = self._known(task_id)
        status = "QUEUED" if r.state is TaskState.QUEUED else "SCHEDULED"
        answer = {"task_id": task_id, "status": status, "reason": self._reason(r, now_s) if tell else ""}
        if r.spec.array is not None:
            answer["task_ids"] = reference((r.number, r.number + copies - 1))
        return answer

    def _reason(self, r: TaskRecord, now_s: float) -> str:
        if r.state is TaskState.QUEUED:
            return self._why(r, now_s)
        return r.stop_reason if r.holds else r.reason

    def _view(self, r: TaskRecord, now_s: float) -> dict[str, Any]:
        queued = r.state is TaskState.QUEUED
        return view(
            r, weight=self._admitting.weight(r), score=self._admitting.score(r, now_s) if queued else None,
            reason=self._reason(r, now_s), metrics=self._metrics.of(r.task_id), now_s=now_s,
            borrowers=[x.task_id for x in borrowers(r, self._tasks.holding.values())] if r.holds else [],
        )  # fmt: skip
