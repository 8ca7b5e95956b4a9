"""Memory that one run holds more and more of, until there is none left: of a GPU, or of a machine."""

from __future__ import annotations

from typing import NamedTuple

from areal_sky.core.baseline import Series, trend
from areal_sky.core.findings import Finding, Kind, Where
from areal_sky.units import format_duration

EVERY_S = 10.0
SPANS_S = (180.0, 420.0, 900.0)  # growth is looked for in the latest so many seconds
WARM_S = 120.0  # a task that starts fills its memory
HORIZON_S = 3600.0
WATCHED = 0.25  # of the time until memory runs out, growth must have been watched
RISING = 0.85  # nearly every pair of points rises: sawteeth and noise stay far below
GROWTH = 0.01  # of all memory there is
STEADY = 0.6  # a cache that fills up flattens; a leak does not
GOES_ON = 0.5  # what is taken for a leak is so until it rises half as surely and steadily
POINTS = 15  # that a trend is drawn through


class Leak(NamedTuple):
    """A leak: since when, the numbers it rests on, and `gib_per_minute`, `seconds_to_oom`."""

    since_s: float
    evidence: str
    metrics: dict[str, float]

    def finding(self, where: Where, memory: str) -> Finding:
        """What is said of it; `memory` is whose memory it is."""
        left = format_duration(round(self.metrics["seconds_to_oom"], -1))
        what = f"{memory} grows and will run out in about {left}"
        return Finding(Kind.MEMORY_LEAK, where, self.since_s, what, self.evidence, metrics=self.metrics)


class LeakWatch:
    """What one run holds of one memory, one value each 10 s. Times in order, Unix seconds."""

    __slots__ = ("_from_s", "_look_s", "_series", "leak")

    def __init__(self) -> None:
        self.leak: Leak | None = None  # as last found
        self._from_s = 0.0
        self._look_s = 0.0
        self._series = Series(SPANS_S[-1], EVERY_S)

    @property
    def next_s(self) -> float:
        """Values before that time are of no use."""
        return max(self._from_s, self._series.next_s)

    def begin(self, now_s: float) -> None:
        """Another run has the memory from now on."""
        self.leak, self._from_s = None, now_s + WARM_S
        self._series.points.clear()

    def see(self, t_s: float, used_gib: float) -> None:
        """It holds so much."""
        if t_s >= self._from_s:
            self._series.add(t_s, used_gib)

    def due(self) -> bool:
        """Whether `look` may find something new."""
        points = self._series.points
        return len(points) > 3 and points[-1][0] - self._look_s >= EVERY_S and points[-1][1] > points[0][1]

    def look(self, now_s: float, total_gib: float) -> Leak | None:
        """Its leak now, looked for each 10 s. `total_gib` is what it could hold at most."""
        if now_s - self._look_s < EVERY_S:
            return self.leak
        self._look_s = now_s
        less = 1.0 if self.leak is None else GOES_ON
        points = list(self._series.points)
        starts = [
            next((i for i, (t_s, _) in enumerate(points) if t_s >= now_s - s), len(points)) for s in SPANS_S
        ]  # fmt: skip
        found = (self._within(points[:first], points[first:], total_gib, less) for first in starts)
        self.leak = next((leak for leak in found if leak is not None), None)
        return self.leak

    def _within(
        self, before: list[tuple[float, float]], points: list[tuple[float, float]], total_gib: float, less: float
    ) -> Leak | None:
        """A leak in `points`; `before` is what was held earlier, which growth must exceed. `less`: of the evidence
        will do.
        """
        if len(points) < 4 or points[-1][1] - points[0][1] < GROWTH * total_gib:
            return None
        horizon_s, watched_s = HORIZON_S / less, points[-1][0] - points[0][0]
        if watched_s < 0.9 * SPANS_S[0] or points[-1][1] <= max((v for _, v in before), default=0.0):
            return None
        # Cheap first: a straight line through both ends would not do either.
        left_s = (total_gib - points[-1][1]) * watched_s / (points[-1][1] - points[0][1])
        if left_s > 1.5 * horizon_s or watched_s < less * WATCHED * left_s / 1.5:
            return None
        found = trend(points[:: -(-len(points) // POINTS)])
        if found.slope <= 0 or found.rising < less * RISING or found.late_slope < less * STEADY * found.slope:
            return None
        left_s = max(0.0, total_gib - points[-1][1]) / found.slope
        if left_s > horizon_s or watched_s < less * WATCHED * left_s:
            return None
        evidence = (
            f"{points[0][1]:.1f} to {points[-1][1]:.1f} of {total_gib:.0f} GiB within "
            f"{format_duration(round(watched_s))}, {found.slope * 60:.2g} GiB a minute"
        )
        since_s = points[0][0] if self.leak is None else self.leak.since_s
        return Leak(since_s, evidence, {"gib_per_minute": found.slope * 60, "seconds_to_oom": left_s})
