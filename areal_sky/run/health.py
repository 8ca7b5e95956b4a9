"""What failed tasks tell of the nodes that they ran on."""

from __future__ import annotations

from areal_sky.core.nodeenv import HeadEnv
from areal_sky.core.nodefaults import AVOID_S, SEVERAL, NodeFaults, may_avoid
from areal_sky.core.placement import Ask
from areal_sky.core.taskevents import Ended, NodeAvoided, Requeued
from areal_sky.core.tasklife import TaskRecord, first_failure
from areal_sky.core.taskmodel import TaskState
from areal_sky.run.nodebook import NodeBook
from areal_sky.run.submission import why_never


class NodeHealth:
    def __init__(self, book: NodeBook, env: HeadEnv):
        self._book = book
        self._env = env
        self._shapes = [g.shape for g in env.groups]
        self._faults = NodeFaults()

    def failed(self, r: TaskRecord, now_s: float) -> NodeAvoided | None:
        """A task has failed by itself. Where different ones do so soon after their start, the node is to blame."""
        first = first_failure(r)
        if first is None or first.oom or first.rank >= len(r.places) or r.stop in ("timeout", "expired"):
            return None
        place = r.places[first.rank]
        ran_s = first.t_s - (r.started_s if r.started_s is not None else first.t_s)
        failed = self._faults.failed(place.node_id, r.spec.command or r.spec.payload or "", ran_s, now_s)
        if failed < SEVERAL or not may_avoid(*self._book.avoided_in_group_of(place.node_id, now_s)):
            return None
        self._faults.forget(place.node_id)
        reason = f"{failed} different tasks failed there soon after their start"
        return NodeAvoided(place.node_id, str(place), now_s + AVOID_S, reason)

    def if_it_can_fit(self, r: TaskRecord, again: Requeued) -> Requeued | Ended:
        """Where memory ran out, and what the task would ask for now is more than there can ever be, it ends."""
        if again.bundle is None:
            return again
        ask = Ask(again.bundle, r.spec.fewest_bundles, r.spec.group, again.accelerators or r.accelerators)
        why = why_never(ask, self._book.whole_rooms(), self._env)
        return again if why is None else Ended(TaskState.FAILED, f"{r.stop_reason}; out of memory, and {why}")

    def did_well(self, r: TaskRecord) -> None:
        """A task has succeeded."""
        self._faults.did_well({p.node_id for p in r.places})

    def larger_accelerators(self, r: TaskRecord) -> tuple[str, ...]:
        """Accelerators of the cluster with more memory each than those that the task runs on."""
        memory = {s.accelerator: s.gpu_memory_gib or 0.0 for s in self._shapes if s.accelerator}
        used = [a for p in r.places if (a := self._book.accelerator_of(p.node_id)) is not None]
        has = max((memory.get(a, 0.0) for a in used), default=0.0)
        allowed = {a.lower() for a in r.spec.accelerators}
        more = (a for a, gib in memory.items() if a and gib > has > 0 and (not allowed or a.lower() in allowed))
        return tuple(sorted(more))
