"""What a virtual world is made of: tasks of a workload, and nodes."""

from __future__ import annotations

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
