"""The recent load of one GPU in few bytes, and the same in a few points for a picture."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from areal_sky.core.telemetry import Validity


class Point(NamedTuple):
    """One window, or a minute of them: the mean utilization (0..1; None: not known) from `start_s` to `end_s`."""

    start_s: float
    end_s: float
    utilization_mean: float | None
    validity: Validity = Validity.KNOWN  # of the latest window; older ones count by their mean alone


class Series:
    """The last `keep` points, oldest first: 24 bytes each, and for a while a quarter more of them."""

    __slots__ = ("_ends", "_keep", "_means", "_starts")

    def __init__(self, keep: int):
        self._keep = keep
        self._starts, self._ends, self._means = array("d"), array("d"), array("d")

    def extend(self, starts_s: Sequence[float], ends_s: Sequence[float], means: Sequence[float | None]) -> None:
        self._starts.extend(starts_s)
        self._ends.extend(ends_s)
        self._means.extend([math.nan if m is None else m for m in means])
        if len(self._ends) >= self._keep + max(1, self._keep // 4):
            for column in (self._starts, self._ends, self._means):
                del column[: -self._keep]

    def since(self, from_s: float) -> list[Point]:
        """Points that ended after `from_s`, oldest first; the latest one in any case."""
        first = max(0, len(self._ends) - self._keep)
        i = len(self._ends)
        while i > first and (self._ends[i - 1] > from_s or i == len(self._ends)):
            i -= 1
        return [
            Point(s, e, None if math.isnan(m) else m)
            for s, e, m in zip(self._starts[i:], self._ends[i:], self._means[i:], strict=True)
        ]


def per_second(points: Iterable[Point], seconds: float, now_s: float) -> list[float | None]:
    """One value per second, oldest first: that of the window over the middle of the second."""
    slots: list[float | None] = [None] * max(0, int(seconds))
    for p in points:
        # A little wider than the window, since heartbeats' travel times shift neighbours apart by some milliseconds.
        first = max(0, math.ceil(now_s - p.end_s - 0.55))
        last = min(len(slots) - 1, math.floor(now_s - p.start_s - 0.45))
        for age in range(first, last + 1):
            slots[-1 - age] = p.utilization_mean
    return slots


def in_slots(points: Sequence[Point], slots: int, from_s: float, to_s: float) -> list[float | None]:
    """Means over equal parts of a longer time, oldest first; None where nothing is known."""
    sums, weights = [0.0] * slots, [0.0] * slots
    width_s = (to_s - from_s) / max(1, slots)
    for p in points:
        if p.utilization_mean is None:
            continue
        first = max(0, math.floor((p.start_s - from_s) / width_s))
        last = min(slots - 1, math.floor((p.end_s - from_s) / width_s))
        for slot in range(first, last + 1):
            left_s = from_s + slot * width_s
            overlap_s = min(p.end_s, left_s + width_s) - max(p.start_s, left_s)
            if overlap_s > 0:
                sums[slot] += p.utilization_mean * overlap_s
                weights[slot] += overlap_s
    return [s / w if w > 0 else None for s, w in zip(sums, weights, strict=True)]
