"""What a virtual world is made of: tasks of a workload, their lives, and nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from areal_sky.core.model import Bundle, NodeShape, NodeView


@dataclass(frozen=True, slots=True)
class SimTask:
    """A task of a workload: `bundles` x `bundle`, running `duration_s` in all if never stopped (None: until told).

    `submitted_s` and `deadline_s` are seconds since the start. `checkpoint_s`: seconds of work between checkpoints,
    0: nothing is lost by a stop, None: all is. `restart_s`: seconds that each start after a stop takes before it works.
    """

    task_id: str
    submitted_s: float
    duration_s: float | None
    bundle: Bundle
    bundles: int = 1
    tenant: str = "all"
    model: str = ""
    model_type: str = ""
    kind: str = "train"
    priority: float = 5.0
    deadline_s: float | None = None
    estimate_s: float | None = None
    preemptible: bool | None = None
    checkpoint_s: float | None = 0.0
    restart_s: float = 60.0
    group: str | None = None
    accelerators: tuple[str, ...] = ()
    like: str = ""

    @property
    def gpus(self) -> float:
        return self.bundle.gpus * self.bundles


@dataclass(slots=True)
class Clairvoyance:
    """What only those orders may look at that claim to know the future: seconds of service each task needs in all."""

    needs_s: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(slots=True)
class VirtualNode:
    """A live node. `tasks`: bundles that each task has there. `free` GPUs, CPUs, GiB. `view` is kept while it holds."""

    node_id: str
    group: str
    replica: str
    index: int
    shape: NodeShape
    free: list[float]
    tasks: dict[str, int] = field(default_factory=dict[str, int])
    draining: bool = False
    idle_since_s: float | None = None
    view: NodeView | None = None


@dataclass(slots=True)
class Life:
    """What has become of a task so far."""

    task: SimTask
    served_s: float = 0.0  # all that it has run
    done_s: float = 0.0  # of its work, what is safe
    since_s: float = 0.0
    overhead_s: float = 0.0
    starts: int = 0
    nodes: tuple[VirtualNode, ...] = ()
    first_s: float | None = None
    ended_s: float | None = None
    saved_s: float | None = None  # a notice made it write a checkpoint then
    lost_s: float = 0.0
    preemptions: int = 0
    reclaims: int = 0
    outcome: str = "unfinished"

    def safe_s(self, worked_s: float) -> float:
        """Of all its work, what it need not do again when it is stopped now."""
        every_s = self.task.checkpoint_s
        if every_s is None:
            return 0.0
        if every_s == 0:
            return self.done_s + worked_s
        safe_s = self.done_s + math.floor(worked_s / every_s) * every_s
        if self.saved_s is not None:
            safe_s = max(safe_s, self.done_s + max(0.0, self.saved_s - self.since_s - self.overhead_s))
        return safe_s
