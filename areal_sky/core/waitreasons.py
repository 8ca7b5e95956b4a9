"""Why a task waits, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from areal_sky.core.backfill import Reservation
from areal_sky.core.leases import Leases
from areal_sky.core.placement import NodeRoom, NoFit, fit, reasons
from areal_sky.core.shapes import Item


def why_it_waits(
    item: Item, leases: Leases, reservations: Mapping[str, Reservation], rooms: Sequence[NodeRoom], now_s: float
) -> str:
    """Empty when it does not wait."""
    task_id, shape = item.entry.task_id, item.shape
    if task_id in leases.claims and task_id not in leases.running:
        victims = [h.task_id for h in leases.running.values() if h.ending == task_id]
        return f"its room is set aside; it starts when {', '.join(victims) or 'what is there'} has ended"
    if shape is None:
        return ""
    if shape.barred:
        return shape.barred
    if shape.open:
        return "it has not been looked at yet"
    told = "; ".join(reasons(item.entry.ask, rooms))
    whole = [site.room for site in leases.sites.values() if site.room is not None]
    if isinstance(fit(replace(shape.ask, count=shape.least), whole), NoFit):
        told += "; the nodes that are up could not hold it even if they were idle: it needs more of them"
    mine = reservations.get(task_id)
    if mine is not None:
        when = "" if mine.start_s == inf else f" from about {max(0.0, mine.start_s - now_s):.0f} s from now"
        told += f"; {_nodes(len(mine.node_ids))} reserved for it{when}"
    others = sum(len(r.node_ids) for r in reservations.values() if r is not mine)
    return f"{told}; {_nodes(others)} reserved for tasks before it" if others else told


def _nodes(n: int) -> str:
    return "1 node is" if n == 1 else f"{n} nodes are"
