"""The YAML of tasks: one task, or a list of them under `tasks`. Every mistake with its place, all in one pass.

What is read here are the fields of `areal_sky.task.Task`, with `run` for the command. A SkyPilot task will do: what
describes machines is left out, since those of a cluster that is up are there already.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from areal_sky.errors import InvalidInput
from areal_sky.spec.backends import world_size
from areal_sky.spec.fields import Fields, is_null, moment_s, show
from areal_sky.spec.marks import ListNode, MapNode, Node, Notes, ScalarNode, parse
from areal_sky.spec.skypilot_keys import TASK_KEYS, TASK_KEYS_READ
from areal_sky.units import SIZE_GRAMMAR, parse_gib

KINDS = ("train", "rollout", "eval", "reward", "driver")
IF_LATE = ("warn", "refuse")
MAX_BUNDLES = 1024
MAX_ARRAY = 100_000
MAX_RETRIES = 100
DAY_S = 86400.0
YEAR_S = 365 * DAY_S
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_OURS = frozenset({
    "run", "name", "kind", "model", "model_type", "bundles", "min_bundles", "gpus", "cpus", "memory", "priority",
    "deadline", "if_late", "estimate", "group", "accelerators", "envs", "workdir", "max_retries", "backoff", "timeout",
    "total_timeout", "after", "array", "labels", "preemptible", "submit_key", "backends",
})  # fmt: skip
_MEANT = {
    "command": "run", "entrypoint": "run", "gpu": "gpus", "cpu": "cpus", "mem": "memory", "ram": "memory",
    "env": "envs", "environment": "envs", "retries": "max_retries", "depends_on": "after", "dependencies": "after",
    "needs": "after", "replicas": "bundles", "ranks": "bundles", "world_size": "bundles", "tags": "labels",
    "accelerator": "accelerators", "type": "kind", "runtime": "estimate", "time_limit": "timeout", "key": "submit_key",
    "max_runtime": "timeout", "copies": "array", "count": "array", "backoff_s": "backoff", "timeout_s": "timeout",
    "allocation_mode": "backends", "backend": "backends",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TaskFields:
    """One task as it stands in a file: `fields` are arguments of `areal_sky.task.Task` (`run` as `entrypoint`).

    `left_out`: keys of a SkyPilot task that describe machines.
    """

    fields: dict[str, Any]
    left_out: tuple[str, ...] = field(default=())


def load_tasks(text: str, file_name: str, now_s: float) -> list[TaskFields]:
    """The tasks in `text`, in file order. `now_s` (Unix time) is what deadlines count from.

    Raises SpecError with every mistake found.
    """
    notes = Notes(file_name)
    root = parse(text, notes)
    if is_null(root):
        notes.add(Node(1, 1), "the file is empty, expected a task: `run: python train.py` is one")
        notes.raise_if_any()
    found: list[TaskFields] = []
    top = Fields(root, "", notes)
    if top.is_map and top.has("tasks"):
        items = top.items("tasks", "a list of tasks")
        if isinstance(top.map.entries["tasks"], ListNode) and not items:
            top.wrong(top.map.entries["tasks"], "tasks is an empty list, expected tasks")
        for path, item in items:
            if not isinstance(item, MapNode):
                notes.add(item, f"{path} is {show(item)}, expected a mapping of keys to values, such as `run: ...`")
                continue
            found.append(_task(Fields(item, path, notes), now_s))
        top.finish()
    elif top.is_map:
        found.append(_task(top, now_s))
    notes.raise_if_any()
    return found


def _task(f: Fields, now_s: float) -> TaskFields:
    f.hint(_MEANT)
    machines = [k for k in f.map.entries if k in {*TASK_KEYS, *TASK_KEYS_READ} - _OURS]
    if machines:  # a SkyPilot task: its `workdir` copies a folder, ours is one on the node
        machines += [k for k in ("workdir",) if f.has(k)]
    for key in machines:
        f.take(key)
    values: dict[str, Any] = {
        "entrypoint": _run(f),
        "name": _name(f),
        "kind": f.choice("kind", KINDS),
        "model": f.text("model", "the name of a model"),
        "model_type": f.text("model_type", "a model type such as moe or base"),
        "bundles": f.whole("bundles", 1, MAX_BUNDLES),
        "min_bundles": f.whole("min_bundles", 1, MAX_BUNDLES),
        "gpus": f.number("gpus", "a whole number of GPUs from 0 to 1,024, or a fraction below 1", _is_gpus),
        "cpus": f.number("cpus", "a number of CPUs from 0 to 100,000", lambda v: 0 <= v <= 100_000),
        "memory": _gib(f, "memory"),
        "priority": f.number("priority", "a number from 0 to 100", lambda v: 0 <= v <= 100),
        "deadline": moment_s(f, "deadline", now_s, past=True),
        "if_late": f.choice("if_late", IF_LATE),
        "estimate": f.duration_s("estimate", 1, YEAR_S),
        "group": f.text("group", "the name of a node group"),
        "accelerators": _names(f, "accelerators", "an accelerator's name or a list of them"),
        "envs": _texts(f, "envs", _ENV_NAME, "cannot name an environment variable, expected letters, digits and _"),
        "max_retries": f.whole("max_retries", 0, MAX_RETRIES),
        "backoff": f.duration_s("backoff", 0, DAY_S),
        "timeout": f.duration_s("timeout", 1, YEAR_S),
        "total_timeout": f.duration_s("total_timeout", 1, YEAR_S),
        "after": _names(f, "after", "a task's id or name, or a list of them"),
        "array": f.whole("array", 1, MAX_ARRAY),
        "labels": _texts(f, "labels", re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,62}"), "is no label's name"),
        "preemptible": f.boolean("preemptible"),
        "submit_key": f.text("submit_key", "a text that names this submit"),
        "backends": _backends(f),
    }  # fmt: skip
    if "workdir" not in machines:
        values["workdir"] = f.text("workdir", "a directory on the node")
    least, most = values["min_bundles"], values["bundles"]
    if least is not None and least > (1 if most is None else most):
        f.wrong(f.map.entries["min_bundles"], f"{f.path('min_bundles')} is `{least}`, expected at most `bundles`")
    if values["gpus"] in (None, 0) and values["cpus"] == 0:
        f.wrong(f.map.entries["cpus"], f"{f.path('cpus')} is `0` without `gpus`, expected to ask for something")
    f.finish()
    return TaskFields({k: v for k, v in values.items() if v is not None}, tuple(machines))


def _backends(f: Fields) -> str | None:
    text = f.text("backends", "the backends of an AReaL run, such as sglang:d4t2+fsdp:d8")
    try:
        if text is not None:
            world_size(text)
    except InvalidInput as e:
        f.wrong(f.map.entries["backends"], f"{f.path('backends')}: {e}")
    return text


def _run(f: Fields) -> str | None:
    expected = "the task's command"
    if not f.has("run"):
        f.take("run")
        f.wrong(f.at, f"{f.where or 'the task'} has no `run`, expected {expected}")
        return None
    text = f.text("run", expected)
    if text is not None and not text.strip():
        f.wrong(f.map.entries["run"], f"{f.path('run')} is empty, expected {expected}")
    return text


def _name(f: Fields) -> str | None:
    expected = "a name of at most 64 printable characters"
    text = f.text("name", expected)
    if text is not None and (len(text) > 64 or not text.isprintable()):
        f.wrong(f.map.entries["name"], f"{f.path('name')} is too long or not printable, expected {expected}")
    return text


def _is_gpus(value: float) -> bool:
    return 0 <= value <= 1024 and (value < 1 or value == int(value))


def _gib(f: Fields, key: str) -> float | None:
    node = f.take(key)
    if node is None:
        return None
    try:
        if isinstance(node, ScalarNode) and not isinstance(node.value, bool):
            gib = parse_gib(node.text)
            if math.isfinite(gib) and gib <= 1_000_000:
                return gib
    except InvalidInput:
        pass
    f.wrong(node, f"{f.path(key)} is {show(node)}, expected {SIZE_GRAMMAR}")
    return None


def _names(f: Fields, key: str, expected: str) -> tuple[str, ...] | None:
    node = f.take(key)
    if node is None:
        return None
    items = node.items if isinstance(node, ListNode) else [node]
    names: list[str] = []
    for item in items:
        if isinstance(item, ScalarNode) and isinstance(item.value, str) and item.text:
            names.append(item.text)
        else:
            f.wrong(item, f"{f.path(key)} is {show(item)}, expected {expected}")
    return tuple(names)


def _texts(f: Fields, key: str, name: re.Pattern[str], wrong_name: str) -> dict[str, str] | None:
    """A mapping of names to texts; numbers and booleans are taken as they are written. No value is repeated."""
    node = f.take(key)
    if node is None:
        return None
    if not isinstance(node, MapNode):
        f.wrong(node, f"{f.path(key)} is {show(node)}, expected a mapping of names to texts")
        return None
    found: dict[str, str] = {}
    for k, value in node.entries.items():
        if not name.fullmatch(k):
            f.wrong(node.keys[k], f"`{k[:60]}` {wrong_name}")
        if not isinstance(value, ScalarNode) or (value.value is None and not value.quoted):
            f.wrong(value, f"{f.path(key)}.{k} is not text, expected text: put it in quotes")
        else:
            found[k] = value.text
    return found
