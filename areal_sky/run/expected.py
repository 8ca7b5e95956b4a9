"""How long a task with a deadline is expected to run where its user has not said: as others like it have run.

Its slack is the time to the deadline less that. Tasks are alike that have the same kind, model, size and name (numbers
in it aside). Nothing is expected of a task before one like it has ended well.
"""

from __future__ import annotations

from collections.abc import Hashable

from areal_sky.core.prediction import MOST_LIKENESSES, RunningTimes, likeness_name
from areal_sky.core.tasklife import TaskRecord
from areal_sky.core.taskmodel import TaskState


class Expected:
    """Learns from every task that ends; remembers living ones only where they were asked about."""

    def __init__(self) -> None:
        self._times = RunningTimes()
        self._known: dict[Hashable, None] = {}  # kinds of tasks of which one has ended well, the latest last

    def estimate_s(self, r: TaskRecord) -> float | None:
        """Running time from its start to its end, in seconds: the user's, else the median of what is expected."""
        if r.spec.estimate_s is not None or r.spec.deadline_s is None:
            return r.spec.estimate_s
        likeness = _likeness(r)
        if likeness not in self._known:
            return None
        self._times.submitted(r.task_id, likeness, r.submitted_s)
        return r.served_s + self._times.remaining(r.task_id, r.served_s).median_s

    def ended(self, r: TaskRecord) -> None:
        """The task has ended, in whatever way."""
        likeness = _likeness(r)
        finished = r.state is TaskState.SUCCEEDED and r.started_s is not None and r.ended_s is not None
        ran_s = max(0.0, r.ended_s - r.started_s) if r.ended_s is not None and r.started_s is not None else 0.0
        if finished:
            self._times.submitted(r.task_id, likeness, r.submitted_s)
            self._known.pop(likeness, None)
            self._known[likeness] = None
            if len(self._known) > MOST_LIKENESSES:
                del self._known[next(iter(self._known))]
        self._times.ended(r.task_id, ran_s, finished=finished)


def _likeness(r: TaskRecord) -> Hashable:
    spec = r.spec
    return spec.kind, spec.model, spec.bundles * spec.bundle.gpus, likeness_name(spec.title)
