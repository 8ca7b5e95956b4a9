"""Who held which part of which node, from when to when: what splits a replica's cost among tasks.

The head's task journal knows it (`past_holds`, `holds`); the controller keeps the latest answer (`merge`), so that the
bill by task outlives the cluster. Times are Unix seconds of the head's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from areal_sky.core import tasklife
from areal_sky.core.taskevents import Draining, NodeAvoided, TaskEvent
from areal_sky.core.tasklife import TaskRecord
from areal_sky.errors import Unreachable


@dataclass(frozen=True, slots=True)
class Hold:
    """What one attempt of a task held of one node, from its placement until its release (None: still held).

    `gpus` and `cpus` are all of its ranks there together; `node_gpus`, `node_cpus` are the whole node's, 0 if unknown.
    """

    task_id: str
    attempt: int
    name: str
    kind: str
    replica: str
    index: int
    gpus: float
    cpus: float
    node_gpus: float
    node_cpus: float
    from_s: float
    until_s: float | None

    @property
    def key(self) -> tuple[str, int, str, int, float]:
        """The same hold in two answers has the same key, also after a head that started over with task t1."""
        return self.task_id, self.attempt, self.replica, self.index, self.from_s


@dataclass(frozen=True, slots=True)
class Usage:
    """All holds known at `t_s`; 0 when nobody has told any."""

    t_s: float = 0.0
    holds: tuple[Hold, ...] = ()


def holds(record: TaskRecord, until_s: float | None) -> tuple[Hold, ...]:
    """What the record's attempt holds, or held until `until_s`: one entry per node."""
    if not record.holds or record.placed_s is None:
        return ()
    by_node: dict[tuple[str, int], Hold] = {}
    bundle, spec = record.bundle, record.spec
    for p in record.held:
        node = (p.replica, p.index)
        known = by_node.get(node)
        if known is not None:
            by_node[node] = replace(known, gpus=known.gpus + bundle.gpus, cpus=known.cpus + bundle.cpus)
            continue
        by_node[node] = Hold(
            record.task_id, record.attempt, spec.name, spec.kind, p.replica, p.index, bundle.gpus, bundle.cpus,
            p.node_gpus, p.node_cpus, record.placed_s, until_s,
        )  # fmt: skip
    for p in record.claim:
        node, gpus = (p.replica, p.index), sum(share for _, share in p.devices)
        known = by_node.get(node)
        by_node[node] = Hold(
            record.task_id, record.attempt, spec.name, spec.kind, p.replica, p.index, gpus, 0.0, p.node_gpus,
            p.node_cpus, record.placed_s, until_s,
        ) if known is None else replace(known, gpus=known.gpus + gpus)  # fmt: skip
    return tuple(by_node.values())


def released(before: TaskRecord | None, after: TaskRecord) -> tuple[Hold, ...]:
    """The holds that ended with the step from `before` to `after`."""
    if before is None or not before.holds or (after.holds and before.held == after.held):
        return ()
    if after.holds:  # an elastic gang has become smaller: a new entry begins
        return holds(before, after.placed_s)
    return holds(before, after.since_s)


def past_holds(events: Iterable[TaskEvent]) -> list[Hold]:
    """Every hold that has ended, from the whole journal, in the order of their ends."""
    records: dict[str, TaskRecord] = {}
    past: list[Hold] = []
    for e in events:
        if isinstance(e.fact, Draining | NodeAvoided):
            continue
        before = records.get(e.task_id)
        records[e.task_id] = tasklife.apply(before, e)
        past += released(before, records[e.task_id])
    return past


def merge(old: Usage, new: Usage) -> Usage:
    """Both answers together; `new` is the later one and may leave out what had ended before `old`.

    A hold that was open in `old` and is unknown to `new` (the head lost its journal) ended when it was last seen.
    """
    told = {h.key for h in new.holds}
    kept = [
        h if h.until_s is not None else replace(h, until_s=max(h.from_s, old.t_s))
        for h in old.holds
        if h.key not in told
    ]
    return Usage(max(old.t_s, new.t_s), (*kept, *new.holds))


def usage_to_json(usage: Usage) -> dict[str, Any]:
    """What GET /v1/usage answers."""
    return {"t_s": usage.t_s, "holds": [asdict(h) for h in usage.holds]}


def usage_from_json(raw: Mapping[str, Any]) -> Usage:
    """Raises Unreachable when it is not what this version expects."""
    try:
        return Usage(float(raw["t_s"]), tuple(Hold(**cast("dict[str, Any]", h)) for h in raw["holds"]))
    except (KeyError, TypeError, ValueError) as e:
        raise Unreachable(f"the head speaks another version: {e}") from None
