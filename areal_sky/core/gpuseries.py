"""The recent load of one GPU in few bytes, and the same in a few points for a picture."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
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

    __slots__ = ("_kept", "_most")

    def __init__(self, keep: int):
        self._most = 3 * keep
        self._kept = array("d")  # start, end and mean of each: one place of memory to touch for each heartbeat

    def extend(self, starts_s: Sequence[float], ends_s: Sequence[float], means: Sequence[float]) -> None:
        """Takes points; a mean that is not known is not a number."""
        self._kept.extend(chain.from_iterable(zip(starts_s, ends_s, means, strict=True)))
        if len(self._kept) >= self._most + max(3, self._most // 4):
            del self._kept[: -self._most]

    def since(self, from_s: float) -> list[Point]:
        """Points that ended after `from_s`, oldest first; the latest one in any case."""
        kept = self._kept[-self._most :]
        i = len(kept)
        while i > 0 and (kept[i - 2] > from_s or i == len(kept)):
            i -= 3
        return [
            Point(s, e, None if math.isnan(m) else m)
            for s, e, m in zip(kept[i::3], kept[i + 1 :: 3], kept[i + 2 :: 3], strict=True)
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
