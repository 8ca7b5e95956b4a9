"""The in-cluster task service: queue, gangs, attempts.

Every method here may be called from any thread and only reads or records: nobody waits for Ray, which only `tick`
(see run/dispatch.py) talks to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from areal_sky.core import tasklife, usage
from areal_sky.core.model import HEAD_GROUP, GangDemand
from areal_sky.core.permitted import could_ever_fit
from areal_sky.core.placement import Placement, fit
from areal_sky.core.queueing import explain, in_order, order_key, score
from areal_sky.core.taskevents import Draining, Ended, Stopping, Submitted, TaskEvent, tell
from areal_sky.core.tasklife import TaskRecord
from areal_sky.core.taskmodel import TaskSpec, TaskState
from areal_sky.core.usage import Usage
from areal_sky.core.view import HeadView
from areal_sky.errors import InvalidInput, NotFound, Refused, Unreachable
from areal_sky.run.dispatch import Dispatch, ask_of

MAX_METRICS = 100  # values per report
STALE_S = 10.0  # a view older than this is none


class TaskService(Dispatch):
    """What people, tasks and the controller may ask. `hub` (run/hub.py) gives the GPU loads."""

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
            if self._book.seen_s is not None and self._adopted:
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
        """Nodes, loads and unmet demand, as of the latest tick.

        Raises Unreachable when that was too long ago: nobody shall take old news for dead or idle nodes.
        """
        with self._lock:
            now_s = self._clock.now()
            seen_s = self._book.seen_s
            if seen_s is None or now_s - seen_s > STALE_S:
                since = "yet" if seen_s is None else f"for {now_s - seen_s:.0f} s"
                raise Unreachable(f"the head has not seen Ray {since}")
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
                seen_s,
                self._book.node_views(),
                self._book.loads(self._hub, now_s),
                demand,
                running_tasks=sum(1 for r in self._live.values() if r.holds),
                waiting_tasks=len(queued),
            )

    def usage(self, since_s: float = 0.0) -> Usage:
        """Who held which part of which node: all holds that were open at or after `since_s` (Unix time)."""
        with self._lock:
            now_s = self._clock.now()
            past = self._past_holds[:]
            held = [h for r in self._live.values() for h in usage.holds(r, None)]
        return Usage(now_s, (*(h for h in past if h.until_s is None or h.until_s >= since_s), *held))

    def busy(self) -> bool:
        """Whether any task waits or runs."""
        with self._lock:
            return bool(self._live)

    # ---------------------------------------------------------------- how

    def _known(self, task_id: str) -> TaskRecord:
        record = self._records.get(task_id)
        if record is None:
            raise NotFound(f"no task {task_id[:40]!r} in cluster {self.head_env.cluster}")
        return record

    def _check(self, spec: TaskSpec) -> None:
        groups = [g.name for g in self.head_env.groups]
        if groups and spec.group is not None and spec.group not in (*groups, HEAD_GROUP):
            raise InvalidInput(f"group: there is no group {spec.group!r} (known: {', '.join(groups)})")
        ask = ask_of(spec)
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


def _same_submit(old: TaskSpec, new: TaskSpec) -> bool:
    return new.submit_key is not None and old.submit_key == new.submit_key
