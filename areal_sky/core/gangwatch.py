"""Which rank of a gang holds the others up: its reports, its GPU's load and clock beside those of the other ranks."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from areal_sky.core.baseline import usual
from areal_sky.core.findings import Finding, Kind, Where
from areal_sky.core.windowcodec import Batch

MIN_RANKS = 3  # of two that differ nobody can say which is wrong
RECENT_S = 15.0  # what is compared is the middle of the latest so many seconds
SLACK_S = 2.0  # of the times at which the ranks tell of the same step
SILENT_S = 120.0  # a rank that reports more rarely is not compared
GPU_SILENT_S = 10.0
LOOK_S = 3.0
SUSTAINED = 3  # looks in a row
SLOWER_FRAC = 0.25  # than the middle of the gang
SIGMAS = 5.0
BEHIND_STEPS = 3.0  # of a counter
CLOCK_FRAC = 0.85  # of the gang's SM clock
LOAD_APART = 0.3  # of utilization, from the gang and from its own usual distance to it
LOAD_ALIKE = 0.1  # how much the others may differ for the gang to be of one kind
USUAL_LOOKS = 20  # of a rank's distance before a change of it means anything
KEEP = 40  # values per rank and series
MAX_RANKS = 4096
MAX_NAMES = 8


class _Suspect(NamedTuple):
    rank: int
    words: str
    evidence: str


class GangWatch:
    """The ranks of one run. All it keeps is bounded."""

    def __init__(self, task_id: str):
        self._task_id = task_id
        self._rates: dict[str, dict[int, deque[tuple[float, float]]]] = {}
        self._counts: dict[str, dict[int, tuple[float, float]]] = {}  # name -> rank -> value, when
        self._loads: dict[int, deque[tuple[float, float]]] = {}
        self._clocks: dict[int, deque[tuple[float, float]]] = {}
        self._apart: dict[int, deque[float]] = {}
        self._look_s = 0.0
        self._times: dict[int, tuple[int, float]] = {}  # rank -> looks in a row that suspected it, since when
        self._found: list[Finding] = []
        self.places: dict[int, tuple[str, int, int]] = {}  # rank -> replica, node, one GPU of it

    def see_rate(self, name: str, rank: int, t_s: float, value: float) -> None:
        if name in self._rates or len(self._rates) < MAX_NAMES:
            _keep(self._rates.setdefault(name, {}), rank, [(t_s, value)])

    def see_count(self, name: str, rank: int, t_s: float, value: float) -> None:
        counts = self._counts.setdefault(name, {}) if len(self._counts) < MAX_NAMES else self._counts.get(name)
        if counts is not None and (rank in counts or len(counts) < MAX_RANKS):
            counts[rank] = (value, t_s)

    def see_gpus(self, rank: int, windows: Batch, gpus: Sequence[int]) -> None:
        """Windows of a node where the rank has these GPUs. What is not known says nothing."""
        if len(self.places) >= MIN_RANKS:
            places = windows.in_time(gpus)
            ends, loads, clocks = windows["end_s"], windows["utilization_mean"], windows["sm_clock_mhz"]
            _keep(self._loads, rank, [(ends[i], loads[i]) for i in places])
            _keep(self._clocks, rank, [(ends[i], clocks[i]) for i in places])

    def findings(self, now_s: float) -> Iterator[Finding]:
        """The rank that is slower than the others, if there is one."""
        if now_s - self._look_s >= LOOK_S:
            self._look_s = now_s
            suspects = {s.rank: s for s in self._suspects(now_s)}
            self._times = {
                rank: (self._times[rank][0] + 1, self._times[rank][1]) if rank in self._times else (1, now_s)
                for rank in suspects
            }
            self._found = [
                self._finding(suspects[rank], since_s)
                for rank, (times, since_s) in self._times.items()
                if times >= SUSTAINED
            ]
        yield from self._found

    def _finding(self, s: _Suspect, since_s: float) -> Finding:
        replica, index, device = self.places.get(s.rank, ("", 0, None))
        where = Where(self._task_id, s.rank, replica, index, device)
        return Finding(Kind.STRAGGLER, where, since_s, s.words, s.evidence)

    def _suspects(self, now_s: float) -> Iterator[_Suspect]:
        for name, ranks in self._rates.items():
            if (slow := _lowest(_recent(ranks, now_s, SILENT_S), SLOWER_FRAC)) is not None:
                rank, value, middle = slow
                yield _Suspect(
                    rank, "the rank is slower than the others",
                    f"{name}: its rate is {value / middle:.0%} of the gang's ({value:.4g} of {middle:.4g})",
                )  # fmt: skip
        for name, counts in self._counts.items():
            fresh = {r: v for r, (v, _) in counts.items()}
            if len(fresh) >= MIN_RANKS:
                middle = statistics.median(fresh.values())
                rank = min(fresh, key=fresh.__getitem__)
                others = min(v for r, v in fresh.items() if r != rank)
                if middle - fresh[rank] >= BEHIND_STEPS and others - fresh[rank] >= BEHIND_STEPS - 1:
                    evidence = f"{name} {fresh[rank]:g}, the gang is at {middle:g}"
                    yield _Suspect(rank, "the rank is behind the others", evidence)
        clocks = _recent(self._clocks, now_s, GPU_SILENT_S)
        if (slow := _lowest(clocks, 1 - CLOCK_FRAC)) is not None:
            rank, value, middle = slow
            evidence = f"its GPU runs at {value:.0f} MHz, the gang's at {middle:.0f} MHz"
            yield _Suspect(rank, "the rank's GPU is clocked lower than the others", evidence)
        yield from self._apart_from_the_gang(_recent(self._loads, now_s, GPU_SILENT_S))

    def _apart_from_the_gang(self, loads: Mapping[int, float]) -> Iterator[_Suspect]:
        """One rank whose load differs from that of all others as it has not done before."""
        if len(loads) < MIN_RANKS:
            return
        middle = statistics.median(loads.values())
        alike = usual(list(loads.values())).sigma <= LOAD_ALIKE
        for rank, load in loads.items():
            before = self._apart.setdefault(rank, deque(maxlen=200))
            apart = load - middle
            if (
                alike and len(before) >= USUAL_LOOKS and abs(apart) > LOAD_APART
                and abs(apart - statistics.median(before)) > LOAD_APART
            ):  # fmt: skip
                words = "starves: its GPU idles" if apart < 0 else "is what the others wait for"
                evidence = f"its GPU is at {load:.0%}, the gang's at {middle:.0%}"
                yield _Suspect(rank, f"the rank {words}", evidence)
            else:
                before.append(apart)


def _keep(
    series: dict[int, deque[tuple[float, float]]], rank: int, told: Iterable[tuple[float, float | None]]
) -> None:
    known = [(t_s, v) for t_s, v in told if v is not None]
    if rank in series:
        series[rank].extend(known)
    elif known and len(series) < MAX_RANKS:
        series[rank] = deque(known, maxlen=KEEP)


def _recent(
    series: Mapping[int, deque[tuple[float, float]]], now_s: float, silent_s: float
) -> dict[int, float]:  # fmt: skip
    """The middle of each rank's latest values, all up to the time until which every rank has told: what only some have
    told of yet makes these no different. Ranks that were silent for `silent_s` are left out.
    """
    if len(series) < MIN_RANKS:
        return {}
    heard = {rank: points for rank, points in series.items() if now_s - points[-1][0] <= silent_s}
    until_s = min((points[-1][0] for points in heard.values()), default=now_s) + SLACK_S
    found: dict[int, float] = {}
    for rank, points in heard.items():
        told = [p for p in points if p[0] <= until_s]
        if told:
            found[rank] = statistics.median([v for t_s, v in told if t_s >= told[-1][0] - RECENT_S])
    return found


def _lowest(values: Mapping[int, float], frac: float) -> tuple[int, float, float] | None:
    """(rank, its value, the middle) of the one that is lower than the middle by `frac` and by far more than the others
    differ; None where there is none.
    """
    if len(values) < MIN_RANKS:
        return None
    rank = min(values, key=values.__getitem__)
    middle, sigma = usual([v for r, v in values.items() if r != rank])
    if middle <= 0 or values[rank] >= middle - max(frac * middle, SIGMAS * sigma):
        return None
    return rank, values[rank], middle
