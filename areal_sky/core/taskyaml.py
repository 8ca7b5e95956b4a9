"""LaunchPlan -> SkyPilot task YAMLs: one for the head, one per group. Pure; the same input gives the same bytes.

What the user wrote for SkyPilot is carried as it is; ours is added: labels, autostop as a second safety net under the
lease, our environment, and the bash of `taskscripts`. Values of `secrets` never reach a file: SkyPilot takes a null
there as "given at launch".
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, cast

import yaml

from areal_sky.core import taskscripts, tasksources
from areal_sky.core.launch import HEAD_CPUS, HEAD_MEMORY_GIB, head_env, node_env
from areal_sky.core.market import with_market
from areal_sky.core.model import HEAD_GROUP, GroupPlan, LaunchPlan, replica_name
from areal_sky.core.nodeenv import DEFAULT_GATEWAY_PORT, DEFAULT_RAY_PORT
from areal_sky.core.offers import Place
from areal_sky.core.prices import market_of
from areal_sky.errors import InvalidInput
from areal_sky.spec.cluster import ClusterSpec, ResourcesSpec

# SkyPilot's autostop takes a machine this long after `areal-sky node` (or `head`) has ended: time to read its logs.
AUTOSTOP_MINUTES = 5
NO_AUTOSTOP_CLOUDS = frozenset({"slurm"})  # SkyPilot 0.14 stops only container clusters there

_TASK_FIRST = ("workdir", "file_mounts")
_TASK_OURS = ("name", "resources", "num_nodes", "envs", "secrets", "setup", "run")
_PLACE_KEYS = ("infra", "cloud", "region", "zone")


def render_files(spec: ClusterSpec, launch: LaunchPlan, wheel: str = "") -> dict[str, str]:
    """File name -> text of every task YAML. `wheel` as in `task_dicts`."""
    tasks = task_dicts(spec, launch, wheel)
    return {f"{stem}.yaml": to_yaml(task, header(spec, launch, stem)) for stem, task in tasks.items()}


def task_dicts(
    spec: ClusterSpec, launch: LaunchPlan, wheel: str = "", folder: str | None = None
) -> dict[str, dict[str, Any]]:
    """File stem -> SkyPilot task config, the head's first.

    `wheel` is the path here of the wheel to mount; empty: the machines ask their package index. Relative paths are
    SkyPilot's: from the working folder of `sky launch`; with `folder` the user's are made absolute from there.
    Raises InvalidInput for `infra: local`, whose nodes SkyPilot does not launch.
    """
    if spec.is_local:
        raise InvalidInput("`infra: local` has no SkyPilot task: its nodes are processes on this machine")
    tasks = {HEAD_GROUP: _head_task(spec, launch, wheel)}
    for group in launch.groups:
        if group.name in tasks:
            raise InvalidInput(f"two groups are named {group.name!r}")
        tasks[group.name] = _group_task(spec, launch, group, wheel)
        if folder is not None:
            tasks[group.name] |= tasksources.rooted(tasks[group.name], folder)
    return tasks


def to_yaml(task: Mapping[str, Any], header: str = "") -> str:
    """The task as YAML: keys in the given order, scripts as block scalars, after `header` as a comment."""
    comment = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
    plain = _plain(task)
    for dumper in (_ReadableDumper, yaml.SafeDumper):
        text = yaml.dump(plain, Dumper=dumper, sort_keys=False, width=10**9, allow_unicode=True)
        if yaml.safe_load(text) == plain:
            return comment + text
    raise InvalidInput("the task holds a value that YAML cannot carry")


def header(spec: ClusterSpec, launch: LaunchPlan, stem: str) -> str:
    """The comment at the top of a file: what it is and how to launch it by hand."""
    head = shlex.quote(replica_name(spec.name, HEAD_GROUP, 0))
    if stem == HEAD_GROUP:
        return _HEAD_HEADER.format(cluster=spec.name, head=head)
    group = launch.group(stem)
    assert group is not None
    replica = shlex.quote(replica_name(spec.name, stem, 0))
    user_secrets = "".join(f" --secret {shlex.quote(k)}" for k in tasksources.secret_names(spec))
    notes = ""
    if relative := sorted(tasksources.local_sources(spec.task)):
        notes = f"{', '.join(map(repr, relative))}: SkyPilot looks there for it too; copy it, or give the whole path.\n"
    if group.market == "mixed":
        base = group.on_demand_base
        notes += f"Replicas from number {base} on are for spot: --use-spot. This file has the first one's market.\n"
    return (
        _NODE_HEADER.format(
            group=stem,
            cluster=spec.name,
            nodes=f"{group.nodes_per_replica} node{'s' if group.nodes_per_replica > 1 else ''}",
            replica=replica,
            file=shlex.quote(f"{stem}.yaml"),
            secrets=user_secrets,
        )
        + notes
    )


_HEAD_HEADER = """\
Head of cluster {cluster}. Made by `areal-sky render`: change the spec, not this file.
Launch it by hand, once, before the groups, in this file's folder (the wheel is mounted from there):
  new() {{ openssl rand -hex 32; }}
  export AREAL_SKY_NODE_TOKEN=$(new) AREAL_SKY_RAY_TOKEN=$(new)
  export AREAL_SKY_TOKENS='{{"read":"'$(new)'","submit":"'$(new)'","operate":"'$(new)'",'\\
'"node":"'$AREAL_SKY_NODE_TOKEN'","ray":"'$AREAL_SKY_RAY_TOKEN'"}}'
  sky launch -c {head} head.yaml --secret AREAL_SKY_TOKENS
Its log (`sky logs {head}`) prints the address that nodes join with.
"""

_NODE_HEADER = """\
Group {group} of cluster {cluster}: one replica, {nodes}. Made by `areal-sky render`: change the spec, not this file.
Launch it by hand in this folder once the head is up (head.yaml says how, and makes the tokens):
  sky launch -c {replica} {file} --env AREAL_SKY_HEAD_IP=ADDRESS \\
    --secret AREAL_SKY_NODE_TOKEN --secret AREAL_SKY_RAY_TOKEN{secrets}
One more replica: another name after -c, and the same name in --env AREAL_SKY_REPLICA=NAME.
"""


# ---------------------------------------------------------------- tasks


def _head_task(spec: ClusterSpec, launch: LaunchPlan, wheel: str) -> dict[str, Any]:
    state_dir = f"~/.areal_sky/head/{spec.name}"
    users = cast("Mapping[str, Any]", spec.task.get("envs") or {})
    package, mounts = tasksources.package(spec, wheel)
    task: dict[str, Any] = {
        "name": replica_name(spec.name, HEAD_GROUP, 0),
        "resources": _resources(_head_resources(spec), launch.head, spec, launch),
    }
    if "config" in spec.task:  # how SkyPilot is to provision, which holds for every machine
        task["config"] = _plain(spec.task["config"])
    if mounts:
        task["file_mounts"] = mounts
    task["envs"] = {
        "AREAL_SKY_CLUSTER": spec.name,
        "AREAL_SKY_RAY_PORT": str(users.get("AREAL_SKY_RAY_PORT") or DEFAULT_RAY_PORT),
        "AREAL_SKY_GATEWAY_PORT": str(users.get("AREAL_SKY_GATEWAY_PORT") or DEFAULT_GATEWAY_PORT),
        **package,
        **head_env(spec, launch, state_dir=state_dir).to_env(),
    }
    task["secrets"] = {"AREAL_SKY_TOKENS": None}
    task["setup"] = taskscripts.head_setup()
    task["run"] = taskscripts.head_run()
    return task


def _group_task(spec: ClusterSpec, launch: LaunchPlan, group: GroupPlan, wheel: str) -> dict[str, Any]:
    replica = replica_name(spec.name, group.name, 0)
    config = node_env(spec, launch, group.name, replica, 0, head_ip="", state_dir="~/.areal_sky/nodes")
    wanted = spec.group(group.name)
    assert wanted is not None
    carried = {k: _plain(v) for k, v in spec.task.items() if k not in _TASK_OURS}
    package, mounts = tasksources.package(spec, wheel)
    if mounts:
        carried["file_mounts"] = (carried.get("file_mounts") or {}) | mounts
    ours = {
        "AREAL_SKY_HEAD_IP": "",  # SkyPilot refuses a null when it reads the file, not when it launches
        "AREAL_SKY_REPLICA": replica,
        "AREAL_SKY_RAY_PORT": str(DEFAULT_RAY_PORT),
        "AREAL_SKY_GATEWAY_PORT": str(DEFAULT_GATEWAY_PORT),
        **package,
    }
    hidden = tasksources.secret_envs(spec)
    users = {k: v for k, v in dict(spec.task.get("envs") or {}).items() if k not in hidden}
    secrets = (*tasksources.secret_names(spec), "AREAL_SKY_NODE_TOKEN", "AREAL_SKY_RAY_TOKEN")
    return {
        "name": f"{spec.name}-{group.name}",
        "resources": _resources(wanted.resources, group, spec, launch),
        "num_nodes": group.nodes_per_replica,
        **{k: carried[k] for k in _TASK_FIRST if k in carried},
        **{k: v for k, v in carried.items() if k not in _TASK_FIRST},
        "envs": _plain(users | {k: v for k, v in ours.items() if k not in users} | config.to_env()),
        "secrets": dict.fromkeys(secrets),
        "setup": taskscripts.node_setup(spec.task.get("setup")),
        "run": taskscripts.node_run(spec.task.get("run")),
    }


# ---------------------------------------------------------------- resources


def _head_resources(spec: ClusterSpec) -> ResourcesSpec:
    """The head's resources; nodes in one container image share it, since Python and Ray must be alike everywhere."""
    raw = dict(spec.head.raw)
    if not ({"accelerators", "gpus", "instance_type", "cpus", "memory", "any_of", "ordered"} & raw.keys()):
        raw |= {"cpus": f"{HEAD_CPUS:g}+", "memory": f"{HEAD_MEMORY_GIB:g}+"}
    images = {g.resources.image_id for g in spec.groups}
    image = next(iter(images)) if len(images) == 1 else None
    if image and image.startswith("docker:"):
        raw.setdefault("image_id", image)
    return spec.head.model_copy(update={"raw": raw})


def _resources(r: ResourcesSpec, group: GroupPlan, spec: ClusterSpec, launch: LaunchPlan) -> dict[str, Any]:
    raw = cast("dict[str, Any]", _plain(r.raw))
    entries_key = next((k for k in ("any_of", "ordered") if raw.get(k)), None)
    entries = cast("list[dict[str, Any]]", raw.pop(entries_key)) if entries_key else []
    infra = _infra(r, group, spec, launch)
    base = ({"infra": infra} if infra else {}) | {k: v for k, v in raw.items() if k not in _PLACE_KEYS}
    base["labels"] = {**raw.get("labels", {}), "areal-sky-cluster": spec.name, "areal-sky-group": group.name}
    market = market_of(group, 0)
    base = with_market(base, market, group.spot_partition)
    if group.offer.cloud not in NO_AUTOSTOP_CLOUDS:
        # `jobs`: an SSH session left open must not keep a machine.
        base.setdefault("autostop", {"idle_minutes": AUTOSTOP_MINUTES, "down": True, "wait_for": "jobs"})
    if entries_key is None:
        return base
    # Every entry is whole: SkyPilot 0.14 shares one labels mapping among the entries of any_of.
    whole = [(_entry(base, entry), "use_spot" in entry) for entry in entries]
    return {entries_key: [e if told else with_market(e, market, group.spot_partition) for e, told in whole]}


def _entry(base: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    placed = any(k in entry for k in _PLACE_KEYS)
    kept = {k: v for k, v in base.items() if not (placed and k == "infra")}
    return {**kept, **entry, "labels": {**entry.get("labels", {}), **base["labels"]}}


def _infra(r: ResourcesSpec, group: GroupPlan, spec: ClusterSpec, launch: LaunchPlan) -> str | None:
    """Where SkyPilot is to look: as the user says, narrowed to the plan's one region if all machines are in it."""
    wanted = r.infra or spec.infra
    if Place.parse(wanted).region is not None:
        return wanted
    homes = {(g.offer.cloud, g.offer.region) for g in (launch.head, *launch.groups)}
    cloud, region = group.offer.cloud, group.offer.region
    return f"{cloud}/{region}" if len(homes) == 1 and region else wanted


def _plain(value: object) -> Any:
    """Frozen JSON values as dicts and lists; strings of every kind as str."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in cast("Sequence[object]", value)]
    return value


class _ReadableDumper(yaml.SafeDumper):
    """Scripts as block scalars even where lines end in spaces, which PyYAML would put in double quotes."""

    def analyze_scalar(self, scalar: str) -> Any:
        analysis = cast("Any", super().analyze_scalar(scalar))
        if "\n" in scalar and all(c in "\n\t" or c.isprintable() for c in scalar):
            analysis.allow_block = True
        return analysis

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return cast("Any", dumper).represent_scalar("tag:yaml.org,2002:str", text, style=style)


_ReadableDumper.add_representer(str, _text)
