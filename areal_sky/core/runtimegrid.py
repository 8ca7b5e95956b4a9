"""The grid on which running times are inferred: octaves of seconds, and log-normal hypotheses over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SHORTEST_S = 32.0  # what ends sooner is all the same to a scheduler
OCTAVES = 18  # up to 32 s x 2^18 = 97 days
EDGES_S: tuple[float, ...] = (0.0, *(SHORTEST_S * 2.0**i for i in range(OCTAVES + 1)))
N_BUCKETS = OCTAVES + 1
# Spread of the logarithm within a cohort: runs of one thing; one thing with other settings; next to nothing in common.
SIGMAS = (0.2, 0.5, 1.2)
OUTLIERS = 0.02  # share of a cohort that may be anything: crashes at the start, runs that never end


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Running times of a cohort: `mass` by bucket, the logarithms of it and of what outlives each bucket's start."""

    mass: tuple[float, ...]
    log_mass: tuple[float, ...]
    log_survival: tuple[float, ...]


def bucket_of(seconds: float) -> int:
    """The bucket a running time falls into."""
    if seconds < SHORTEST_S:
        return 0
    return min(N_BUCKETS - 1, int(math.log2(seconds / SHORTEST_S) + 1e-9) + 1)


def gittins_index(mass: Sequence[float]) -> list[float]:
    """By bucket already outlived: min over stopping points of expected service until then / probability of an end."""
    table: list[float] = []
    after = [0.0] * (N_BUCKETS + 1)
    for i in range(N_BUCKETS - 1, -1, -1):
        after[i] = after[i + 1] + mass[i]
    # expected service spent within each bucket, by those that reach it
    spent = [
        (EDGES_S[i + 1] - EDGES_S[i]) * (mass[i] / 2 + after[i + 1]) for i in range(N_BUCKETS)
    ]
    for start in range(N_BUCKETS):
        best, service, ends = math.inf, 0.0, 0.0
        for i in range(start, N_BUCKETS):
            service += spent[i]
            ends += mass[i]
            if ends > 1e-15 and service < best * ends:
                best = service / ends
        table.append(best if best < math.inf else EDGES_S[-1])
    return table


def _hypothesis(center: float, sigma: float) -> Hypothesis:
    mass: list[float] = []
    below = 0.0
    for i in range(N_BUCKETS):
        last = i == N_BUCKETS - 1
        here = 1.0 if last else 0.5 * (1 + math.erf((math.log(EDGES_S[i + 1]) - center) / (sigma * math.sqrt(2))))
        mass.append((1 - OUTLIERS) * (here - below) + OUTLIERS / N_BUCKETS)
        below = here
    survival = [sum(mass[i:]) for i in range(N_BUCKETS)]
    return Hypothesis(tuple(mass), tuple(map(math.log, mass)), tuple(map(math.log, survival)))


GRID: tuple[Hypothesis, ...] = tuple(
    _hypothesis(math.log(SHORTEST_S) + (i - 0.5) * math.log(2), sigma) for sigma in SIGMAS for i in range(N_BUCKETS)
)
