"""Spot policies (core/spot_policies.py) on a trace of what spot there was: cost, deadlines met, reclaims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from areal_sky.core.spot_policies import POLICIES, SpotContext, SpotPolicy, optimum
from areal_sky.run.simulation.result import Point, SimResult, TaskRow

OPTIMUM = "optimum"
NAMES = (*POLICIES, OPTIMUM)


@dataclass(frozen=True, slots=True)
class SpotJob:
    """`work_s` on each of `nodes` nodes within `deadline_s`; infinite work: it serves until the trace ends.

    A gang runs on all its nodes or not at all; others run on as many as they have. Prices per node-hour: of AWS
    p3.2xlarge (V100) in the years of the traces, as "Can't Be Late" has them.
    """

    work_s: float = 48 * 3600.0
    deadline_s: float = 70 * 3600.0
    restart_s: float = 720.0
    nodes: int = 1
    gang: bool = False
    spot_usd: float = 0.973
    on_demand_usd: float = 3.06


def replay(name: str, job: SpotJob, gap_s: float, spot: Sequence[int], trace: str = "") -> SimResult:
    """The work from the first tick of the trace to its end, to the end of the trace or to long after the deadline.

    Raises KeyError for a name that is not among `NAMES`, ValueError where the optimum cannot meet the deadline.
    """
    units = 1 if job.gang else job.nodes
    size = job.nodes if job.gang else 1
    there = [n // size for n in spot]
    first = SpotContext(
        0.0, gap_s, units, there[0], 0, 0, 0, 0.0, job.work_s, job.deadline_s, job.restart_s,
        job.spot_usd * size, job.on_demand_usd * size,
    )  # fmt: skip
    policy = optimum(there, first) if name == OPTIMUM else POLICIES[name]
    return _Replay(first, policy, there, size).run(name, trace)


# ---------------------------------------------------------------- how


class _Replay:
    """Of every node held, how much of its restart is still to come."""

    def __init__(self, first: SpotContext, policy: SpotPolicy, there: Sequence[int], size: int):
        self._ctx, self._policy, self._there, self._size = first, policy, there, size
        self._spot: list[float] = []
        self._regular: list[float] = []
        self._usd = {"spot": 0.0, "on_demand": 0.0}
        self._points: list[Point] = []
        self._work = self._lost_s = 0.0
        self._reclaims = self._launches = self._short = 0

    def run(self, name: str, trace: str) -> SimResult:
        ctx = self._ctx
        need = ctx.work_s * ctx.nodes
        ended_s: float | None = None
        now_s = started_s = 0.0
        memory: object = None
        for n in self._there:
            gone = len(self._spot) - min(len(self._spot), n)
            self._reclaims += gone
            self._spot = self._spot[: len(self._spot) - gone]
            decision = self._policy(self._now(now_s, n, memory))
            memory = decision.memory
            self._spot = self._sized(self._spot, min(decision.spot, n))
            self._regular = self._sized(self._regular, decision.on_demand)
            before = self._work
            part = self._let_run(ctx.gap_s, need)
            if not before and self._work:
                started_s = now_s
            self._point(now_s)
            now_s += ctx.gap_s
            if part is not None:
                ended_s = now_s - ctx.gap_s + part
                break
        self._spot, self._regular = [], []
        self._point(now_s if ended_s is None else ended_s, over=True)
        deadline_s = None if math.isinf(ctx.deadline_s) else ctx.deadline_s
        row = TaskRow(
            task_id="t1", tenant="", model="", kind="train", gpus=float(ctx.nodes * self._size), submitted_s=0.0,
            started_s=started_s, ended_s=ended_s, ideal_s=ctx.work_s, deadline_s=deadline_s,
            lost_work_s=self._lost_s / ctx.nodes,
            preemptions=0, reclaims=self._reclaims, outcome="unfinished" if ended_s is None else "succeeded",
        )  # fmt: skip
        ticks = now_s / ctx.gap_s
        return SimResult(
            name=trace, policy=name, seed=0, days=now_s / 86400, tasks=(row,), points=tuple(self._points),
            events=round(ticks), reclaims=self._reclaims, launches=self._launches, launch_failures=0,
            metrics={"full_frac": 1 - self._short / ticks, "work_frac": self._work / need if need < math.inf else 1.0},
        )  # fmt: skip

    def _now(self, now_s: float, there: int, memory: object) -> SpotContext:
        ctx = self._ctx
        return replace(
            ctx, now_s=now_s, spot_available=there, spot=len(self._spot), on_demand=len(self._regular),
            settled=sum(1 for x in self._spot if x <= 0), done_s=self._work / ctx.nodes, memory=memory,
        )  # fmt: skip

    def _sized(self, held: list[float], wanted: int) -> list[float]:
        """Those that have started up longest stay."""
        self._launches += max(0, wanted - len(held))
        return sorted(held)[:wanted] + [self._ctx.restart_s] * (wanted - len(held))

    def _let_run(self, gap_s: float, need: float) -> float | None:
        """One tick; the seconds of it after which all was done, else None."""
        ctx = self._ctx
        every = sorted(self._spot + self._regular)[: ctx.nodes]  # more than wanted hedge, and do not work
        done = sum(max(0.0, gap_s - x) for x in every)
        self._lost_s += sum(min(gap_s, x) for x in every)
        self._short += sum(1 for x in every if x <= 0) < ctx.nodes
        left = need - self._work
        part = None
        if done >= left - 1e-6:
            part = min(gap_s, max(every) + left / len(every))  # exact where all restarts are alike
        self._work += done
        hours = (gap_s if part is None else part) / 3600
        self._usd["spot"] += len(self._spot) * ctx.spot_usd * hours
        self._usd["on_demand"] += len(self._regular) * ctx.on_demand_usd * hours
        self._spot = [max(0.0, x - gap_s) for x in self._spot]
        self._regular = [max(0.0, x - gap_s) for x in self._regular]
        return part

    def _point(self, now_s: float, over: bool = False) -> None:
        held = self._spot + self._regular
        size = float(self._size)
        starting = sum(1 for x in held if x > 0) * size
        busy = min(len(held) * size - starting, self._ctx.nodes * size)
        self._points.append(Point(
            t_s=now_s,
            gpus={"busy": busy, "idle": len(held) * size - starting - busy, "starting": starting, "draining": 0.0},
            gpus_by_market={"spot": len(self._spot) * size, "on_demand": len(self._regular) * size},
            waiting_tasks=int(not held and not over),
            waiting_gpus=0.0 if over else max(0.0, (self._ctx.nodes - len(held)) * size),
            cost_usd=sum(self._usd.values()), cost_by_market=dict(self._usd),
        ))  # fmt: skip
