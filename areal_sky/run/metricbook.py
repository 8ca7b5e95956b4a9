"""The latest values that tasks have reported of themselves; every report goes to the journal."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping

from areal_sky.errors import InvalidInput
from areal_sky.run.journal import Journal

MAX_METRICS = 100  # values per report
RECENT = 1000  # tasks whose values are kept in memory
REPORTS = 200  # how many reports back the latest value of something is looked for


class MetricBook:
    """For the threads of one process, which share one lock outside."""

    def __init__(self, journal: Journal):
        self._journal = journal
        self._latest: OrderedDict[str, dict[str, float]] = OrderedDict()
        self._due: list[tuple[str, float, int, Mapping[str, float]]] = []

    def take(self, task_id: str, attempt: int, metrics: Mapping[str, float], now_s: float) -> None:
        """Adds a report; on disk with the next `write`. Raises InvalidInput: too many values, or no finite number."""
        _check(metrics)
        values = {str(k)[:64]: float(v) for k, v in metrics.items()}
        self._keep(task_id, {**self.of(task_id), **values})
        self._due.append((task_id, now_s, attempt, values))

    def write(self) -> None:
        """Raises StateError; what could not be written is written next time."""
        if self._due:
            self._journal.append_metrics(self._due)
            self._due = []

    def of(self, task_id: str) -> dict[str, float]:
        """The latest value of everything that the task has reported. Raises StateError."""
        known = self._latest.get(task_id)
        if known is None:
            known = {}
            for _, _, _, values in self._journal.metrics(task_id, limit=REPORTS):
                known.update(values)
            self._keep(task_id, known)
        return known

    def _keep(self, task_id: str, values: dict[str, float]) -> None:
        self._latest[task_id] = values
        self._latest.move_to_end(task_id)
        while len(self._latest) > RECENT:
            self._latest.popitem(last=False)


def _check(metrics: Mapping[str, float]) -> None:
    """Raises InvalidInput for too many values, or one that is no finite number."""
    if len(metrics) > MAX_METRICS:
        raise InvalidInput(f"more than {MAX_METRICS} metrics in one report")
    for name, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidInput(f"metric {name[:40]!r} is not a finite number")
