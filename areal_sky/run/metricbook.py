"""The latest values that tasks have reported of themselves; every report goes to the journal, with its time."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping

from areal_sky.errors import InvalidInput
from areal_sky.run.journal import Journal
from areal_sky.units import format_duration

MAX_METRICS = 100  # values per report
RECENT = 1000  # tasks whose values are kept in memory
REPORTS = 200  # how many reports back the latest value of something is looked for
SHOWN = 12  # metrics in a task's story
KEEP_ROWS = 500_000  # reports on disk, about 100 MB
TRIM_EVERY = 10_000  # reports


class MetricBook:
    """For the threads of one process, which share one lock outside."""

    def __init__(self, journal: Journal):
        self._journal = journal
        self._latest: OrderedDict[str, dict[str, float]] = OrderedDict()
        self._due: list[tuple[str, float, int, Mapping[str, float | None]]] = []
        self._written = 0

    def take(self, task_id: str, attempt: int, metrics: Mapping[str, float], now_s: float) -> dict[str, float]:
        """Adds a report and returns its values; on disk with the next `write`. What is NaN or infinite is not known
        from then on. Raises InvalidInput: too many values, or what is no number.
        """
        _check(metrics)
        values = {str(k)[:64]: float(v) for k, v in metrics.items()}
        latest = {k: v for k, v in {**self.of(task_id), **values}.items() if math.isfinite(v)}
        self._keep(task_id, latest)
        self._due.append((task_id, now_s, attempt, {k: v if math.isfinite(v) else None for k, v in values.items()}))
        return values

    def write(self) -> None:
        """Raises StateError; what could not be written is written next time."""
        if self._due:
            self._journal.append_metrics(self._due)
            self._written += len(self._due)
            self._due = []
            if self._written >= TRIM_EVERY:
                self._written = 0
                self._journal.trim_metrics(KEEP_ROWS)

    def of(self, task_id: str) -> dict[str, float]:
        """The latest value of everything that the task has reported. Raises StateError."""
        known = self._latest.get(task_id)
        if known is None:
            told: dict[str, float | None] = {}
            for _, _, _, values in self._journal.metrics(task_id, limit=REPORTS):
                told.update(values)
            known = {k: v for k, v in told.items() if v is not None}
            self._keep(task_id, known)
        return known

    def at_hand(self, task_id: str) -> Mapping[str, float]:
        """As `of`, without a look at the disk: of the tasks that have reported latest."""
        return self._latest.get(task_id, {})

    def words(self, task_id: str) -> tuple[float, str] | None:
        """(when, what) the task has reported of late, for its story: each value, and between what it was before."""
        rows = self._journal.metrics(task_id, limit=REPORTS)
        series: dict[str, list[float | None]] = {}
        for _, _, _, values in rows:
            for name, value in values.items():
                series.setdefault(name, []).append(value)
        if not rows:
            return None
        over_s = rows[-1][1] - rows[0][1]
        lately = f"the latest {len(rows)} within {format_duration(round(over_s))}" if len(rows) > 1 else "once"
        told = [_between(name, values) for name, values in list(series.items())[:SHOWN]]
        more = f", and {len(series) - SHOWN} more" if len(series) > SHOWN else ""
        return rows[-1][1], f"reported ({lately}): {', '.join(told)}{more}"

    def _keep(self, task_id: str, values: dict[str, float]) -> None:
        self._latest[task_id] = values
        self._latest.move_to_end(task_id)
        while len(self._latest) > RECENT:
            self._latest.popitem(last=False)


def _between(name: str, values: list[float | None]) -> str:
    known = [v for v in values if v is not None]
    now = "no number" if values[-1] is None else f"{values[-1]:.4g}"
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    return f"{name} {now}" + (f" ({low:.4g} to {high:.4g})" if low < high else "")


def _check(metrics: Mapping[str, float]) -> None:
    """Raises InvalidInput for too many values, or one that is no number."""
    if len(metrics) > MAX_METRICS:
        raise InvalidInput(f"more than {MAX_METRICS} metrics in one report")
    for name, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidInput(f"metric {str(name)[:40]!r} is not a number")
