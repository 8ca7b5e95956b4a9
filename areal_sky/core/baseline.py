"""What is usual of a series, and how far from it something is; robust, so that a few odd values change nothing."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

# MAD x 1.4826 is the standard deviation of a normal series (Rousseeuw and Croux, 1993).
MAD_TO_SIGMA = 1.4826


class Usual(NamedTuple):
    """The middle of a series and its spread, as a standard deviation."""

    median: float
    sigma: float


def usual(values: Sequence[float]) -> Usual:
    """Median and scaled median absolute deviation. Raises ValueError on no values."""
    if not values:
        raise ValueError("no values")
    median = statistics.median(values)
    return Usual(median, MAD_TO_SIGMA * statistics.median([abs(v - median) for v in values]))


class Trend(NamedTuple):
    """Slope per second, of all and of the later half; `rising` is the share of pairs that rise less that which fall
    (Kendall's tau, -1..1).
    """

    slope: float
    late_slope: float
    rising: float


def trend(points: Sequence[tuple[float, float]]) -> Trend:
    """The trend of (seconds, value) points, oldest first: the median slope of all pairs (Theil, 1950; Sen, 1968).

    Raises ValueError on fewer than 4 points.
    """
    if len(points) < 4:
        raise ValueError("too few points for a trend")
    slopes = _slopes(points)
    rising = sum((s > 0) - (s < 0) for s in slopes) / len(slopes)
    return Trend(statistics.median(slopes), statistics.median(_slopes(points[len(points) // 2 :])), rising)


def _slopes(points: Sequence[tuple[float, float]]) -> list[float]:
    return [
        (v2 - v1) / (t2 - t1)
        for i, (t1, v1) in enumerate(points)
        for t2, v2 in points[i + 1 :]
        if t2 > t1
    ] or [0.0]  # fmt: skip


class Series:
    """The latest values of a series over `span_s`, one per `every_s` at most; bounded."""

    __slots__ = ("_every_s", "_span_s", "points")

    def __init__(self, span_s: float, every_s: float):
        self._span_s = span_s
        self._every_s = every_s
        self.points: deque[tuple[float, float]] = deque()

    @property
    def next_s(self) -> float:
        """When it takes a value again."""
        return self.points[-1][0] + self._every_s if self.points else -math.inf

    def add(self, t_s: float, value: float) -> bool:
        """Takes the value unless the latest is too young for another; True when it did."""
        points = self.points
        if points and t_s - points[-1][0] < self._every_s:
            return False
        points.append((t_s, value))
        while points[0][0] < t_s - self._span_s:
            points.popleft()
        return True

    def since(self, t_s: float) -> list[float]:
        """The values at or after that time, latest first."""
        found: list[float] = []
        for t, v in reversed(self.points):
            if t < t_s:
                break
            found.append(v)
        return found

    def before(self, t_s: float) -> list[float]:
        """The values before that time, oldest first."""
        return [v for t, v in self.points if t < t_s]
