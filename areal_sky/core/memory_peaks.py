"""What running tasks teach about memory: a factor on later estimates, per model and stage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from areal_sky.core.memory_terms import Stage

MOST, LEAST = 2.0, 0.7
ENOUGH = 3  # runs before an estimate is lowered: to raise one, a single run will do
OUTLIER = 1.5  # a ratio this many times the median is somebody else's process on the device, and counts no further
OUT_OF_MEMORY = 1.1  # what ran out of memory needed more than it got; how much more is not known


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a device of one attempt held, beside what was predicted for it uncorrected. GiB.

    `out_of_memory`: it died of that, so `observed_gib` is the least that it needed.
    """

    model: str
    stage: Stage
    predicted_gib: float
    observed_gib: float
    out_of_memory: bool = False


def corrections(peaks: Iterable[Peak]) -> dict[tuple[str, Stage], float]:
    """The factor per (model, stage) of `correction`."""
    grouped: dict[tuple[str, Stage], list[Peak]] = {}
    for p in peaks:
        grouped.setdefault((p.model, p.stage), []).append(p)
    return {key: correction(found) for key, found in grouped.items()}


def correction(peaks: Sequence[Peak]) -> float:
    """By how much estimates of one model and stage are to be multiplied: LEAST..MOST, 1.0 where nothing is known.

    Raised as soon as a run took more than predicted: an estimate below what was seen is unsafe. Lowered only once
    ENOUGH runs took less, and never below the highest of them. Engines of rollout take all memory that they are given,
    so that what they hold says nothing of what they need: of them only running out of memory counts.
    """
    ratios: list[float] = []
    for p in peaks:
        usable = p.predicted_gib > 0 and math.isfinite(p.observed_gib) and p.observed_gib > 0
        if usable and (p.stage != "rollout" or p.out_of_memory):
            seen = p.observed_gib / p.predicted_gib
            ratios.append(max(1.0, seen) * OUT_OF_MEMORY if p.out_of_memory else seen)
    if not ratios:
        return 1.0
    # Running out is a fact, an odd reading may be someone else's.
    limit = OUTLIER * median(ratios) if len(ratios) >= ENOUGH else math.inf
    highest = max(min(r, limit) for r in ratios)
    if highest < 1.0 and len(ratios) < ENOUGH:
        return 1.0
    return min(MOST, max(LEAST, highest))
