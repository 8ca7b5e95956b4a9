"""Tasks in Python: describe one, queue it, follow it.

handle = TaskScheduler("grpo-math").submit(Task(kind="eval", gpus=1, entrypoint="python eval.py"))
handle.wait(), handle.logs(), handle.why()
"""

from __future__ import annotations

import base64
import inspect
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_sky.adapters.torch_memory import as_metrics
from areal_sky.core.dependencies import numbers_of
from areal_sky.core.model import Bundle
from areal_sky.core.taskmodel import BACKOFF_S, TaskSpec
from areal_sky.core.taskspec import task_spec_from_json, task_spec_to_json
from areal_sky.errors import InvalidInput, Unreachable
from areal_sky.units import parse_duration_s, parse_gib

if TYPE_CHECKING:
    from areal_sky.adapters.gateway_client import GatewayClient
    from areal_sky.cluster import Cluster
    from areal_sky.home import ClusterHome

log = logging.getLogger(__name__)
Entrypoint = str | Sequence[str] | Callable[[], object]


class TaskStatus(StrEnum):
    """`SCHEDULED`: resources are chosen, its ranks are being started. `QUEUED`: waits. The rest says itself."""

    QUEUED = "QUEUED"
    SCHEDULED = "SCHEDULED"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def ended(self) -> bool:
        return self in (TaskStatus.SUCCEEDED, TaskStatus.FAILED, TaskStatus.CANCELLED)


@dataclass(frozen=True)
class Task:
    """A gang of `bundles` like processes that start together or not at all.

    `entrypoint`: a shell command line, a list of words, or a callable without arguments (pickled; an int that it
    returns is the exit code). Each process is a rank (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set) in a fresh
    directory on its node, or in `workdir` there. Per bundle: `gpus` is whole or a fraction below 1, `memory` is
    `8GiB` or a number of GiB. `priority` is 0..100. `deadline` is a duration from now (`2h`) or a Unix time; one
    that cannot be met is warned of, or refused with `if_late="refuse"`. Other times are durations, or seconds.

    Failures: `max_retries` counts own failures only: a lost node costs none. The first retry waits `backoff`, each
    further one twice as long. `timeout` bounds one run, `total_timeout` all of them from the first start on.
    Order: `after` are ids or names of tasks that must have succeeded. `array`: so many copies, each with its
    AREAL_SKY_ARRAY_INDEX from 0. `min_bundles`: it may run with fewer bundles. `preemptible`: whether others may take
    its place (None: rollout, eval and reward yes, train and driver no). `estimate`: how long one run will take.
    `backends`: of kind driver, what the program takes in placement groups of its own (`sglang:d4t2+fsdp:d8`).
    """

    entrypoint: Entrypoint
    kind: str = "train"
    model: str | None = None
    model_type: str | None = None
    name: str = ""
    bundles: int = 1
    gpus: float = 0.0
    cpus: float = 1.0
    memory: str | float = 0.0
    priority: float = 5.0
    deadline: str | float | None = None
    group: str | None = None
    accelerators: Sequence[str] = ()
    envs: Mapping[str, str] = field(default_factory=dict[str, str])
    max_retries: int = 0
    workdir: str | None = None
    submit_key: str | None = None
    min_bundles: int | None = None
    preemptible: bool | None = None
    estimate: str | float | None = None
    if_late: str = "warn"
    after: str | Sequence[str] = ()
    backoff: str | float = BACKOFF_S
    timeout: str | float | None = None
    total_timeout: str | float | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    array: int | None = None
    backends: str | None = None

    def spec(self) -> TaskSpec:
        """Checked, as it goes to the head. Raises InvalidInput that lists every mistake."""
        command, payload = _entrypoint(self.entrypoint, self.workdir)
        accelerators, after = (
            (names,) if isinstance(names, str) else tuple(names) for names in (self.accelerators, self.after)
        )
        deadline = self.deadline
        if isinstance(deadline, str):
            deadline = time.time() + parse_duration_s(deadline)
        spec = TaskSpec(
            kind=self.kind, command=command, payload=payload, name=self.name, model=self.model,
            model_type=self.model_type, bundles=self.bundles,
            bundle=Bundle(self.gpus, self.cpus, parse_gib(str(self.memory))), priority=self.priority, group=self.group,
            accelerators=accelerators, envs=dict(self.envs), max_retries=self.max_retries,
            deadline_s=deadline, submit_key=self.submit_key, min_bundles=self.min_bundles,
            preemptible=self.preemptible, estimate_s=_seconds(self.estimate), if_late=self.if_late,  # type: ignore[arg-type]
            after=after, backoff_s=_seconds(self.backoff) or 0.0, timeout_s=_seconds(self.timeout),
            total_timeout_s=_seconds(self.total_timeout), labels=dict(self.labels), array=self.array,
            backends=self.backends,
        )  # fmt: skip
        return task_spec_from_json(task_spec_to_json(spec))


class TaskHandle:
    """A queued task. Every method asks the head; all raise Unreachable, Unauthorized, NotFound."""

    def __init__(self, connect: Callable[[], GatewayClient], task_id: str):
        self._connect = connect
        self.task_id = task_id

    def __repr__(self) -> str:
        return f"TaskHandle({self.task_id!r})"

    def status(self) -> TaskStatus:
        return _status(self.info()["state"])

    def info(self) -> dict[str, Any]:
        """All that is known of it, as JSON values."""
        with self._connect() as gateway:
            return gateway.task(self.task_id)

    def why(self) -> list[tuple[float, str]]:
        """What happened to it and what it waits for: (Unix time, sentence), oldest first."""
        with self._connect() as gateway:
            return [(line["t_s"], line["text"]) for line in gateway.story(self.task_id)]

    def logs(self, *, rank: int = 0, stream: str = "out", attempt: int | None = None) -> str:
        """All that the rank has written so far to `out` or `err` (the latest attempt unless told)."""
        parts: list[str] = []
        offset = 0
        with self._connect() as gateway:
            while True:
                page = gateway.logs(self.task_id, rank=rank, stream=stream, offset=offset, attempt=attempt)
                if not page["text"]:
                    return "".join(parts)
                parts.append(page["text"])
                offset = page["next_offset"]

    def metrics(self) -> dict[str, float]:
        """The latest value of everything that it reported."""
        return self.info()["metrics"]

    def wait(self, timeout_s: float | None = None, poll_s: float = 0.3) -> TaskStatus:
        """Blocks until it has ended; returns how, or how it is when `timeout_s` is over. Sits out a head's restart."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        silent_since_s: float | None = None
        while True:
            try:
                status = self.status()
                silent_since_s = None
            except Unreachable:
                silent_since_s = silent_since_s or time.monotonic()
                if time.monotonic() - silent_since_s > 60 or (until_s is not None and time.monotonic() >= until_s):
                    raise
            else:
                if status.ended or (until_s is not None and time.monotonic() >= until_s):
                    return status
            time.sleep(poll_s)

    def cancel(self) -> TaskStatus:
        """Asks for its end; a running one gets SIGTERM and 10 s."""
        with self._connect() as gateway:
            return _status(gateway.cancel(self.task_id)["state"])


class TaskScheduler:
    """Queues tasks on a cluster: named, attached, or None for the only one that is up (inside a task: its own)."""

    def __init__(self, cluster: str | Cluster | ClusterHome | None = None):
        self._connect = connector(cluster)
        self.handles: list[TaskHandle] = []

    def schedule_task(self, task: Task, priority: float | None = None) -> TaskStatus:
        """Queues the task; SCHEDULED when its resources were free, else QUEUED. `handles[-1]` follows it.

        `priority` (0..100) overrides the task's own, which is 5 by default. Raises InvalidInput, Refused for a gang
        that the cluster can never hold, Unreachable.
        """
        if priority is not None:
            task = replace(task, priority=priority)
        with self._connect() as gateway:
            answer = gateway.submit(task.spec())
        for text in answer["warnings"]:
            log.warning("%s: %s", answer["task_id"], text)
        self.handles.append(TaskHandle(self._connect, answer["task_id"]))
        return TaskStatus(answer["status"])

    def submit(self, task: Task, priority: float | None = None) -> TaskHandle:
        """`schedule_task` for those who want the handle; of an array, that of its first copy."""
        self.schedule_task(task, priority)
        return self.handles[-1]

    def submit_many(self, tasks: Sequence[Task]) -> list[TaskHandle]:
        """Queues all of them, or none, at once; they may wait for each other by name (`after`).

        A handle for each, and for each copy of an array. Raises as `schedule_task`.
        """
        with self._connect() as gateway:
            answer = gateway.submit_many([task.spec() for task in tasks])
        for text in answer["warnings"]:
            log.warning("%s", text)
        ids = (f"t{n}" for a in answer["tasks"] for n in numbers_of([a.get("task_ids") or a["task_id"]]))
        handles = [TaskHandle(self._connect, task_id) for task_id in ids]
        self.handles += handles
        return handles


def submit(home: ClusterHome, task: Task) -> TaskHandle:
    """Queues a task on that cluster. Raises InvalidInput, Refused, Unreachable."""
    return TaskScheduler(home).submit(task)


def track_runtime_metrics(task_id: str, metrics: Mapping[str, float]) -> bool:
    """Records values of a running task (reward, loss, step, tokens_per_s, ...); callable inside a task and outside.

    NaN and infinities are told, too: they raise an alert. What PyTorch holds of each GPU (`gpu0_memory_allocated_gib`,
    `gpu0_memory_cached_gib`) travels with a task's own. False when the head does not answer: a training run shall not
    die of its metrics. Raises InvalidInput for what is no number, NotFound.
    """
    rank = ""
    if os.environ.get("AREAL_SKY_TASK_ID") == task_id:
        rank, metrics = os.environ.get("RANK", ""), {**as_metrics(), **metrics}
    try:
        with connector(None)() as gateway:
            gateway.track_metrics(task_id, metrics, int(rank) if rank.isdigit() else None)
    except Unreachable as e:
        log.warning("metrics of %s are lost: %s", task_id, e)
        return False
    return True


def checkpointed(task_id: str | None = None) -> bool:
    """Says that the task's work up to now is safe: if it is ended, only what comes after is lost.

    Inside a task, without an id, it is that task. False when the head does not answer. Raises NotFound, Refused for
    a task that does not run, InvalidInput without an id outside of a task.
    """
    return _tell(task_id, "checkpoint", lambda gateway, task: gateway.checkpointed(task))


@contextmanager
def low_phase(name: str, task_id: str | None = None) -> Iterator[None]:
    """While this lasts (an evaluation, say) the task leaves its GPUs idle, and others may have them.

    It ends when the GPUs are the task's alone again: who has borrowed them is ended first, within the grace of 10 s.
    Inside a task, without an id, it is that task. A head that does not answer is no error: then nobody gets them.
    Raises NotFound, Refused for a task that does not run, InvalidInput.
    """
    _tell(task_id, "phase", lambda gateway, task: gateway.enter_phase(task, name, True))
    try:
        yield
    finally:
        told = _tell(task_id, "phase", lambda gateway, task: gateway.enter_phase(task, f"after {name}"[:64], False))
        while told and not _gpus_are_back(task_id):
            time.sleep(0.1)


def _gpus_are_back(task_id: str | None) -> bool:
    back: list[bool] = []
    return not _tell(task_id, "phase", lambda head, task: back.append(not head.task(task)["borrowers"])) or back[-1]


def _tell(task_id: str | None, what: str, call: Callable[[GatewayClient, str], None]) -> bool:
    task = task_id or os.environ.get("AREAL_SKY_TASK_ID")
    if not task:
        raise InvalidInput("no task id is given, and this is no task of areal_sky")
    try:
        with connector(None)() as gateway:
            call(gateway, task)
    except Unreachable as e:
        log.warning("the %s of %s is not told: %s", what, task, e)
        return False
    return True


def _seconds(duration: str | float | None) -> float | None:
    return parse_duration_s(duration) if isinstance(duration, str) else duration


def _status(state: str) -> TaskStatus:
    return TaskStatus.SCHEDULED if state == "PLACED" else TaskStatus(state)


def connector(cluster: str | Cluster | ClusterHome | None) -> Callable[[], GatewayClient]:
    """Makes a client of that cluster's head; None: inside a task its own, else the only cluster that is up."""

    def connect() -> GatewayClient:
        from areal_sky.adapters.gateway_client import GatewayClient
        from areal_sky.home import ClusterHome, choose_cluster

        url, token = os.environ.get("AREAL_SKY_GATEWAY"), os.environ.get("AREAL_SKY_TOKEN")
        if cluster is None and url and token:
            return GatewayClient(url, token)
        if cluster is None or isinstance(cluster, str):
            return choose_cluster(cluster).gateway("submit")
        home = cluster if isinstance(cluster, ClusterHome) else cluster.home
        return home.gateway("submit")

    return connect


def _entrypoint(entrypoint: Entrypoint, workdir: str | None) -> tuple[str, str | None]:
    """(command, payload), one of them empty."""
    if callable(entrypoint):
        if workdir is not None:
            raise InvalidInput("workdir: a callable starts in its rank's own directory; change it in there")
        return "", base64.b64encode(_pickled(entrypoint)).decode()
    command = entrypoint if isinstance(entrypoint, str) else shlex.join(entrypoint)
    return (f"cd {shlex.quote(workdir)} && {{ {command}\n}}" if workdir else command), None


def _pickled(call: Callable[[], object]) -> bytes:
    """Code of modules that only this machine has travels with the callable."""
    import cloudpickle

    module = inspect.getmodule(call)
    file = getattr(module, "__file__", None)
    installed = file is None or {"site-packages", "dist-packages"} & set(Path(file).parts)
    own = module is not None and module.__name__.split(".")[0] in ("areal_sky", *sys.stdlib_module_names)
    by_value = module is not None and module.__name__ != "__main__" and not installed and not own
    try:
        if by_value:
            cloudpickle.register_pickle_by_value(module)
        return cloudpickle.dumps(call)
    except Exception as e:
        raise InvalidInput(f"the callable cannot be pickled: {type(e).__name__}: {e}") from None
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
