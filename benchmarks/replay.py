"""A trace through the production engine (core/admission.py) in virtual time: event by event, deterministic.

The cluster has as many GPUs as make the offered load `LOAD`: ceil(GPU-seconds of all tasks / (time from first submit
to last x LOAD)), at least those of the largest task; nodes of 8 (the last one smaller). A task of n GPUs is a gang
of n bundles of one GPU, packed on few nodes, on several where it must. A preemption takes effect at once and costs its
victim `LOST_S` seconds of work, always in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from areal_sky.adapters.traces import TraceTask
from areal_sky.core.admission import Admission, Entry, OrderPolicy, Place, Preempt
from areal_sky.core.gangs import Ask
from areal_sky.core.model import Bundle
from areal_sky.core.room import NodeRoom
from areal_sky.run.simulation.simtask import Clairvoyance

LOAD = 0.8
LOST_S = 60.0
GPUS_PER_NODE = 8
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Completion times in seconds, in the order of the tasks, and how many preemptions it took."""

    completion_s: tuple[float, ...]
    slowdowns: tuple[float, ...]
    preemptions: int


def gpus_for(tasks: Sequence[TraceTask], load: float = LOAD) -> int:
    """See the module."""
    span_s = max(t.submitted_s for t in tasks) - min(t.submitted_s for t in tasks)
    work = sum(t.duration_s * t.gpus for t in tasks)
    largest = max(t.gpus for t in tasks)
    return largest if span_s <= 0 else max(largest, math.ceil(work / (span_s * load)))


def replay(
    tasks: Sequence[TraceTask],
    order: OrderPolicy,
    gpus: int,
    *,
    known: Clairvoyance | None = None,
    estimates_s: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
    preemptible: bool = True,
    patience_s: float = math.inf,
) -> Outcome:
    """All tasks from their submits to their ends. `estimates_s`, `weights`: per task. `patience_s`: see Admission."""
    return _Replay(tasks, order, gpus, known or Clairvoyance(), patience_s).run(
        lambda i: Entry(
            task_id=str(i), number=i + 1, ask=Ask(_ONE_GPU, tasks[i].gpus), submitted_s=tasks[i].submitted_s,
            weight=weights[i] if weights else 1.0, preemptible=preemptible,
            estimate_s=estimates_s[i] if estimates_s else None,
        )
    )  # fmt: skip


# ---------------------------------------------------------------- how

_ONE_GPU = Bundle(gpus=1.0, cpus=0.0, memory_gib=0.0)


class _Replay:
    def __init__(
        self, tasks: Sequence[TraceTask], order: OrderPolicy, gpus: int, known: Clairvoyance, patience_s: float
    ):
        self._tasks = tasks
        self._known = known
        self._engine = Admission(order, patience_s=patience_s)
        for n in range(math.ceil(gpus / GPUS_PER_NODE)):
            here = min(GPUS_PER_NODE, gpus - n * GPUS_PER_NODE)
            room = NodeRoom(f"n{n:04}", "main", (1.0,) * here, 0.0, 0.0, "GPU", True, f"n{n:04}")
            self._engine.set_node(room)
        self._needs_s = known.needs_s
        self._served_s = [0.0] * len(tasks)
        self._since_s = [0.0] * len(tasks)
        self._starts = [0] * len(tasks)  # how often it has started: an end that was foreseen before is void
        self._ends_s = [math.nan] * len(tasks)
        self._running: set[int] = set()
        self._preemptions = 0
        self._ends: list[tuple[float, int, int]] = []

    def run(self, entry_of: Callable[[int], Entry]) -> Outcome:
        tasks, engine = self._tasks, self._engine
        submits = sorted(range(len(tasks)), key=lambda i: (tasks[i].submitted_s, i))
        done = at = 0
        now_s = -math.inf
        again_s = math.inf
        while done < len(tasks):
            while self._ends and self._starts[self._ends[0][1]] != self._ends[0][2]:
                heappop(self._ends)
            now_s = min(
                self._ends[0][0] if self._ends else math.inf,
                tasks[submits[at]].submitted_s if at < len(tasks) else math.inf,
                max(engine.next_change_s(), now_s),
                again_s,
            )
            if now_s == math.inf:
                raise RuntimeError(f"{len(tasks) - done} tasks wait for ever")
            while self._ends and self._ends[0][0] <= now_s:
                _, i, start = heappop(self._ends)
                if self._starts[i] == start:
                    self._running.discard(i)
                    self._ends_s[i] = now_s
                    done += 1
                    engine.ended(str(i), now_s)
            while at < len(tasks) and tasks[submits[at]].submitted_s <= now_s:
                i = submits[at]
                self._needs_s[str(i)] = tasks[i].duration_s
                engine.submit(entry_of(i))
                at += 1
            follow_up = now_s == again_s
            acted = self._decide(now_s)
            # Some of what the engine does it does at most once a second: it is asked again a second after each event.
            again_s = math.inf if follow_up and not acted else now_s + SETTLE_S
        took = tuple(e - t.submitted_s for e, t in zip(self._ends_s, tasks, strict=True))
        slow = tuple(s / max(t.duration_s, 1.0) for s, t in zip(took, tasks, strict=True))
        return Outcome(took, slow, self._preemptions)

    def _decide(self, now_s: float) -> bool:
        engine, acted = self._engine, False
        while True:
            decisions = engine.decide(now_s)
            stopped = False
            acted = acted or bool(decisions)
            for decision in decisions:
                i = int(decision.task_id)
                if isinstance(decision, Place):
                    self._since_s[i] = now_s
                    self._running.add(i)
                    self._starts[i] += 1
                    left_s = self._needs_s[decision.task_id] - self._served_s[i]
                    heappush(self._ends, (now_s + left_s, i, self._starts[i]))
                elif isinstance(decision, Preempt):
                    stopped = True
                    self._preemptions += 1
                    self._running.discard(i)
                    self._starts[i] += 1
                    self._served_s[i] += now_s - self._since_s[i]
                    self._needs_s[decision.task_id] += LOST_S
                    engine.requeue(decision.task_id, self._served_s[i], now_s)
            if not stopped:
                return acted
