"""Waiting tasks that no room would help: they wait for other tasks, or for the pause after a failure to end."""

from __future__ import annotations

import heapq
import random

from areal_sky.core.dependencies import Waits, as_numbers
from areal_sky.core.failures import MAX_BACKOFF_S
from areal_sky.core.taskevents import Ended, TaskEvent
from areal_sky.core.tasklife import TaskRecord
from areal_sky.core.taskmodel import TaskState
from areal_sky.run.taskbook import TaskBook


def jitter() -> float:
    """The factor of a pause: what failed together shall not come back together."""
    return random.uniform(0.8, 1.2)


class Pending:
    """For the threads of one process, which share one lock outside."""

    def __init__(self, tasks: TaskBook):
        self._tasks = tasks
        self._waits = Waits()
        self._later: list[tuple[float, str]] = []  # (not before, task)
        self._in_vain: list[tuple[str, TaskRecord]] = []  # (task, the one that it waits for and that ended badly)

    def add(self, r: TaskRecord, now_s: float) -> bool:
        """Whether the waiting task has to wait for something here. Raises StateError."""
        if r.attempt == 0 and r.spec.after:
            failed = self._waits.add(r.task_id, r.spec.after, self._tasks.state)
            if failed is not None:
                bad = self._tasks.get(f"t{failed}")
                assert bad is not None, "its number was looked up"
                self._in_vain.append((r.task_id, bad))
            if failed is not None or r.task_id in self._waits:
                return True
        if r.not_before_s > now_s:
            heapq.heappush(self._later, (r.not_before_s, r.task_id))
            return True
        return False

    def ended(self, r: TaskRecord) -> list[TaskRecord]:
        """The task has ended: those that wait for nothing any more because of it."""
        self._waits.forget(r.task_id)
        freed, lost = self._waits.ended(r.number, r.state)
        self._in_vain += [(waiter, r) for waiter in lost]
        return [self._tasks.waiting[t] for t in freed if t in self._tasks.waiting]

    def due(self, now_s: float) -> list[TaskRecord]:
        """Those whose pause has ended."""
        found: list[TaskRecord] = []
        # No pause is that long: the clock was set back meanwhile.
        too_far_s = now_s + 2 * MAX_BACKOFF_S
        while self._later and not now_s < self._later[0][0] <= too_far_s:
            r = self._tasks.waiting.get(heapq.heappop(self._later)[1])
            if r is not None and not now_s < r.not_before_s <= too_far_s:
                found.append(r)
        return found

    def in_vain(self, now_s: float) -> list[TaskEvent]:
        """The ends of those that wait for something that will never be; to be recorded, until there are none."""
        events: dict[str, TaskEvent] = {}
        for task_id, bad in self._in_vain:
            if task_id in self._tasks.waiting:
                name = f"{bad.task_id} ({bad.spec.name})" if bad.spec.name else bad.task_id
                cancelled = bad.state is TaskState.CANCELLED
                reason = f"{name}, which it waited for, {'was cancelled' if cancelled else 'failed'}"
                state = TaskState.CANCELLED if cancelled else TaskState.FAILED
                events[task_id] = TaskEvent(now_s, task_id, Ended(state, reason))
        self._in_vain = []
        return list(events.values())

    def why(self, r: TaskRecord, now_s: float) -> str:
        """What the task waits for here; empty when nothing."""
        if r.task_id in self._waits:
            left = [self._words(ref) for ref in r.spec.after if self._waits.left(ref)]
            return f"it comes after {', '.join(left)}"
        if r.not_before_s > now_s:
            return f"{r.reason}; not before {r.not_before_s - now_s:.0f} s from now"
        return ""

    def _words(self, ref: str) -> str:
        first, last = as_numbers(ref) or (0, 0)
        task = self._tasks.live(f"t{first}")
        name = f" ({task.spec.name})" if task is not None and task.spec.name else ""
        return f"{ref}{name}" + (f", {self._waits.left(ref)} of them left" if first < last else "")
