"""Text -> ClusterSpec. The whole grammar from the top; every mistake in it is found in one pass."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from areal_sky.spec.alerts import read_alerts, read_notify
from areal_sky.spec.blocks import DAY_S, read_budget, read_scaling, read_spot, read_telemetry
from areal_sky.spec.cluster import ClusterSpec, NodeGroupSpec
from areal_sky.spec.fields import Fields, is_null, show
from areal_sky.spec.groups import NAME_GRAMMAR, is_legal_name, legal_name, read_groups, read_head
from areal_sky.spec.infra import LOCAL
from areal_sky.spec.marks import ListNode, MapNode, Node, Notes, ScalarNode, parse, plain
from areal_sky.spec.models import read_models
from areal_sky.spec.resources import checked_infra, has_type
from areal_sky.spec.scheduling import read_scheduling
from areal_sky.spec.skypilot_keys import TASK_KEYS, TASK_KEYS_REFUSED, TYPE_WORDS

# The top-level keys that SkyPilot does not have. A file with none of them is a plain SkyPilot task.
OUR_KEYS = (
    "infra",
    "node_groups",
    "models",
    "scheduling",
    "scaling",
    "spot",
    "budget",
    "telemetry",
    "alerts",
    "notify",
    "head",
    "idle_shutdown",
)
_SECRET_KEYS = ("secrets", "envs", "managed_secrets", "config")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def load_text(text: str, file_name: str, now_s: float | None = None) -> ClusterSpec:
    """The spec in `text`. `file_name` stands in the mistakes and gives the default cluster name.

    `now_s` (Unix time) is what a deadline is held against; without it a deadline in the past passes and one that
    counts from now (`12h`) is a mistake. Raises SpecError with every mistake found.
    """
    notes = Notes(file_name)
    root = parse(text, notes)
    if is_null(root):
        notes.add(Node(1, 1), "the file is empty, expected a spec: `resources: {accelerators: V100:8}` is one")
    elif not isinstance(root, MapNode):
        assert root is not None
        notes.add(root, f"the spec is {show(root)}, expected a mapping of keys to values, such as `resources: ...`")
    spec = _read(Fields(root, "", notes), file_name, now_s) if isinstance(root, MapNode) else None
    notes.raise_if_any()
    assert spec is not None
    return spec


def _read(top: Fields, file_name: str, now_s: float | None) -> ClusterSpec:
    top.hint({
        "groups": "node_groups", "nodes": "num_nodes", "env": "envs", "secret": "secrets",
        "accelerators": "resources", "gpus": "resources", "mounts": "file_mounts",
        "storage_mounts": "file_mounts", "schedule": "scheduling", "priority": "scheduling",
        "command": "run", "model": "models", "alert": "alerts",
        "notifications": "notify", "webhook": "notify",
    })  # fmt: skip
    guesses: list[str] = []
    name = _name(top, file_name, guesses)
    infra = _infra(top)
    groups = read_groups(top, infra, guesses)
    head = read_head(top, infra, guesses)
    infra = infra or _common_infra(groups)
    _check_local(top, infra, groups)
    scheduling = read_scheduling(top)
    idle_shutdown_s = top.duration_s("idle_shutdown", 1, 365 * DAY_S)
    spec = ClusterSpec(
        name=name,
        infra=infra,
        head=head,
        groups=groups,
        models=read_models(top, tuple(p.model_type for p in scheduling.priority)),
        scheduling=scheduling,
        scaling=read_scaling(top),
        spot=read_spot(top, [infra, *(g.resources.infra for g in groups)]),
        budget=read_budget(top, now_s),
        telemetry=read_telemetry(top),
        alerts=read_alerts(top),
        notify=read_notify(top),
        task=_task(top),
        guesses=(),
    )
    top.finish(also=TASK_KEYS_REFUSED)
    if idle_shutdown_s is not None:
        spec = replace(spec, idle_shutdown_s=idle_shutdown_s)
    return replace(spec, guesses=(*guesses, *_unknown_names(spec)))


def _name(top: Fields, file_name: str, guesses: list[str]) -> str:
    """The cluster's name. A plain SkyPilot task may have any name there: it is made legal, and said so."""
    name = top.text("name", f"a name: {NAME_GRAMMAR}")
    if name is None:
        stem = re.split(r"[/\\]", file_name)[-1]
        made = legal_name(re.sub(r"(\.sky)?\.ya?ml$", "", stem, flags=re.IGNORECASE))
        guesses.append(f"name `{made}`: from the file's name")
        return made
    if is_legal_name(name):
        return name
    made = legal_name(name)
    if any(top.has(key) for key in OUR_KEYS):
        at = top.map.entries["name"]
        long = f" ({len(name)} characters)" if len(name) > 26 else ""
        top.wrong(
            at, f"the name {show(at)}{long} cannot name a cluster, expected {NAME_GRAMMAR}, did you mean `{made}`?"
        )
    else:
        guesses.append(f"name `{made}`: made from the task's name, which cannot name a cluster")
    return made


def _infra(top: Fields) -> str | None:
    text = top.text("infra", "an infra string such as aws/us-east-1, k8s or local")
    return None if text is None else checked_infra(top, "infra", top.map.entries["infra"])


def _common_infra(groups: tuple[NodeGroupSpec, ...]) -> str | None:
    """The infra that every group's resources name, if it is one."""
    places = {g.resources.infra for g in groups}
    return places.pop() if len(places) == 1 else None


def _check_local(top: Fields, infra: str | None, groups: tuple[NodeGroupSpec, ...]) -> None:
    """`local` is for the whole cluster or not at all: its nodes join no Ray across machines."""
    blocks = top.map.entries.get("node_groups")
    for group in groups:
        place = group.resources.infra
        if place is None or (place == LOCAL) == (infra == LOCAL):
            continue
        at = blocks.keys.get(group.name, top.at) if isinstance(blocks, MapNode) else top.key_at("resources")
        top.wrong(
            at,
            f"group `{group.name}` is on {place} in a cluster on {infra or 'clouds'}, expected `local` for all "
            "groups or for none: write `infra: local` at the top",
        )


def _unknown_names(spec: ClusterSpec) -> list[str]:
    """Accelerators that no catalog has, taken over because the machines are one's own."""
    from areal_sky.spec.accelerators import find

    named = {a.name: g.name for g in spec.groups for a in g.resources.accelerators if a.name and not find(a.name)}
    return [
        f"group `{group}`: no catalog has `{name}`; taken as your own machines name it" for name, group in named.items()
    ]


# ---------------------------------------------------------------- what passes through to SkyPilot


def _task(top: Fields) -> dict[str, Any]:
    """The SkyPilot task keys that we do not read, as plain data. No mistake repeats a value that may be secret."""
    task: dict[str, Any] = {}
    for key, letters in TASK_KEYS.items():
        node = top.take(key)
        if node is None:
            continue
        if not has_type(node, letters):
            said = _kind(node) if key in _SECRET_KEYS else show(node)
            top.wrong(node, f"{key} is {said}, expected {' or '.join(TYPE_WORDS[letter] for letter in letters)}")
            continue
        task[key] = plain(node)
    for key, reason in TASK_KEYS_REFUSED.items():
        if top.has(key):
            top.wrong(top.key_at(key), f"{reason}, expected a task: areal_sky keeps the machines of a group itself")
    for key in ("envs", "secrets"):
        _check_variables(top, key)
    return task


def _kind(node: Node) -> str:
    if isinstance(node, ScalarNode):
        return "text" if isinstance(node.value, str) else "a number or boolean"
    return "a list" if isinstance(node, ListNode) else "a mapping"


def _check_variables(top: Fields, key: str) -> None:
    """Names that a shell takes, values that are scalars; a secret in list form is a name that SkyPilot resolves."""
    node = top.map.entries.get(key)
    for i, item in enumerate(node.items if isinstance(node, ListNode) else ()):
        if not isinstance(item, ScalarNode) or not isinstance(item.value, str):
            top.wrong(item, f"{key}[{i}] is not text, expected `secrets:NAME`")
    if not isinstance(node, MapNode):
        return
    for name, value in node.entries.items():
        if not _ENV_NAME.fullmatch(name.removeprefix("secrets:") if key == "secrets" else name):
            top.wrong(
                node.keys[name], f"`{name[:60]}` cannot name an environment variable, expected letters, digits and _"
            )
        if not isinstance(value, ScalarNode):
            top.wrong(value, f"{key}.{name} is not text, expected text: put it in quotes")
