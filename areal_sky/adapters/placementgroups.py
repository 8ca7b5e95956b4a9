"""The placement groups of gangs: detached, one bundle per rank, each bound to its node by the `ray.io/node-id` label.

A gang's group is named `areal_sky:<gang_id>`. Ray gives no part of a group back, so a gang that may shrink has one
group per rank, `areal_sky:<gang_id>#<rank>`. Raises what Ray raises.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from areal_sky.core.model import Bundle

GIB = 2**30
TRACE = 0.001  # of a node: what a rank asks for that lives off what another task has lent
PREFIX = "areal_sky:"
_RANK = "#"


class PlacementGroups:
    """One thread uses it."""

    def __init__(self, ray: Any):
        self._ray = ray
        self._known: dict[str, Any] = {}
        self._apart: set[str] = set()
        self._node_resources: dict[str, str] = {}

    def gangs(self) -> tuple[str, ...]:
        """All gangs that hold a group, whoever made them."""
        return tuple({name.partition(_RANK)[0]: None for name in self._listed()})

    def reserve(self, gang_id: str, bundles: Sequence[Bundle], node_ids: Sequence[str], apart: bool) -> None:
        from ray.util import placement_group

        ranks = range(len(node_ids))
        parts = {f"{gang_id}{_RANK}{r}": [r] for r in ranks} if apart else {gang_id: list(ranks)}
        for name, members in parts.items():
            if self._find(name) is None:
                self._known[name] = placement_group(
                    [_resources(bundles[r], self._node_resource(node_ids[r])) for r in members],
                    strategy="PACK",
                    name=PREFIX + name,
                    lifetime="detached",
                    bundle_label_selector=[{"ray.io/node-id": node_ids[r]} for r in members],
                )
        if apart:
            self._apart.add(gang_id)

    def states(self, gang_id: str) -> set[str]:
        """Ray's words for how far its groups are; empty when there is none."""
        from ray.util import placement_group_table

        groups = [self._find(name) for name in self._names(gang_id)]
        return {placement_group_table(g).get("state", "REMOVED") if g is not None else "REMOVED" for g in groups}

    def by_rank(self, gang_id: str, ranks: Iterable[int]) -> dict[int, Any]:
        """The group of each rank; None where it is gone."""
        names = self._names(gang_id)
        if names == [gang_id]:
            return dict.fromkeys(ranks, self._find(gang_id))
        return {r: self._find(f"{gang_id}{_RANK}{r}") for r in ranks}

    def is_apart(self, gang_id: str) -> bool:
        """Whether each rank has a group of its own."""
        return gang_id in self._apart

    def remove(self, gang_id: str, ranks: Collection[int] | None = None) -> None:
        """Gives back all of the gang (None), or what these ranks have of a gang apart. Ends the actors there."""
        from ray.util import remove_placement_group

        names = self._names(gang_id) if ranks is None else [f"{gang_id}{_RANK}{r}" for r in ranks]
        for name in names:
            group = self._find(name)
            if group is not None:
                remove_placement_group(group)
            self._known.pop(name, None)
        if ranks is None:
            self._apart.discard(gang_id)

    def _names(self, gang_id: str) -> list[str]:
        """The names of its groups: one, or one for each rank that still has one."""
        if gang_id not in self._apart:
            if self._find(gang_id) is not None:
                return [gang_id]
            self._apart |= {name.partition(_RANK)[0] for name in self._listed() if _RANK in name}
            if gang_id not in self._apart:
                return []
        return [name for name in self._listed() if name.partition(_RANK)[0] == gang_id]

    def _listed(self) -> list[str]:
        from ray.util import placement_group_table

        named = (pg["name"] for pg in placement_group_table().values() if pg["state"] != "REMOVED")
        return [name.removeprefix(PREFIX) for name in named if name.startswith(PREFIX)]

    def _find(self, name: str) -> Any:
        from ray.util import get_placement_group

        if name not in self._known:
            try:
                self._known[name] = get_placement_group(PREFIX + name)
            except ValueError:
                return None
        return self._known[name]

    def _node_resource(self, node_id: str) -> str:
        """The resource of its own that Ray gives each node, one of it."""
        if node_id not in self._node_resources:
            for n in self._ray.nodes():
                own = [k for k in n["Resources"] if k.startswith("node:") and k != "node:__internal_head__"]
                self._node_resources[n["NodeID"]] = own[0] if own else "CPU"
        return self._node_resources.get(node_id, "CPU")


def _resources(bundle: Bundle, node_resource: str) -> dict[str, float]:
    wanted = {"GPU": bundle.gpus, "CPU": bundle.cpus, "memory": int(bundle.memory_gib * GIB)}
    return {k: v for k, v in wanted.items() if v} or {node_resource: TRACE}
