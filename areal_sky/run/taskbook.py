"""The task records of this process: those that live, by what they do, and the latest that ended.

Journal first, memory after: what is not on disk has not happened. What ended longer ago is read from the journal when
somebody asks for it, so a head that has run a million tasks is no larger than one that has run a thousand.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from areal_sky.core import tasklife, usage
from areal_sky.core.dependencies import Numbers, as_numbers
from areal_sky.core.taskevents import TaskEvent
from areal_sky.core.tasklife import TaskRecord
from areal_sky.core.taskmodel import TaskState
from areal_sky.core.usage import Hold
from areal_sky.run.journal import Journal

RECENT = 1000  # ended tasks kept in memory
PAST_HOLDS = 20_000


class TaskBook:
    """For the threads of one process, which share one lock outside."""

    def __init__(self, journal: Journal, now_s: float):
        """Reads what lives, and the latest that ended. Raises StateError."""
        self._journal = journal
        records, self.node_facts = tasklife.fold(journal.read_live())
        self.waiting: dict[str, TaskRecord] = {}
        self.holding: dict[str, TaskRecord] = {}
        self.recent: OrderedDict[str, TaskRecord] = OrderedDict()
        for task_id in journal.latest_ended(RECENT):
            self.recent[task_id] = tasklife.fold(journal.read(task_id))[0][task_id]
        for r in records.values():
            self._file(r)
        self.last_number = journal.last_number()
        self._past_holds: deque[Hold] = deque(maxlen=PAST_HOLDS)
        self._holds_from_s = now_s  # what was released before is only in the journal

    def record(self, *events: TaskEvent) -> dict[str, TaskRecord]:
        """Writes the events and returns the records after them. Raises StateError: nothing has happened then."""
        fresh: dict[str, TaskRecord] = {}
        released: list[Hold] = []
        for e in events:
            before = fresh.get(e.task_id) or self.live(e.task_id)
            fresh[e.task_id] = tasklife.apply(before, e)
            released += usage.released(before, fresh[e.task_id])
        self._journal.append(events)
        for hold in released:
            if len(self._past_holds) == PAST_HOLDS:
                self._holds_from_s = (self._past_holds[0].until_s or 0.0) + 1e-6
            self._past_holds.append(hold)
        for r in fresh.values():
            self._file(r)
            self.last_number = max(self.last_number, r.number)
        return fresh

    def live(self, task_id: str) -> TaskRecord | None:
        """The record of a task that has not ended."""
        return self.holding.get(task_id) or self.waiting.get(task_id)

    def get(self, task_id: str) -> TaskRecord | None:
        """Any task that ever was. Raises StateError."""
        known = self.live(task_id) or self.recent.get(task_id)
        return known or tasklife.fold(self._journal.read(task_id))[0].get(task_id)

    def __iter__(self) -> Iterator[TaskRecord]:
        """Those that live, then the latest ended."""
        yield from self.holding.values()
        yield from self.waiting.values()
        yield from self.recent.values()

    def state(self, number: int) -> TaskState | None:
        """How the task with that number stands; None when there is none. Raises StateError."""
        r = self.live(f"t{number}") or self.recent.get(f"t{number}")
        return r.state if r is not None else self._journal.state(number)

    def by_key(self, submit_key: str) -> TaskRecord | None:
        """The (first) task that was submitted with that key."""
        task_id = self._journal.find(submit_key=submit_key)
        return None if task_id is None else self.get(task_id)

    def numbers(self, ref: str) -> Numbers | None:
        """The number of the task with that id or of the latest with that name; those of its array, where it is one."""
        numbers = as_numbers(ref)
        if numbers is not None:
            return numbers if numbers[0] >= 1 and numbers[0] <= numbers[1] <= self.last_number else None
        task_id = self._journal.find(name=ref)
        record = None if task_id is None else self.get(task_id)
        if record is None:
            return None
        if record.spec.array is None or record.spec.array_index is None:
            return record.number, record.number
        first = record.number - record.spec.array_index
        return first, first + record.spec.array - 1

    def holds(self, since_s: float) -> list[Hold]:
        """What tasks hold and held, all that was open at or after `since_s`. Raises StateError."""
        now = [h for r in self.holding.values() for h in usage.holds(r, None)]
        past: list[Hold] = list(self._past_holds)
        if since_s < self._holds_from_s:
            past = usage.past_holds(self._journal.read_live(ended_since_s=since_s))
        return [*(h for h in past if h.until_s is None or h.until_s >= since_s), *now]

    def _file(self, r: TaskRecord) -> None:
        self.waiting.pop(r.task_id, None)
        self.holding.pop(r.task_id, None)
        if r.ended:
            self.recent[r.task_id] = r
            while len(self.recent) > RECENT:
                self.recent.popitem(last=False)
        elif r.holds:
            self.holding[r.task_id] = r
        else:
            self.waiting[r.task_id] = r
