"""What a user asks for with one task, and the states that it goes through. Durations and times are seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from areal_sky.core.model import Bundle

# What may be taken from its GPUs for another task unless its owner says otherwise: work that starts over cheaply.
PREEMPTIBLE_KINDS = frozenset({"rollout", "eval", "reward"})
BACKOFF_S = 5.0


class TaskState(StrEnum):
    QUEUED = "QUEUED"  # waits; `reason` says for what
    PLACED = "PLACED"  # resources chosen; Ray reserves them, its ranks are being started
    RUNNING = "RUNNING"  # every rank's process has been started
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


TASK_ENDED = frozenset({TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELLED})


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """What a user submitted. All bundles of a task are alike and start together or not at all.

    `kind`: train, rollout, eval, reward or driver. `priority` is 0..100, 5 by default. `group` pins it to a node
    group. `accelerators` narrows it to nodes with one of these. `command` is a shell command line;
    `payload` is a base64 cloudpickle of a Python callable instead.

    Elastic: with `min_bundles` below `bundles` it may run with any number between. `preemptible` None: by its kind.
    `estimate_s`: how long its owner thinks one run takes. `deadline_s` is a Unix time; `if_late` says what becomes
    of a task that cannot meet it when it is submitted.

    Order: it waits until all of `after` have succeeded. These are task ids, ranges of ids (`t5..t9`), and before the
    head has looked them up, names.

    Failures: up to `max_retries` runs more, the n-th `backoff_s` x 2^(n-1) after the failure. `timeout_s` bounds one
    run, `total_timeout_s` the time from the first start to the end, waiting between runs included.

    Drivers: `backends` (AReaL's allocation mode, `sglang:d4t2+fsdp:d8`) says what the program will take by itself, in
    placement groups of its own. It is admitted once all of that fits; `bundle` is for the program alone.

    Arrays: `array` copies are made of it when it comes in (None: it is a single task); each then has its
    `array_index` from 0. `labels` are for finding tasks again. Two submits with one `submit_key` are one.
    """

    kind: str
    command: str = ""
    payload: str | None = None
    name: str = ""
    model: str | None = None
    model_type: str | None = None
    bundles: int = 1
    bundle: Bundle = Bundle()  # noqa: RUF009 - frozen
    priority: float = 5.0
    group: str | None = None
    accelerators: tuple[str, ...] = ()
    envs: Mapping[str, str] = field(default_factory=dict[str, str])
    max_retries: int = 0
    deadline_s: float | None = None
    submit_key: str | None = None
    min_bundles: int | None = None
    preemptible: bool | None = None
    estimate_s: float | None = None
    if_late: Literal["warn", "refuse"] = "warn"
    after: tuple[str, ...] = ()
    backoff_s: float = BACKOFF_S
    timeout_s: float | None = None
    total_timeout_s: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    array: int | None = None
    array_index: int | None = None
    backends: str | None = None

    @property
    def title(self) -> str:
        """What it is called, by its user or by its command: tasks of one title are expected to be alike."""
        return self.name or self.command[:80]

    @property
    def may_be_preempted(self) -> bool:
        return self.kind in PREEMPTIBLE_KINDS if self.preemptible is None else self.preemptible

    @property
    def fewest_bundles(self) -> int:
        return self.bundles if self.min_bundles is None else self.min_bundles
