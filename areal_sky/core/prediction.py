"""How long tasks run, learnt from those that have ended: predictions with their uncertainty, and the Gittins index.

Tasks that are alike (same kind, model, GPUs, name: the caller's `likeness`) and submitted in one go form a cohort. Of
each cohort the distribution of running times is inferred by Bayes' rule over a grid of log-normal hypotheses
(`core/runtimegrid.py`): members that ended tell it, and so do those that have run for a while and still run. What a new
cohort is believed to be, before any of it has ended, is a mixture of
- what earlier cohorts of its likeness, and (less) all cohorts, turned out to be; and
- the cohort of its likeness before it, by a share learnt from how often that was the better guess.

Nothing is assumed of durations but that they lie between seconds and months. Deterministic, without I/O and clock;
memory is bounded by living tasks and `MOST_LIKENESSES` x 2 KiB.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from areal_sky.core.runtimegrid import EDGES_S, GRID, N_BUCKETS, bucket_of, gittins_index

MOST_LIKENESSES = 256
# Submitted within this share of the usual time between like submits, and at least within a minute: one go.
BURST_SHARE, BURST_AT_LEAST_S, BURST_AT_MOST_S = 0.5, 60.0, 86400.0
USUAL_GAP_S, USUAL_GAP_WEIGHT = 3600.0, 5.0  # before anything is known
FLAT_WEIGHT = 4.0  # cohorts' worth of "it may be anything"
OTHERS_WEIGHT = 1.0  # of a cohort, for all likenesses, beside what it counts for its own
REPEAT_SHARE, REPEAT_WEIGHT = 0.7, 4.0  # a cohort is like the one before it: how probable, worth so many observations
PAUSES_S = (600.0, 3600.0, 14400.0, 86400.0)  # the longer the pause between cohorts, the less is repeated
USERS_SIGMA, USERS_WEIGHT = 1.0, 4.0  # error of users' estimates (of its logarithm), worth so many observations
MOVED = 0.0  # an index that moved by less is not reported


@dataclass(frozen=True, slots=True)
class Remaining:
    """Seconds a task still needs: half of all such tasks need at most `median_s`; 80 % between `low_s` and `high_s`."""

    low_s: float
    median_s: float
    high_s: float


class _Cohort:
    __slots__ = ("belief", "estimated", "first_end", "last_s", "likeness", "log", "members", "pause", "table", "told")

    def __init__(self, likeness: _Likeness, log: list[float], now_s: float):
        self.likeness = likeness
        self.log = log  # log of the weight of each hypothesis, up to a constant
        self.belief: list[float] = []  # the same, normalised
        self.last_s = now_s
        self.members: dict[str, _Member] = {}
        self.estimated = 0
        self.table: list[float] | None = None  # index by bucket, made when asked for
        self.told: list[float] | None = None  # the table that was last acted on
        # (mass by bucket as the one before it, as any, which pause), until the first of it has ended
        self.pause: int | None = None
        self.first_end: tuple[list[float], list[float]] | None = None


class _Member:
    __slots__ = ("bucket", "cohort", "estimate_s")

    def __init__(self, cohort: _Cohort, estimate_s: float | None):
        self.cohort = cohort
        self.bucket = 0
        self.estimate_s = estimate_s


class _Likeness:
    __slots__ = ("cohort", "first_s", "submits", "sum")

    def __init__(self, now_s: float):
        self.sum = [0.0] * len(GRID)  # of the beliefs of its cohorts
        self.cohort: _Cohort | None = None  # the latest
        self.first_s = now_s
        self.submits = 0


class RunningTimes:
    """See the module. Times are seconds, all given by the caller."""

    def __init__(self) -> None:
        self._likenesses: dict[Hashable, _Likeness] = {}
        self._tasks: dict[str, _Member] = {}
        self._all = [0.0] * len(GRID)
        self._first_s: float | None = None
        self._submits = 0
        self._repeats = [[REPEAT_SHARE * REPEAT_WEIGHT, REPEAT_WEIGHT] for _ in range(len(PAUSES_S) + 1)]
        self._users_error = [USERS_SIGMA**2 * USERS_WEIGHT, USERS_WEIGHT]
        self._moved: set[_Cohort] = set()

    # ---------------------------------------------------------------- what happens

    def submitted(self, task_id: str, likeness: Hashable, now_s: float, estimate_s: float | None = None) -> None:
        """A task that will run. `estimate_s`: what its user expects, if anything. Again for a known task: no effect."""
        if task_id in self._tasks:
            return
        cohort = self._cohort_for(likeness, now_s)
        member = _Member(cohort, estimate_s if estimate_s else None)
        cohort.members[task_id] = self._tasks[task_id] = member
        cohort.estimated += member.estimate_s is not None

    def served(self, task_id: str, served_s: float) -> None:
        """It has run for so long and still does: it is none of the short ones."""
        member = self._tasks.get(task_id)
        if member is not None and (now_in := bucket_of(served_s)) > member.bucket:
            cohort, log = member.cohort, member.cohort.log
            for i, h in enumerate(GRID):
                log[i] += h.log_survival[now_in] - h.log_survival[member.bucket]
            member.bucket = now_in
            self._believe(cohort)

    def ended(self, task_id: str, served_s: float, *, finished: bool = True) -> None:
        """It runs no more. `finished`: by itself, after running for `served_s`; else that says only "at least"."""
        member = self._tasks.get(task_id)
        if member is None:
            return
        if not finished:
            self.served(task_id, served_s)
        else:
            cohort, log, last = member.cohort, member.cohort.log, bucket_of(served_s)
            for i, h in enumerate(GRID):
                log[i] += h.log_mass[last] - h.log_survival[member.bucket]
            self._learn_repeats(cohort, last)
            if member.estimate_s:
                self._users_error[0] += math.log(max(served_s, 1.0) / max(member.estimate_s, 1.0)) ** 2
                self._users_error[1] += 1.0
            self._believe(cohort)
        del self._tasks[task_id], member.cohort.members[task_id]

    def moved(self) -> list[str]:
        """Tasks whose index has changed since the last call by other than their own service."""
        out: list[str] = []
        for cohort in sorted(self._moved, key=lambda c: next(iter(c.members), "")):
            before, now = cohort.told, self._table(cohort)
            if before is None or cohort.estimated:
                out += cohort.members
            else:
                far = [abs(a - b) > MOVED * b for a, b in zip(now, before, strict=True)]
                mine = [task_id for task_id, m in cohort.members.items() if far[m.bucket]]
                out += mine
                if not mine:
                    continue  # small steps add up against the table that was told last
            cohort.told = now
        self._moved.clear()
        return out

    # ---------------------------------------------------------------- what is predicted

    def index_s(self, task_id: str, served_s: float) -> float:
        """The Gittins index after `served_s`: seconds of service per completion, with the best time to stop.

        Gittins, Bandit processes and dynamic allocation indices, 1979: serving the least index first minimises the
        mean time in the system where service times are known as distributions only.
        """
        member = self._tasks[task_id]
        self.served(task_id, served_s)
        table = self._table(member.cohort) if member.estimate_s is None else gittins_index(self._mass(member))
        return table[member.bucket]

    def next_step_s(self, served_s: float) -> float:
        """Service after which the index changes next; inf: never."""
        after = bucket_of(served_s) + 1
        return EDGES_S[after] if after < N_BUCKETS else math.inf

    def remaining(self, task_id: str, served_s: float) -> Remaining:
        """How long it will still run. Raises KeyError for a task that is not known."""
        member = self._tasks[task_id]
        mass = self._mass(member)
        low, median, high = (_quantile(mass, served_s, q) for q in (0.1, 0.5, 0.9))
        return Remaining(low - served_s, median - served_s, high - served_s)

    # ---------------------------------------------------------------- how

    def _cohort_for(self, likeness: Hashable, now_s: float) -> _Cohort:
        known = self._likenesses.pop(likeness, None) or _Likeness(now_s)
        self._likenesses[likeness] = known  # the latest used last
        if len(self._likenesses) > MOST_LIKENESSES:
            del self._likenesses[next(iter(self._likenesses))]
        if self._first_s is None:
            self._first_s = now_s
        self._submits += 1
        cohort = known.cohort
        usual_s = (now_s - self._first_s + USUAL_GAP_WEIGHT * USUAL_GAP_S) / (self._submits + USUAL_GAP_WEIGHT - 1)
        if cohort is not None and now_s - cohort.last_s <= min(
            BURST_AT_MOST_S, max(BURST_AT_LEAST_S, BURST_SHARE * usual_s)
        ):
            cohort.last_s = now_s
            return cohort
        flat = FLAT_WEIGHT / len(GRID)
        prior = [flat + OTHERS_WEIGHT * a + mine for a, mine in zip(self._all, known.sum, strict=True)]
        total = sum(prior)
        prior = [p / total for p in prior]
        first_end, pause = None, None
        if cohort is not None:
            pause = sum(now_s - cohort.last_s >= p for p in PAUSES_S)
            first_end = (_mass_of(cohort.belief), _mass_of(prior))
            share = self._repeats[pause][0] / self._repeats[pause][1]
            prior = [share * b + (1 - share) * p for b, p in zip(cohort.belief, prior, strict=True)]
        new = _Cohort(known, [math.log(max(p, 1e-300)) for p in prior], now_s)
        new.pause, new.first_end = pause, first_end
        known.cohort = new
        self._believe(new)
        return new

    def _believe(self, cohort: _Cohort) -> None:
        """Normalise, and let the likeness and all others know what has changed."""
        highest = max(cohort.log)
        weights = [math.exp(x - highest) for x in cohort.log]
        total = sum(weights)
        belief = [w / total for w in weights]
        mine, others = cohort.likeness.sum, self._all
        before = cohort.belief or [0.0] * len(belief)
        for i, (new, old) in enumerate(zip(belief, before, strict=True)):
            if new != old:
                mine[i] += new - old
                others[i] += new - old
        cohort.belief = belief
        cohort.table = None
        self._moved.add(cohort)

    def _learn_repeats(self, cohort: _Cohort, last: int) -> None:
        """Was the cohort before it the better guess? Asked once a cohort."""
        if cohort.first_end is not None and cohort.pause is not None:
            counts = self._repeats[cohort.pause]
            share = counts[0] / counts[1]
            as_before, as_any = (mass[last] for mass in cohort.first_end)
            counts[0] += share * as_before / (share * as_before + (1 - share) * as_any)
            counts[1] += 1.0
            cohort.first_end = None

    def _table(self, cohort: _Cohort) -> list[float]:
        if cohort.table is None:
            cohort.table = gittins_index(_mass_of(cohort.belief))
            if cohort.told is None:
                cohort.told = cohort.table
        return cohort.table

    def _mass(self, member: _Member) -> list[float]:
        """Probability by bucket of how long it runs in all, its user's estimate included."""
        mass = _mass_of(member.cohort.belief)
        if member.estimate_s is None:
            return mass
        variance = self._users_error[0] / self._users_error[1]
        expected = math.log(max(member.estimate_s, 1.0))
        return [
            m * math.exp(-0.5 * (math.log((EDGES_S[i] + EDGES_S[i + 1]) / 2) - expected) ** 2 / variance) + 1e-12
            for i, m in enumerate(mass)
        ]


def likeness_name(name: str) -> str:
    """A name without its numbers, so that `sweep-17` and `sweep-18` are alike."""
    return "".join("#" if c.isdigit() else c for c in name).replace("##", "#").replace("##", "#")


def _mass_of(belief: Iterable[float]) -> list[float]:
    mass = [0.0] * N_BUCKETS
    for weight, h in zip(belief, GRID, strict=True):
        if weight > 1e-6:
            for i, m in enumerate(h.mass):
                mass[i] += weight * m
    return mass


def _quantile(mass: list[float], served_s: float, q: float) -> float:
    """Total running time that a share `q` of those that run longer than `served_s` stays below."""
    left: list[tuple[float, float, float]] = []
    for i, m in enumerate(mass):
        low, high = EDGES_S[i], EDGES_S[i + 1]
        if high > served_s:
            start = max(low, served_s)
            left.append((start, high, m * (high - start) / (high - low)))
    wanted = q * sum(m for _, _, m in left)
    for start, high, m in left:
        if wanted <= m:
            return start + (high - start) * (wanted / m if m > 0 else 1.0)
        wanted -= m
    return max(served_s, EDGES_S[-1])
