"""What is found to be wrong, and where: the words that detectors, rules, alerts and actions share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """What can be wrong. All but the last two are found without being asked for."""

    STALL = "stall"  # a task that worked makes no progress
    THROUGHPUT_DROP = "throughput_drop"  # it works much slower than it did
    STRAGGLER = "straggler"  # one rank of a gang works much slower than the others
    MEMORY_LEAK = "memory_leak"  # memory of a GPU or a machine grows and will run out within the hour
    HEAT = "heat"  # the device is throttled for its heat, or much hotter than its neighbours
    ECC = "ecc"  # an uncorrectable memory error
    XID = "xid"  # the driver reported an error
    LOST_GPU = "lost_gpu"  # the device fell off the bus or its driver failed
    NOT_A_NUMBER = "not_a_number"  # a task reported NaN or an infinity: its reward or loss is broken
    RULE = "rule"  # a rule of the spec's `alerts`
    MANUAL = "manual"  # AlertManager.trigger_alert


@dataclass(frozen=True, slots=True)
class Where:
    """A task, one of its ranks, a node (replica and index) or a GPU of it; empty fields: not more exactly known.

    `tasks` are those that run on the GPU; they do not make two places different.
    """

    task_id: str = ""
    rank: int | None = None
    replica: str = ""
    index: int = 0
    device: int | None = None
    tasks: tuple[str, ...] = field(default=(), compare=False)

    @property
    def affected(self) -> tuple[str, ...]:
        """The tasks that this concerns."""
        return (self.task_id,) if self.task_id else self.tasks

    def __str__(self) -> str:
        place = f"{self.replica}/{self.index}" if self.replica else ""
        if self.device is not None:
            place += f" GPU {self.device}"
        who = self.task_id + (f" rank {self.rank}" if self.rank is not None else "")
        return f"{who} on {place}" if who and place else who or place or "the cluster"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong now. One look finds it again and again until it is over.

    `name` tells findings of one kind at one place apart (the rule, the metric). `what` is the sentence, `evidence`
    the numbers that it rests on, `since_s` (Unix time) when it began, which is before it could be found.
    """

    kind: Kind
    where: Where
    since_s: float
    what: str
    evidence: str
    name: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float], compare=False)

    @property
    def key(self) -> tuple[str, Where, str]:
        return self.kind.value, self.where, self.name
