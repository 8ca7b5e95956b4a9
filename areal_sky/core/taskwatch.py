"""What a running task's GPUs and reports tell of it: no progress, less of it than usual, values that are no numbers.

Every threshold is relative to what the run itself has shown before; the constants below are the least that counts as
different. A run is one attempt: the next begins to learn anew.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from areal_sky.core.baseline import Series, Usual, usual
from areal_sky.core.findings import Finding, Kind, Where
from areal_sky.core.gangwatch import GangWatch
from areal_sky.core.windowcodec import Batch
from areal_sky.units import format_duration

# How reports are read, by their names. `_per_s`: work per time. `step_time`: time per work. A counter rises with work.
_RATE = re.compile(r"_per_s(ec(ond)?)?$|/s$|throughput", re.IGNORECASE)
_TIME = re.compile(r"(step|iter(ation)?|batch|update)_?(time|duration|latency|s|ms|seconds)(_?(s|ms|seconds))?$", re.I)
_COUNTER = re.compile(r"(^|_)(step|steps|iteration|iterations|iter|epoch|global_step|version)$", re.IGNORECASE)

WORKED_S = 30.0  # a run must have kept its GPUs busy this long before idle ones mean anything
LOADED_S = 10.0  # and this long before its pauses are its way to work, not its start
IDLE_FRAC = 0.15  # of its usual utilization: below that a second is idle
IDLE_LEAST = 0.02
STALL_IDLE_S = 6.0  # the shortest silence of its GPUs that is a stall; with the ways there, found within 10 s
STALL_REPORT_S = 8.0
PATIENCE = 2.0  # times the longest pause that it has made before, less the second that a window may hide
REPORT_PATIENCE = 2.5
PAUSES = 50  # that are remembered
LONGEST_PAUSE_S = 900.0
KNOWN_REPORTS = 5
FRESH_S = 10.0  # GPUs that were not heard of for longer are not known to be idle

SLOW_SPAN_S, SLOW_EVERY_S = 900.0, 2.0
SLOW_RECENT_S = 20.0
SLOW_MIN_POINTS = 20  # of the past
SLOW_RECENT_POINTS = 5
SLOW_FRAC = 0.25  # below its usual rate
SLOW_SIGMAS = 5.0
SLOW_LOOK_S = 3.0
SLOW_LEARN_S = 60.0  # how often what is usual is worked out anew
NEW_NORMAL_S = 600.0  # a lower rate that stays is what is usual from then on
SERIES = 8  # rates that are followed per task


class TaskWatch:
    """One run of one task."""

    def __init__(self, task_id: str):
        self._task_id = task_id
        self.gang = GangWatch(task_id)
        self._phase_low = False
        self._seen_s: float | None = None  # the latest end of a window of its GPUs
        self._busy_s: float | None = None  # of the latest busy one
        self._worked_s = 0.0
        self._usual_load = 0.0
        self._pauses: deque[float] = deque(maxlen=PAUSES)
        self._progress_s: float | None = None
        self._counters: dict[str, tuple[float, float]] = {}  # latest value and when it came
        self._intervals: deque[float] = deque(maxlen=PAUSES)
        self._rates: dict[str, _Rate] = {}
        self._broken: dict[str, tuple[float, float]] = {}  # metric -> since when, value

    # ------------------------------------------------------------ what is told

    def enter_phase(self, low: bool, now_s: float) -> None:
        """Whether it has said that it leaves its GPUs idle; what it does then is no pause of its work."""
        if self._phase_low and not low:
            self._busy_s = now_s if self._busy_s is not None else None
            self._progress_s = now_s if self._progress_s is not None else None
        self._phase_low = low

    def see_loads(self, windows: Batch, places: Iterable[int]) -> None:
        """Windows of its GPUs, those at `places`, oldest first. A load that is not known says nothing."""
        loads, starts, ends = windows["utilization_mean"], windows["start_s"], windows["end_s"]
        seen_s, busy_s, worked_s, usual_load = self._seen_s, self._busy_s, self._worked_s, self._usual_load
        for i in places:
            load = loads[i]
            if load is None:
                continue
            start_s, end_s = starts[i], ends[i]
            if seen_s is None or end_s > seen_s:
                seen_s = end_s
            if load <= IDLE_LEAST or load <= IDLE_FRAC * usual_load:
                continue
            # A slow mean of what busy seconds look like: about a minute of one GPU.
            usual_load += (load - usual_load) / 60.0 if worked_s else load
            if busy_s is None or end_s > busy_s:
                pause_s = 0.0 if busy_s is None else start_s - busy_s
                if pause_s > 1.0 and worked_s >= LOADED_S and not self._phase_low:
                    self._pauses.append(min(pause_s, LONGEST_PAUSE_S))
                worked_s += min(end_s - (busy_s or start_s), end_s - start_s)
                busy_s = end_s
        self._seen_s, self._busy_s, self._worked_s, self._usual_load = seen_s, busy_s, worked_s, usual_load

    def see_report(self, t_s: float, values: Mapping[str, float], rank: int | None = None) -> None:
        """Values that it tells of itself, NaN and infinities included."""
        moved = False
        for name, value in values.items():
            if not math.isfinite(value):
                self._broken.setdefault(name, (t_s, value))
                continue
            self._broken.pop(name, None)
            if _COUNTER.search(name):
                moved |= self._count(name, t_s, value, rank)
            elif _RATE.search(name):
                self._rate(name, t_s, value, rank)
                moved = moved or not self._counters
            elif _TIME.search(name):
                if value > 0:
                    self._rate(name, t_s, 1.0 / value, rank)
                moved = moved or not self._counters
        if moved:
            if self._progress_s is not None and t_s > self._progress_s:
                self._intervals.append(min(t_s - self._progress_s, LONGEST_PAUSE_S))
            self._progress_s = t_s

    # ------------------------------------------------------------ what follows

    def findings(self, now_s: float) -> Iterator[Finding]:
        where = Where(self._task_id)
        stall = self._stall(where, now_s)
        if stall is not None:
            yield stall
        else:
            for name, rate in self._rates.items():
                if (found := rate.slow(now_s)) is not None:
                    since_s, evidence, metrics = found
                    yield Finding(
                        Kind.THROUGHPUT_DROP, where, since_s, f"{rate.words} has dropped", evidence, name, metrics
                    )
                    break
            yield from self.gang.findings(now_s)
        for name, (since_s, value) in self._broken.items():
            what = f"{name} is {'NaN' if math.isnan(value) else 'infinite'}"
            yield Finding(Kind.NOT_A_NUMBER, where, since_s, what, "reported by the task", name)

    def _stall(self, where: Where, now_s: float) -> Finding | None:
        idle_s = 0.0
        idle_known = self._seen_s is not None and now_s - self._seen_s <= FRESH_S
        if idle_known and self._busy_s is not None and self._worked_s >= WORKED_S and not self._phase_low:
            idle_s = (self._seen_s or 0.0) - self._busy_s
            patience_s = max(STALL_IDLE_S, PATIENCE * max(self._pauses, default=0.0) - 1.0)
            silent = self._progress_s is None or self._progress_s <= self._busy_s + 2.0
            if idle_s > patience_s and silent:
                longest = f"; its longest pause so far was {_s(max(self._pauses))}" if self._pauses else ""
                evidence = f"its GPUs idle for {_s(idle_s)}{self._last_words(now_s)}{longest}"
                return Finding(
                    Kind.STALL, where, self._busy_s, "no progress, and its GPUs are idle", evidence,
                    metrics={"idle_s": idle_s},
                )  # fmt: skip
        if self._progress_s is None or len(self._intervals) < KNOWN_REPORTS:
            return None
        silent_s = now_s - self._progress_s
        if silent_s <= max(STALL_REPORT_S, REPORT_PATIENCE * max(self._intervals)) or self._phase_low:
            return None
        gpus = ""
        if idle_known and self._busy_s is not None:
            gpus = "; its GPUs are idle" if idle_s > STALL_IDLE_S else "; its GPUs are busy"
        evidence = f"no step for {_s(silent_s)}, where the longest took {_s(max(self._intervals))}{gpus}"
        return Finding(
            Kind.STALL, where, self._progress_s, "no progress", evidence, metrics={"silent_s": silent_s}
        )

    def _last_words(self, now_s: float) -> str:
        return "" if self._progress_s is None else f", no step for {_s(now_s - self._progress_s)}"

    def _count(self, name: str, t_s: float, value: float, rank: int | None) -> bool:
        """Whether the counter has risen. The ranks of a gang count the same steps: the first to tell one counts."""
        before = self._counters.get(name)
        if rank is not None:
            self.gang.see_count(name, rank, t_s, value)
        if before is not None and value == before[0]:
            return False
        self._counters[name] = (value, t_s)
        if before is None or value < before[0]:  # the first, or a start from a checkpoint
            return before is None
        if t_s > before[1]:
            self._rate(name, t_s, (value - before[0]) / (t_s - before[1]), None, "its step rate")
        return True

    def _rate(self, name: str, t_s: float, value: float, rank: int | None, words: str = "") -> None:
        if rank is not None:
            self.gang.see_rate(name, rank, t_s, value)
        rate = self._rates.get(name)
        if rate is None:
            if len(self._rates) >= SERIES:
                return
            rate = self._rates[name] = _Rate(words or f"its work by {name}")
        rate.see(t_s, value)


class _Rate:
    """Work per time, in whatever unit."""

    __slots__ = ("_frozen_s", "_learnt_s", "_look_s", "_series", "_slow", "_usual", "words")

    def __init__(self, words: str):
        self.words = words
        self._series = Series(SLOW_SPAN_S, SLOW_EVERY_S)
        self._look_s = 0.0
        self._usual: Usual | None = None
        self._learnt_s = 0.0
        self._slow: tuple[float, str, dict[str, float]] | None = None
        self._frozen_s = 0.0  # since when nothing is learnt, as it is slow

    def see(self, t_s: float, value: float) -> None:
        self._series.add(t_s, value)

    def slow(self, now_s: float) -> tuple[float, str, dict[str, float]] | None:
        """Since when and by how much it is below what is usual; None when it is not."""
        if now_s - self._look_s >= SLOW_LOOK_S:
            self._look_s = now_s
            self._slow = self._compare(now_s)
        return self._slow

    def _compare(self, now_s: float) -> tuple[float, str, dict[str, float]] | None:
        if self._slow is not None and now_s - self._frozen_s > NEW_NORMAL_S:
            self._usual, self._slow = None, None
            self._series.points.clear()
        recent = self._recent(now_s)
        if len(recent) < SLOW_RECENT_POINTS:
            return self._slow  # too few to tell
        if self._slow is None and now_s - self._learnt_s >= SLOW_LEARN_S:
            past = self._series.before(now_s - SLOW_RECENT_S)[: -(SLOW_RECENT_POINTS - 1)]
            if len(past) >= SLOW_MIN_POINTS:
                self._usual, self._learnt_s = usual(past), now_s
        if self._usual is None:
            return None
        median, sigma = self._usual
        at = usual(recent).median
        limit = median - max(SLOW_FRAC * median, SLOW_SIGMAS * sigma)
        if at >= limit:
            return None
        if self._slow is None:
            self._frozen_s = now_s
        since_s = self._slow[0] if self._slow is not None else self._fell_s(limit, now_s)
        evidence = f"{at:.4g} now, usually {median:.4g} ± {sigma:.2g} ({at / median:.0%})"
        return since_s, evidence, {"now": at, "usual": median}

    def _recent(self, now_s: float) -> list[float]:
        """The latest SLOW_RECENT_S, or the latest points where it tells more rarely."""
        found = self._series.since(now_s - SLOW_RECENT_S)
        if len(found) < SLOW_RECENT_POINTS:
            found = [v for _, v in list(self._series.points)[-SLOW_RECENT_POINTS:]]
        return found

    def _fell_s(self, limit: float, now_s: float) -> float:
        """When the run of low values that lasts until now began."""
        since_s = now_s
        for t_s, value in reversed(self._series.points):
            if value >= limit:
                break
            since_s = t_s
        return since_s


def _s(seconds: float) -> str:
    return format_duration(round(seconds, 1 if seconds < 10 else 0))
