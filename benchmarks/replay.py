"""A trace through the production engine in virtual time (run/simulation/tasks.py), on nodes that are always there.

The cluster has as many GPUs as make the offered load `LOAD`: ceil(GPU-seconds of all tasks / (time from first submit
to last x LOAD)), at least those of the largest task; nodes of 8 (the last one smaller). A task of n GPUs is a gang
of n bundles of one GPU, packed on few nodes, on several where it must. A preemption takes effect at once and costs its
victim `LOST_S` seconds of work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from areal_sky.adapters.traces import TraceTask
from areal_sky.core.admission import OrderPolicy
from areal_sky.core.model import Bundle, NodeShape
from areal_sky.run.simulation.simtask import Clairvoyance, SimTask, VirtualNode
from areal_sky.run.simulation.tasks import TaskWorld

LOAD = 0.8
LOST_S = 60.0
GPUS_PER_NODE = 8
_ONE_GPU = Bundle(gpus=1.0, cpus=0.0, memory_gib=0.0)


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
    start_s = min(t.submitted_s for t in tasks)
    world = TaskWorld(
        start_s, order, weights={f"{w:g}": w for w in weights or ()}, known=known, patience_s=patience_s,
        preemptible=preemptible,
    )  # fmt: skip
    for n in range(math.ceil(gpus / GPUS_PER_NODE)):
        shape = NodeShape(float(min(GPUS_PER_NODE, gpus - n * GPUS_PER_NODE)), 0.0, 0.0, "GPU")
        name = f"n{n:04}"
        world.add_node(VirtualNode(name, "main", name, 0, shape, [shape.gpus, 0.0, 0.0]), start_s)
    world.expect(
        SimTask(
            str(i), t.submitted_s - start_s, t.duration_s, _ONE_GPU, t.gpus, preemptible=True, restart_s=LOST_S,
            estimate_s=estimates_s[i] if estimates_s else None, model_type=f"{weights[i]:g}" if weights else "",
        )
        for i, t in sorted(enumerate(tasks), key=lambda x: (x[1].submitted_s, x[0]))
    )  # fmt: skip
    while world.unfinished:
        now_s = world.next_s()
        if now_s == math.inf:
            raise RuntimeError(f"{world.unfinished} tasks wait for ever")
        world.step(now_s)
    rows = [world.row(str(i)) for i in range(len(tasks))]
    took = tuple((r.ended_s or 0.0) - r.submitted_s for r in rows)
    slow = tuple(s / max(t.duration_s, 1.0) for s, t in zip(took, tasks, strict=True))
    return Outcome(took, slow, sum(r.preemptions for r in rows))
