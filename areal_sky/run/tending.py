"""What alerts do to running tasks and to nodes. Each act is recorded with its reason before it is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from areal_sky.core.anomaly import Run
from areal_sky.core.nodefaults import may_avoid
from areal_sky.core.taskevents import NodeAvoided, Shrinking, Stopping, TaskEvent
from areal_sky.core.taskmodel import TaskState
from areal_sky.errors import NotFound, Refused
from areal_sky.run.dispatch import Dispatch

CORDON_S = 30 * 86400.0  # until a person, or the end of its alert, lifts it; a new node in its place starts fresh

OnReport = Callable[[str, int, Mapping[str, float], float, int | None], None]


@dataclass(frozen=True, slots=True)
class Running:
    """A run, with the latest values that it has reported."""

    run: Run
    metrics: Mapping[str, float]


class Tending(Dispatch):
    """`on_report` is told of every report: (task, attempt, values, time, rank). `alert_lines` adds to a story."""

    on_report: OnReport | None = None
    alert_lines: Callable[[str], list[tuple[float, str]]] | None = None

    def running(self) -> list[Running]:
        """What runs now."""
        with self._lock:
            return [
                Running(Run(r.task_id, r.attempt, r.phase_low), self._metrics.at_hand(r.task_id))
                for r in self._tasks.holding.values()
                if r.state is TaskState.RUNNING and r.stop is None
            ]

    def nodes_of(self, task_id: str) -> tuple[tuple[str, int], ...]:
        """The nodes (replica, index) that the task holds a part of."""
        with self._lock:
            r = self._tasks.live(task_id)
            return () if r is None else tuple(dict.fromkeys((p.replica, p.index) for p in r.held))

    def cordon(self, replica: str, index: int, reason: str, *, wanted: bool) -> str:
        """The node takes no new work; what runs there goes on. In words what was done.

        Unless that is `wanted` by the user no more than half of a group is cordoned: then it is not the nodes that are
        to blame. Raises NotFound, Refused, StateError.
        """
        with self._lock:
            now_s = self._clock.now()
            node_id = self._node_id(replica, index)
            if not self._book.takes_work(node_id, now_s):
                return f"node {replica}/{index} takes no new work already"
            if not wanted and not may_avoid(*self._book.avoided_in_group_of(node_id, now_s)):
                raise Refused(f"node {replica}/{index} is not cordoned, as half of its group would be")
            self._note_node(NodeAvoided(node_id, f"{replica}/{index}", now_s + CORDON_S, reason), now_s)
            return f"node {replica}/{index} takes no new work"

    def uncordon(self, replica: str, index: int, reason: str) -> str:
        """The node takes work again. Raises NotFound, StateError."""
        with self._lock:
            now_s = self._clock.now()
            node_id = self._node_id(replica, index)
            self._note_node(NodeAvoided(node_id, f"{replica}/{index}", now_s, reason), now_s)
            self.news.set()
            return f"node {replica}/{index} takes work again"

    def requeue(self, task_id: str, reason: str) -> str:
        """The run is ended (SIGTERM, and after a grace SIGKILL) and waits at its old place, to go on from its
        checkpoint. Raises NotFound, Refused where it does not run, StateError.
        """
        with self._lock:
            r = self._tasks.live(task_id)
            if r is None:
                raise NotFound(f"no task {task_id[:40]!r} runs or waits")
            if not r.holds or r.stop is not None:
                raise Refused(f"{task_id} does not run")
            now_s = self._clock.now()
            if r.state is TaskState.PLACED and not r.starting:
                self._requeue(r, now_s, reason)
            else:
                self._record(TaskEvent(now_s, task_id, Stopping("evict", reason)))
            self.news.set()
            saved = "" if r.checkpoint_s is None else f", {now_s - r.checkpoint_s:.0f} s after its checkpoint"
            return f"{task_id} is ended and queued again{saved}"

    def give_up_ranks(self, task_id: str, node: tuple[str, int], rank: int | None, reason: str) -> str:
        """An elastic task goes on without this rank, or without those on the node (replica, index).

        Raises NotFound, Refused where it cannot, StateError.
        """
        with self._lock:
            r = self._tasks.live(task_id)
            if r is None or not r.holds or r.stop is not None:
                raise NotFound(f"{task_id} does not run")
            on_node = {i for i in r.world if (r.places[i].replica, r.places[i].index) == node}
            there = [i for i in r.world if (i in on_node if rank is None else i == rank)]
            if not there:
                raise Refused(f"{task_id} has no such ranks")
            if not r.elastic or len(r.world) - len(there) < r.spec.fewest_bundles:
                raise Refused(f"{task_id} cannot run with fewer ranks (see its `min_bundles`)")
            self._record(TaskEvent(self._clock.now(), task_id, Shrinking(tuple(there), reason)))
            self.news.set()
            return f"{task_id} goes on without rank {', '.join(map(str, there))}"

    def _node_id(self, replica: str, index: int) -> str:
        for node_id in self._book.node_ids_of(replica):
            if self._book.place_labels(node_id) == (replica, index):
                return node_id
        raise NotFound(f"no node {replica[:60]}/{index} lives")

    def _note_node(self, fact: NodeAvoided, now_s: float) -> None:
        self._journal.append([TaskEvent(now_s, "", fact)])
        self._book.note(fact)
