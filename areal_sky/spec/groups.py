"""Node groups, and the head: which machines, how many, in which market."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple, cast

from areal_sky.spec.cluster import Market, NodeGroupSpec, ResourcesSpec
from areal_sky.spec.fields import Fields
from areal_sky.spec.marks import MapNode, Node
from areal_sky.spec.resources import head_defaults, inherit, read_resources

DEFAULT_GROUP = "main"
RESERVED_GROUPS = ("head",)
MARKETS: tuple[Market, ...] = ("on_demand", "spot", "mixed")

# A replica's SkyPilot cluster is `<cluster>-<group>-<slot>`: with 26 each it stays below the 63 characters of clouds.
MAX_NAME = 26
NAME_GRAMMAR = f"at most {MAX_NAME} characters of a-z, 0-9 and -, the first a letter, the last not a -"
_NAME = re.compile(rf"[a-z](?:[a-z0-9-]{{0,{MAX_NAME - 2}}}[a-z0-9])?", re.ASCII)

# What people call the keys of a group.
_MEANT = {
    "num_nodes": "replicas", "nodes": "replicas", "count": "replicas", "size": "replicas", "min": "min_replicas",
    "max": "max_replicas", "min_nodes": "min_replicas", "max_nodes": "max_replicas", "use_spot": "market",
    "spot": "market", "accelerators": "resources", "gpus": "resources",
}  # fmt: skip

MAX_NODES = 10_000  # a slip of the finger, not a limit of ours: SkyPilot, clouds and Ray end well before
HEAD_CPUS, HEAD_MEMORY_GIB = 4.0, 16.0  # Ray's head, the gateway and a driver or two


def is_legal_name(name: str) -> bool:
    """Fits NAME_GRAMMAR."""
    return _NAME.fullmatch(name) is not None


def legal_name(text: str, fallback: str = "cluster") -> str:
    """The nearest legal name: `My_Task.v2` -> `my-task-v2`."""
    squeezed = re.sub(r"[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")[:MAX_NAME].strip("-")
    return squeezed or fallback


def read_groups(top: Fields, infra: str | None, guesses: list[str]) -> tuple[NodeGroupSpec, ...]:
    """The groups of `node_groups`; without it, one fixed group made of `resources` x `num_nodes`."""
    base = top.take("resources")
    nodes = top.whole("num_nodes", 1, MAX_NODES)
    groups = top.take("node_groups")
    default = read_resources(base, "resources", top.notes, infra)  # told even if every group overrides it
    top.notes.inherit()
    if groups is None:
        count = nodes or 1
        market: Market = "spot" if default.use_spot else "on_demand"
        guesses.append(
            f"group `{DEFAULT_GROUP}`: no node_groups, so {count} node{'s' * (count > 1)} of `resources`, fixed"
        )
        return (
            NodeGroupSpec(
                name=DEFAULT_GROUP,
                resources=default,
                elastic=False,
                min_replicas=1,
                max_replicas=1,
                nodes_per_replica=count,
                market=market,
            ),
        )
    if nodes is not None:
        top.wrong(
            top.key_at("num_nodes"),
            "`num_nodes` beside `node_groups`, expected the count in each group: "
            "`replicas`, or `min_replicas` and `max_replicas`",
        )
    named = Fields(groups, "node_groups", top.notes)
    if isinstance(groups, MapNode) and not groups.entries:
        top.wrong(groups, "node_groups is empty, expected at least one group, such as `trainer: {replicas: 2}`")
    return tuple(_group(named, name, base, infra) for name in named.map.entries)


def read_head(top: Fields, infra: str | None, guesses: list[str]) -> ResourcesSpec:
    """`head: {resources: {...}}`; by default a CPU machine in the place of the default resources."""
    f = top.block("head")
    f.hint({"cpus": "resources", "instance_type": "resources", "accelerators": "resources"})
    inherited = head_defaults(top.map.entries.get("resources"))
    own = f.take("resources")
    f.finish()
    head = read_resources(inherit(inherited, own), "head.resources", top.notes, infra)
    if head.cpus is None and head.memory_gib is None and head.instance_type is None:
        if not top.has("head"):
            guesses.append(f"head: a CPU machine with at least {HEAD_CPUS:g} CPUs and {HEAD_MEMORY_GIB:g} GiB")
        raw = {"cpus": f"{HEAD_CPUS:g}+", "memory": f"{HEAD_MEMORY_GIB:g}+"} | head.raw
        head = replace(head, cpus=HEAD_CPUS, memory_gib=HEAD_MEMORY_GIB, raw=raw)
    return head


def _group(groups: Fields, name: str, base: Node | None, infra: str | None) -> NodeGroupSpec:
    key = groups.key_at(name)
    if name in RESERVED_GROUPS:
        groups.wrong(key, f"the group name `{name}` is taken by areal_sky itself, expected another name")
    elif not is_legal_name(name):
        groups.wrong(
            key,
            f"the group name `{name[:60]}` cannot be part of a cluster's name, expected {NAME_GRAMMAR}, "
            f"did you mean `{legal_name(name, 'group')}`?",
        )
    f = groups.block(name)
    f.hint(_MEANT)
    own = f.take("resources")
    size = _size(f)
    market = cast("Market | None", f.choice("market", MARKETS))
    base_replicas = f.whole("on_demand_base", 0, MAX_NODES)
    f.finish()
    resources = read_resources(inherit(base, own), f.path("resources"), groups.notes, infra)
    kind = _market(f, market, resources, size.elastic)
    if f.has("market") and market is None:
        pass  # told already; what follows from it is unknown
    elif base_replicas is not None and kind != "mixed":
        told = f"{f.where} has `on_demand_base` with market {kind}, expected market: mixed"
        f.wrong(f.key_at("on_demand_base"), told)
    elif base_replicas is not None and base_replicas > size.high:
        told = f"on_demand_base {base_replicas} is above max_replicas {size.high}, expected at most that"
        f.wrong(f.map.entries["on_demand_base"], f"{f.where}: {told}")
    return NodeGroupSpec(
        name=name,
        resources=resources,
        elastic=size.elastic,
        min_replicas=size.low,
        max_replicas=size.high,
        nodes_per_replica=size.nodes_per_replica,
        market=kind,
        on_demand_base=min(base_replicas or 0, size.high) if kind == "mixed" else 0,
    )


class _Size(NamedTuple):
    elastic: bool
    low: int
    high: int
    nodes_per_replica: int


def _size(f: Fields) -> _Size:
    """A fixed group (`replicas`) is one replica of that many nodes; an elastic one has `min_replicas..max_replicas`."""
    fixed = f.whole("replicas", 1, MAX_NODES)
    least = f.whole("min_replicas", 0, MAX_NODES)
    most = f.whole("max_replicas", 1, MAX_NODES)
    per_replica = f.whole("nodes_per_replica", 1, MAX_NODES)
    if not (f.has("min_replicas") or f.has("max_replicas")):
        if f.has("nodes_per_replica"):
            told = f"{f.where} has `nodes_per_replica` without min_replicas/max_replicas, expected them too: a fixed "
            meant = f"did you mean `replicas: {(fixed or 1) * (per_replica or 1)}`?"
            f.wrong(f.key_at("nodes_per_replica"), f"{told}group is one gang, whose nodes `replicas` counts, {meant}")
        return _Size(False, 1, 1, fixed or 1)
    if f.has("replicas"):
        told = "has both `replicas` (fixed) and min_replicas/max_replicas (elastic), expected one of the two"
        f.wrong(f.key_at("replicas"), f"{f.where} {told}")
    low = least or 0
    high = max(low, 1) if most is None else most
    if not f.has("max_replicas"):
        f.wrong(f.key_at("min_replicas"), f"{f.where} has `min_replicas` without `max_replicas`, expected a limit")
    elif low > high:
        told = f"{f.where}: min_replicas {low} is above max_replicas {high}, expected at most that"
        f.wrong(f.map.entries["min_replicas"], told)
        high = low
    return _Size(True, low, high, per_replica or 1)


def _market(f: Fields, market: Market | None, resources: ResourcesSpec, elastic: bool) -> Market:
    """The market asked for; SkyPilot's `use_spot` says it too, and must not say another thing."""
    implied: Market | None = None if resources.use_spot is None else "spot" if resources.use_spot else "on_demand"
    if market is None:
        return implied or "on_demand"
    if implied is not None and implied != market:
        f.wrong(
            f.map.entries["market"],
            f"{f.path('market')} is {market} and use_spot is "
            f"{str(resources.use_spot).lower()} in its resources, expected them to agree: "
            "drop use_spot",
        )
    if market == "mixed" and not elastic:
        f.wrong(
            f.map.entries["market"],
            f"{f.path('market')} is mixed in a fixed group, expected on_demand or spot: its "
            "nodes are one SkyPilot cluster, which is in one market",
        )
        return "on_demand"
    return market
