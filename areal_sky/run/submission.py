"""What becomes of specs that are submitted: known ones are found again, new ones checked, arrays taken apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from areal_sky.core.dependencies import expanded, looked_up
from areal_sky.core.memory_check import check_task
from areal_sky.core.memory_terms import Stage
from areal_sky.core.model import HEAD_GROUP
from areal_sky.core.nodeenv import HeadEnv
from areal_sky.core.permitted import could_ever_fit
from areal_sky.core.placement import Ask, NodeRoom, Placement, fit
from areal_sky.core.queueing import Entry, deadline_warning
from areal_sky.core.taskevents import Submitted, TaskEvent, Warned
from areal_sky.core.taskmodel import TaskSpec
from areal_sky.errors import AlreadyExists, InvalidInput, Refused
from areal_sky.run import drivers
from areal_sky.run.taskbook import TaskBook

# What two submits with one key must agree in. Deadlines are counted from now, and pickles of one function differ.
SAME = ("kind", "command", "bundles", "bundle", "array")


@dataclass(frozen=True, slots=True)
class Submission:
    """`events` are to be recorded together. `tasks`: per spec its (first) task and how many copies it has."""

    events: list[TaskEvent]
    tasks: list[tuple[str, int]]
    warnings: list[str]


def submitted(
    specs: Sequence[TaskSpec],
    tasks: TaskBook,
    rooms: Sequence[NodeRoom],
    env: HeadEnv,
    now_s: float,
    learnt: Mapping[tuple[str, Stage], float] | None = None,
) -> Submission:
    """The facts of one submit. `rooms` are the live nodes as if empty, `learnt` corrects memory estimates.

    Raises InvalidInput, Refused, AlreadyExists (see TaskService.submit_many).
    """
    known = [_known(spec, tasks) for spec in specs]
    fresh = [spec for spec, task in zip(specs, known, strict=True) if task is None]
    events: list[TaskEvent] = []
    warnings: list[str] = []
    made: list[tuple[str, int]] = []
    number = tasks.last_number
    never: dict[Ask, str | None] = {}
    for spec in looked_up([_with_backends(s, env) for s in fresh], number + 1, tasks.numbers):
        gpus = _check(spec, rooms, env, never)
        tight = _check_memory(spec, gpus, env, learnt or {})
        if tight:
            warnings.append(tight)
        late = deadline_warning(_entry(spec, now_s), now_s)
        if late and spec.if_late == "refuse":
            raise Refused(f"{late}, and it asks to be refused then (if_late)")
        if late:
            warnings.append(f"{spec.name}: {late}" if len(fresh) > 1 and spec.name else late)
        made.append((f"t{number + 1}", spec.array or 1))
        for copy in expanded([spec]):
            number += 1
            events.append(TaskEvent(now_s, f"t{number}", Submitted(number, copy)))
            events += [TaskEvent(now_s, f"t{number}", Warned(words)) for words in (tight, late) if words]
    new = iter(made)
    return Submission(events, [next(new) if task is None else task for task in known], warnings)


def _entry(spec: TaskSpec, now_s: float) -> Entry:
    """As far as its deadline is concerned."""
    ask = Ask(spec.bundle, spec.bundles)
    return Entry("", 0, ask, now_s, deadline_s=spec.deadline_s, estimate_s=spec.estimate_s)


def _known(spec: TaskSpec, tasks: TaskBook) -> tuple[str, int] | None:
    """(first task, copies) of an earlier submit with the same key."""
    old = tasks.by_key(spec.submit_key) if spec.submit_key is not None else None
    if old is None:
        return None
    if any(getattr(old.spec, f) != getattr(spec, f) for f in SAME):
        raise AlreadyExists(f"submit_key {spec.submit_key!r} is {old.task_id}'s, which was asked to do other work")
    return old.task_id, old.spec.array or 1


def _with_backends(spec: TaskSpec, env: HeadEnv) -> TaskSpec:
    """A driver of a model takes that model's backends, unless it names its own."""
    mine = [n.backend for n in env.needs if n.model == spec.model and spec.kind == "driver"]
    plain = spec.bundles == 1 and not spec.bundle.gpus and spec.min_bundles is None
    return replace(spec, backends="+".join(mine)) if mine and spec.backends is None and plain else spec


def _check(spec: TaskSpec, rooms: Sequence[NodeRoom], env: HeadEnv, never: dict[Ask, str | None]) -> float:
    """Raises Refused for what can never run; returns the GPUs that it takes.

    `never` keeps what was found out about an ask: in a large submit most are alike.
    """
    if spec.array_index is not None:
        raise InvalidInput("array_index: is set for every copy of an array; ask for `array`")
    groups = [g.name for g in env.groups]
    if groups and spec.group is not None and spec.group not in (*groups, HEAD_GROUP):
        raise InvalidInput(f"group: there is no group {spec.group!r} (known: {', '.join(groups)})")
    need = drivers.need_of(spec, env)
    if need is not None:
        never_driver = drivers.why_never(spec, need, rooms, env)
        if never_driver is not None:
            raise Refused(never_driver)
    ask = Ask(spec.bundle, spec.fewest_bundles, spec.group, spec.accelerators)
    if ask not in never:
        never[ask] = why_never(ask, rooms, env)
    why = never[ask]
    if why is not None:
        raise Refused(why)
    return need.gpus if need is not None else spec.bundles * spec.bundle.gpus


def _check_memory(spec: TaskSpec, gpus: float, env: HeadEnv, learnt: Mapping[tuple[str, Stage], float]) -> str:
    """Refuses a task whose model cannot fit any GPU that it may run on; returns what is to be warned of.

    On pretend machines (`infra: local`) it only warns.
    """
    allowed = {a.lower() for a in spec.accelerators}
    shapes = [
        g.shape
        for g in env.groups
        if spec.group in (None, g.name) and (not allowed or (g.shape.accelerator or "").lower() in allowed)
    ]
    refusal, warning = check_task(env.needs, spec.model, spec.kind, gpus, shapes, learnt)
    if refusal and env.shape is None:
        raise Refused(refusal)
    return refusal or warning


def why_never(ask: Ask, rooms: Sequence[NodeRoom], env: HeadEnv) -> str | None:
    """Why the gang can never run: neither on `rooms` (live nodes as if empty) nor in the cluster at its largest."""
    if isinstance(fit(ask, rooms), Placement):
        return None
    return could_ever_fit(ask, env.groups, env.shape)
