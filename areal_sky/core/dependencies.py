"""Which tasks wait for which: names and ids become ranges of task numbers, and circles are found.

Tasks are numbered in the order in which they were submitted, and the copies of an array have numbers in a row; so
"all copies of t5" is the range `t5..t9`, however many there are. What a task waits for was there before it (or came
with it), so only tasks that are submitted together can wait for each other in a circle.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from areal_sky.core.taskmodel import TaskSpec, TaskState
from areal_sky.errors import InvalidInput

Numbers = tuple[int, int]  # first and last task number
Lookup = Callable[[str], Numbers | None]  # a task's id or name -> its number, or those of its array
_REF = re.compile(r"t(\d{1,15})(?:\.\.t(\d{1,15}))?")


def reference(numbers: Numbers) -> str:
    """`t5`, or `t5..t9`."""
    first, last = numbers
    return f"t{first}" if first == last else f"t{first}..t{last}"


def numbers_of(after: Iterable[str]) -> Iterator[int]:
    """The task numbers that looked-up references stand for."""
    for ref in after:
        first, last = as_numbers(ref) or (1, 0)
        yield from range(first, last + 1)


def as_numbers(ref: str) -> Numbers | None:
    """What `t5` or `t5..t9` says; None for a name."""
    found = _REF.fullmatch(ref)
    return (int(found[1]), int(found[2] or found[1])) if found else None


def expanded(specs: Sequence[TaskSpec]) -> list[TaskSpec]:
    """An array as its copies, each with its `array_index`; all else as it is."""
    tasks: list[TaskSpec] = []
    for spec in specs:
        if spec.array is None:
            tasks.append(spec)
        else:
            tasks += [replace(spec, array_index=i) for i in range(spec.array)]
    return tasks


def looked_up(specs: Sequence[TaskSpec], first_number: int, lookup: Lookup) -> list[TaskSpec]:
    """The specs of one submit (arrays not expanded yet), with all of `after` as references to task numbers.

    A name means the tasks of that name in the same submit, else the latest one before it. `lookup` knows what was
    there before. Raises InvalidInput that lists every unknown reference and the first circle.
    """
    wrong: list[str] = []
    ranges: list[Numbers] = []
    number = first_number
    for spec in specs:
        ranges.append((number, number + (spec.array or 1) - 1))
        number += spec.array or 1
    by_name: dict[str, list[int]] = {}
    for i, spec in enumerate(specs):
        if spec.name:
            by_name.setdefault(spec.name, []).append(i)
    waits_for: list[list[int]] = [[] for _ in specs]
    found: list[TaskSpec] = []
    for i, spec in enumerate(specs):
        refs: list[str] = []
        for ref in spec.after:
            here = by_name.get(ref, ())
            # Its own name is an earlier task's where there is one: "once more, after the last of them".
            before = lookup(ref) if i in here or not here else None
            if before is not None:
                refs.append(reference(before))
            elif here:
                waits_for[i] += here
                refs += [reference(ranges[k]) for k in here]
            else:
                what = _who(spec, i) if len(specs) > 1 else ""
                wrong.append(f"{what}after: there is no task {ref[:60]!r}")
        found.append(replace(spec, after=tuple(dict.fromkeys(refs))) if refs else spec)
    circle = _circle(waits_for)
    if circle:
        names = [specs[i].name for i in circle]
        wrong.append(f"after: {' waits for '.join([*names, names[0]])}: a circle, none of them could ever start")
    if wrong:
        raise InvalidInput("\n".join(wrong))
    return found


def _who(spec: TaskSpec, index: int) -> str:
    return f"{spec.name or f'task {index + 1}'}: "


def _circle(waits_for: Sequence[Sequence[int]]) -> list[int]:
    """Indices around one circle, in waiting order; empty when there is none."""
    left = {i: set(deps) for i, deps in enumerate(waits_for)}
    needed_by: dict[int, list[int]] = {}
    for i, deps in left.items():
        for d in deps:
            needed_by.setdefault(d, []).append(i)
    free = [i for i, deps in left.items() if not deps]
    while free:
        i = free.pop()
        del left[i]
        for j in needed_by.get(i, ()):
            left[j].discard(i)
            if not left[j]:
                free.append(j)
    if not left:
        return []
    path = [min(left)]  # each of what is left waits for another of them, so the path must come back
    while True:
        following = min(left[path[-1]])
        if following in path:
            return path[path.index(following) :]
        path.append(following)


class Waits:
    """Which waiting tasks wait for others, and who is freed or lost as those end. Deterministic, no I/O.

    Ranges are shared: a hundred thousand copies that wait for a hundred thousand others cost one entry each.
    """

    def __init__(self) -> None:
        self._open: dict[Numbers, int] = {}  # how many of the range have not succeeded yet
        self._waiters: dict[Numbers, dict[str, None]] = {}
        self._needs: dict[str, int] = {}  # open ranges per waiting task
        self._wide: set[Numbers] = set()

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._needs

    def add(self, task_id: str, after: Iterable[str], state: Callable[[int], TaskState | None]) -> int | None:
        """Makes the task wait for what has not succeeded yet. The number of one that never will, or None."""
        ranges = [numbers for ref in after if (numbers := as_numbers(ref)) is not None]
        for numbers in ranges:
            if numbers not in self._open:
                states = [(n, state(n)) for n in range(numbers[0], numbers[1] + 1)]
                failed = next((n for n, s in states if s in _NEVER), None)
                if failed is not None:
                    return failed
                self._open[numbers] = sum(s is not TaskState.SUCCEEDED for _, s in states)
                if not self._open[numbers]:
                    del self._open[numbers]
                    continue
                if numbers[0] < numbers[1]:
                    self._wide.add(numbers)
            self._waiters.setdefault(numbers, {})[task_id] = None
            self._needs[task_id] = self._needs.get(task_id, 0) + 1
        return None

    def ended(self, number: int, state: TaskState) -> tuple[list[str], list[str]]:
        """(tasks that wait for nothing any more, tasks that wait in vain) now that this one has ended."""
        freed: list[str] = []
        lost: dict[str, None] = {}
        touched = [numbers for numbers in self._wide if numbers[0] <= number <= numbers[1]]
        if (number, number) in self._open:
            touched.append((number, number))
        for numbers in touched:
            if state is TaskState.SUCCEEDED:
                self._open[numbers] -= 1
                if self._open[numbers]:
                    continue
            for task_id in self._close(numbers):
                if state is not TaskState.SUCCEEDED:
                    lost[task_id] = None
                elif task_id in self._needs:
                    self._needs[task_id] -= 1
                    if not self._needs[task_id]:
                        del self._needs[task_id]
                        freed.append(task_id)
        for task_id in lost:
            self.forget(task_id)
        return freed, list(lost)

    def forget(self, task_id: str) -> None:
        """The task waits no longer (it was cancelled)."""
        self._needs.pop(task_id, None)

    def left(self, ref: str) -> int:
        """How many of a reference's tasks have not succeeded yet."""
        numbers = as_numbers(ref)
        return 0 if numbers is None else self._open.get(numbers, 0)

    def _close(self, numbers: Numbers) -> Iterable[str]:
        del self._open[numbers]
        self._wide.discard(numbers)
        return self._waiters.pop(numbers, {})


_NEVER = frozenset({TaskState.FAILED, TaskState.CANCELLED, None})
