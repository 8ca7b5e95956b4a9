"""The numbers of a virtual world: how long machines take to come up, how often they fail, what goes wrong, prices.

Every lot is drawn from a stream of its own, named by the seed and by what it is for (`lots`). So the same seed gives
the same events, and two policies that launch the same replica for the same time meet the same luck.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

HOUR_S = 3600.0
DAY_S = 86400.0
# Median seconds from a launch to a machine that is up, as users of SkyPilot report them: AWS 137 s, GCP 160 s (pull
# requests 1111 and 1092), Azure 341 s (issue 3695). Others: our assumption.
LAUNCH_S: Mapping[str, float] = {"aws": 137.0, "gcp": 160.0, "azure": 341.0, "kubernetes": 60.0, "slurm": 60.0}
OTHER_LAUNCH_S = 180.0
# From the notice to the end of a spot machine, as the clouds document it.
NOTICE_S: Mapping[str, float] = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
OTHER_NOTICE_S = 30.0
# 419 unexpected interruptions in 54 days on 16,384 GPUs: The Llama 3 Herd of Models, table 5 (arXiv 2407.21783).
FAULTS_PER_GPU_HOUR = 419 / (54 * 24 * 16384)


@dataclass(frozen=True, slots=True)
class World:
    """Shares are 0..1, rates 0 or more. Without a trace each spot machine is reclaimed at `reclaims_per_hour`.

    `launch_sigma`: of the log-normal launch time around its median, which is the cloud's (`LAUNCH_S`) unless
    `launch_median_s` is given. `join_s`: from up to a live Ray node.
    `failed_launch_frac`: by market, launches that end in an error. `refused_s`: until a cloud says that it has no
    capacity. `api_error_frac`: calls that fail; `lost_reply_frac`: calls that work and whose answer is lost.
    `partitions_per_day`: times that nobody reaches the head, `silences_per_day`: nor the cloud's API, each for
    `outage_mean_s` in the mean (exponential). `price_sigma`: hourly step of the logarithm of spot prices.
    """

    launch_sigma: float = 0.3
    launch_median_s: float | None = None
    join_s: float = 20.0
    stop_s: float = 30.0
    refused_s: float = 30.0
    failed_launch_frac: Mapping[str, float] = field(default_factory=lambda: {"on_demand": 0.0, "spot": 0.0})
    reclaims_per_hour: float = 0.0
    faults_per_gpu_hour: float = 0.0
    api_error_frac: float = 0.0
    lost_reply_frac: float = 0.0
    partitions_per_day: float = 0.0
    silences_per_day: float = 0.0
    outage_mean_s: float = 60.0
    price_sigma: float = 0.0


# `calm` has delays and nothing else. The rates of `usual` are published where the module says so, else assumed;
# `rough` is about ten times as bad, to see what breaks.
WORLDS: Mapping[str, World] = {
    "calm": World(),
    "usual": World(
        failed_launch_frac={"on_demand": 0.01, "spot": 0.03}, reclaims_per_hour=0.05,
        faults_per_gpu_hour=FAULTS_PER_GPU_HOUR, api_error_frac=0.001, lost_reply_frac=0.0005, partitions_per_day=0.2,
        silences_per_day=0.2, price_sigma=0.01,
    ),
    "rough": World(
        failed_launch_frac={"on_demand": 0.1, "spot": 0.25}, reclaims_per_hour=0.5,
        faults_per_gpu_hour=10 * FAULTS_PER_GPU_HOUR, api_error_frac=0.02, lost_reply_frac=0.01, partitions_per_day=4.0,
        silences_per_day=4.0, outage_mean_s=180.0, price_sigma=0.03,
    ),
}  # fmt: skip


def lots(seed: int, *purpose: object) -> random.Random:
    """The stream of lots for that purpose: the same on every machine and in every process."""
    return random.Random("/".join(map(str, (seed, *purpose))))


def launch_s(world: World, cloud: str, draw: random.Random) -> float:
    """Seconds until a machine is up."""
    median_s = LAUNCH_S.get(cloud, OTHER_LAUNCH_S) if world.launch_median_s is None else world.launch_median_s
    return median_s * draw.lognormvariate(0.0, world.launch_sigma)


def outages(seed: int, what: str, per_day: float, mean_s: float, until_s: float) -> list[tuple[float, float]]:
    """(from, to) of what cannot be reached, in seconds since the start; a Poisson process."""
    found: list[tuple[float, float]] = []
    draw = lots(seed, what)
    t_s = draw.expovariate(per_day / DAY_S) if per_day > 0 else math.inf
    while t_s < until_s:
        end_s = t_s + draw.expovariate(1.0 / mean_s)
        found.append((t_s, end_s))
        t_s = end_s + draw.expovariate(per_day / DAY_S)
    return found


class SpotPrices:
    """Spot prices as a factor on the price of the plan: a mean-reverting walk by the hour, the same for a zone."""

    def __init__(self, seed: int, sigma: float):
        self._seed, self._sigma = seed, sigma
        self._known: dict[str, list[float]] = {}

    def factor(self, zone: str, t_s: float) -> float:
        """In the hour of `t_s` (seconds since the start); 1 in the mean."""
        if not self._sigma:
            return 1.0
        hour = int(t_s // HOUR_S)
        logs = self._known.setdefault(zone, [0.0])
        while len(logs) <= hour:
            step = lots(self._seed, "price", zone, len(logs)).gauss(0.0, self._sigma)
            logs.append(0.98 * logs[-1] + step)
        return math.exp(logs[hour])


@dataclass(frozen=True, slots=True)
class SpotTrace:
    """How many spot machines could be had in one zone, in steps of `gap_s` from the start; it begins anew at its end.

    A trace that never shows more than one machine was made by probing with one: its ones set no limit.
    """

    zone: str
    gap_s: float
    counts: tuple[int, ...]

    @property
    def length_s(self) -> float:
        return self.gap_s * len(self.counts)

    def room(self, t_s: float) -> float:
        """Machines that can be had at that time; inf: any number."""
        count = self.counts[int(t_s // self.gap_s) % len(self.counts)]
        return math.inf if count and _most(self) <= 1 else count

    def next_change_s(self, t_s: float) -> float:
        """When that number changes next; inf: never."""
        here = int(t_s // self.gap_s)
        n = len(self.counts)
        for step in range(here + 1, here + n + 1):
            if self.counts[step % n] != self.counts[here % n]:
                return step * self.gap_s
        return math.inf


@lru_cache(maxsize=256)
def _most(trace: SpotTrace) -> int:
    return max(trace.counts)
