"""What runs and costs money though no state knows it: the known clusters against what was found. Pure.

Look at the world first and at the state afterwards: an intent is recorded before its launch, so whatever is found by
then and still unknown was not launched by a controller of this state folder.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

CLUSTER_LABEL = "areal-sky-cluster"
OWNER_LABEL = "areal-sky-owner"
# Younger things are listed but not ended: they may be somebody's launch that is just being recorded.
GRACE_S = 60.0

Kind = Literal["skypilot", "ec2", "process", "ray"]


@dataclass(frozen=True, slots=True)
class KnownCluster:
    """A cluster of the state folder. `folder` is where its state lies; `replicas` are those that exist by its events.

    `prefixes` are its replicas' names without the slot; `down_s` None: not down.
    """

    name: str
    folder: str
    replicas: frozenset[str]
    prefixes: frozenset[str]
    down_s: float | None
    controller_runs: bool


@dataclass(frozen=True, slots=True)
class SkyFound:
    """A SkyPilot cluster. `mine`: of the user who asks. `what` is its machines in words."""

    name: str
    name_on_cloud: str
    labels: Mapping[str, str]
    launched_s: float
    mine: bool
    user: str = ""
    where: str = ""
    what: str = ""
    usd_per_hour: float | None = None


@dataclass(frozen=True, slots=True)
class NodeFound:
    """Processes of one pretend machine of this host. `folder` and `replica` are from its mark."""

    folder: str
    replica: str
    marks: tuple[str, ...]
    pids: tuple[int, ...]
    started_s: float
    folder_exists: bool


@dataclass(frozen=True, slots=True)
class InstanceFound:
    """An EC2 instance that SkyPilot tagged."""

    instance_id: str
    region: str
    instance_type: str
    state: str
    market: str
    launched_s: float
    tags: Mapping[str, str] = field(default_factory=dict[str, str])
    usd_per_hour: float | None = None


@dataclass(frozen=True, slots=True)
class RayFound:
    """A live Ray node that a head told of."""

    cluster: str
    replica: str
    node_id: str


@dataclass(frozen=True, slots=True)
class World:
    """All that was found. `sky` None: SkyPilot could not be asked; then nothing is said about EC2 either."""

    sky: tuple[SkyFound, ...] | None = None
    nodes: tuple[NodeFound, ...] = ()
    instances: tuple[InstanceFound, ...] = ()
    ray: tuple[RayFound, ...] = ()


@dataclass(frozen=True, slots=True)
class Orphan:
    """One thing to end. `ripe` False: younger than the grace period, so it is only shown.

    `certain` False: another state folder that lives may know it (another machine's, or one that is lost), so it is
    ended only when it is named.
    `id` is what ends it: a SkyPilot cluster's name, an instance id, a replica whose `handle` has marks or a cluster.
    """

    kind: Kind
    id: str
    where: str
    what: str
    reason: str
    since_s: float | None
    usd_per_hour: float | None
    ripe: bool
    certain: bool = True
    handle: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """`orphans` may be ended; `left_alone` is what is not ours to end, in words; `warnings` is what else is wrong."""

    orphans: tuple[Orphan, ...]
    left_alone: tuple[str, ...]
    warnings: tuple[str, ...]


def find(known: Sequence[KnownCluster], world: World, owners: Collection[str], now_s: float) -> Finding:
    """The orphans. `owners` are the owner labels of all clusters that this state folder has or had."""
    by_name = {c.name: c for c in known}
    orphans: list[Orphan] = []
    alone: list[str] = []
    for cluster in world.sky or ():
        _judge_cluster(cluster, by_name, owners, now_s, orphans, alone)
    for node in world.nodes:
        _judge_node(node, {c.folder: c for c in known}, now_s, orphans)
    if world.sky is not None:
        recorded = {c.name_on_cloud for c in world.sky}
        for instance in world.instances:
            _judge_instance(instance, recorded, owners, now_s, orphans)
    orphans += _ray_orphans(by_name, world)
    warnings = [
        f"cluster {c.name}: its controller is gone while it lives: nobody scales, repairs or ends it "
        f"(`areal-sky up` or `areal-sky down {c.name}` starts it again)"
        for c in known
        if c.down_s is None and not c.controller_runs
    ]
    return Finding(tuple(orphans), tuple(alone), tuple(warnings))


def slot_prefix(name: str) -> str:
    """`a-b-3` -> `a-b`: a replica's name without its slot; "" for a name that no replica can have."""
    prefix, _, slot = name.rpartition("-")
    return prefix if slot.isdigit() else ""


def _judge_cluster(
    c: SkyFound,
    known: Mapping[str, KnownCluster],
    owners: Collection[str],
    now_s: float,
    orphans: list[Orphan],
    alone: list[str],
) -> None:
    label, owner = c.labels.get(CLUSTER_LABEL), c.labels.get(OWNER_LABEL)
    whose = f" (user {c.user})" if c.user else ""
    if label is None:
        heir = next((k for k in known.values() if k.down_s is None and slot_prefix(c.name) in k.prefixes), None)
        if heir is not None:
            alone.append(
                f"SkyPilot cluster {c.name}{whose} has the name of a replica of {heir.name}, but not our label: "
                "somebody else made it, it is not touched"
            )
        return
    mine = known.get(label)
    if mine is not None and c.name in mine.replicas and (not owner or owner in owners):
        return  # without an owner: launched by hand from our task files, and its controller sees it, too
    if not c.mine:
        alone.append(f"SkyPilot cluster {c.name} of cluster {label} is of user {c.user or '?'}: it is not touched")
        return
    orphans.append(
        Orphan(
            "skypilot", c.name, c.where, c.what, _whose(_why(label, c.name, mine), owner, owners), c.launched_s,
            c.usd_per_hour, ripe=_ripe(c.launched_s, mine, now_s), certain=not owner or owner in owners,
        )
    )  # fmt: skip


def _judge_node(node: NodeFound, by_folder: Mapping[str, KnownCluster], now_s: float, orphans: list[Orphan]) -> None:
    mine = by_folder.get(node.folder)
    if mine is None and node.folder_exists:
        return  # of another state folder, which knows it
    if mine is not None and mine.down_s is None and node.replica in mine.replicas:
        return
    name = node.folder.rpartition("/")[2]
    reason = f"its state folder {node.folder} is gone" if mine is None else _why(name, node.replica, mine)
    count = len(node.pids)
    orphans.append(
        Orphan(
            "process", node.replica, "this machine", f"{count} process{'es' if count > 1 else ''}", reason,
            node.started_s, None, ripe=_ripe(node.started_s, mine, now_s), handle=node.marks,
        )
    )  # fmt: skip


def _judge_instance(
    i: InstanceFound,
    recorded: Collection[str],
    owners: Collection[str],
    now_s: float,
    orphans: list[Orphan],
) -> None:
    label, owner = i.tags.get(CLUSTER_LABEL), i.tags.get(OWNER_LABEL)
    name = i.tags.get("skypilot-cluster-name", "")
    if label is None or name in recorded:
        return
    reason = _whose(f"no SkyPilot record here knows {name or 'it'} (cluster {label})", owner, owners)
    what = f"{i.instance_type}, {i.market.replace('_', '-')}, {i.state}"
    orphans.append(
        Orphan(
            "ec2", i.instance_id, i.region, what, reason, i.launched_s, i.usd_per_hour,
            ripe=_ripe(i.launched_s, None, now_s), certain=not owner or owner in owners,
        )
    )  # fmt: skip


def _ray_orphans(known: Mapping[str, KnownCluster], world: World) -> list[Orphan]:
    machines = {c.name for c in world.sky or ()} | {n.replica for n in world.nodes}
    strays: dict[tuple[str, str], int] = {}
    for node in world.ray:
        mine = known.get(node.cluster)
        if mine is not None and node.replica not in mine.replicas and node.replica not in machines:
            strays[node.cluster, node.replica] = strays.get((node.cluster, node.replica), 0) + 1
    return [
        Orphan(
            "ray", replica, f"Ray of {cluster}", f"{count} node{'s' if count > 1 else ''}",
            f"joined cluster {cluster}, but neither its state nor the cloud knows such a replica", None, None,
            ripe=True, handle=(cluster,),
        )
        for (cluster, replica), count in sorted(strays.items())
    ]  # fmt: skip


def _why(cluster: str, replica: str, known: KnownCluster | None) -> str:
    if known is None:
        return f"no state here knows cluster {cluster}"
    if known.down_s is not None:
        return f"cluster {cluster} is down"
    return f"cluster {cluster} knows no replica {replica}"


def _whose(reason: str, owner: str | None, owners: Collection[str]) -> str:
    if not owner:
        return f"{reason}; it was launched by hand"
    if owner not in owners:
        return f"{reason}; made from another state folder ({owner}), or from one that is lost"
    return reason


def _ripe(since_s: float, known: KnownCluster | None, now_s: float) -> bool:
    """Old enough, and its cluster has been down for long enough, if it is."""
    down_s = known.down_s if known is not None and known.down_s is not None else 0.0
    return now_s - max(since_s, down_s) >= GRACE_S
