"""How tasks share the cluster: priority weights and pools."""

from __future__ import annotations

from areal_sky.spec.blocks import read_policy
from areal_sky.spec.cluster import PoolSpec, PriorityWeight, SchedulingSpec
from areal_sky.spec.fields import Fields, unique
from areal_sky.spec.marks import MapNode, Node
from areal_sky.spec.models import check_model_type


def read_scheduling(top: Fields) -> SchedulingSpec:
    f = top.block("scheduling")
    f.hint({
        "policy": "strategy", "weights": "priority", "priorities": "priority", "ageing": "ageing_per_hour",
        "aging": "ageing_per_hour", "aging_per_hour": "ageing_per_hour",
    })  # fmt: skip
    default = SchedulingSpec()
    strategy = read_policy(f, "strategy")
    ageing = f.number("ageing_per_hour", "a number, at least 0", lambda v: v >= 0)
    priority = _priority(f)
    pools = _pools(f, tuple(p.model_type for p in priority))
    f.finish()
    return SchedulingSpec(
        strategy=strategy or default.strategy,
        priority=priority,
        pools=pools,
        ageing_per_hour=default.ageing_per_hour if ageing is None else ageing,
    )


def _priority(f: Fields) -> tuple[PriorityWeight, ...]:
    """A list of {model_type, weight}, or the mapping {moe: 1.5, base: 1.0} that says the same."""
    node = f.map.entries.get("priority")
    expected = "a weight above 0"
    found: list[PriorityWeight] = []
    if isinstance(node, MapNode):
        weights = f.block("priority")  # of model types, so no key is unknown
        for name in node.entries:
            weight = weights.number(name, expected, lambda v: v > 0)
            if not weights.has(name):
                weights.wrong(weights.key_at(name), f"{weights.path(name)} has no weight, expected {expected}")
            elif weight is not None:
                found.append(PriorityWeight(model_type=name, weight=weight))
        return tuple(found)
    seen: dict[str, Node] = {}
    for path, item in f.items("priority", "a list of {model_type, weight} or a mapping of model type to weight"):
        entry = Fields(item, path, f.notes)
        entry.hint({"type": "model_type", "model": "model_type", "name": "model_type", "priority": "weight"})
        model_type = entry.required_text("model_type", "a model type such as moe or base")
        weight = entry.number("weight", expected, lambda v: v > 0)
        if isinstance(item, MapNode) and not entry.has("weight"):
            entry.wrong(item, f"{path} has no `weight`, expected {expected}")
        entry.finish()
        unique(entry, seen, model_type, "model_type", "the model type")
        if model_type is not None and weight is not None:
            found.append(PriorityWeight(model_type=model_type, weight=weight))
    return tuple(found)


def _pools(f: Fields, known_types: tuple[str, ...]) -> tuple[PoolSpec, ...]:
    pools: list[PoolSpec] = []
    seen: dict[str, Node] = {}
    for path, item in f.items("pools", "a list of pools"):
        p = Fields(item, path, f.notes)
        p.hint(
            {"min_gpus": "guaranteed_gpus", "guaranteed": "guaranteed_gpus", "max": "max_gpus", "type": "model_type"}
        )
        name = p.required_text("name", "a name for the pool")
        model_type = p.required_text("model_type", "the model type whose tasks it serves")
        expected = "a number of GPUs, at least 0"
        guaranteed = p.number("guaranteed_gpus", expected, lambda v: v >= 0) or 0
        most = p.number("max_gpus", expected, lambda v: v >= 0)
        borrow = p.boolean("borrow")
        p.finish()
        unique(p, seen, name, "name", "the pool name")
        check_model_type(p, "model_type", model_type, known_types)
        if most is not None and guaranteed > most:
            p.wrong(
                p.map.entries["guaranteed_gpus"],
                f"{path}: guaranteed_gpus {guaranteed:g} is above max_gpus {most:g}, expected at most that",
            )
        if name is not None and model_type is not None:
            pools.append(
                PoolSpec(
                    name=name,
                    model_type=model_type,
                    guaranteed_gpus=guaranteed,
                    max_gpus=most,
                    borrow=True if borrow is None else borrow,
                )
            )
    return tuple(pools)
