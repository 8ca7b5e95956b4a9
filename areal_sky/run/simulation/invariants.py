"""What must hold in a virtual cluster whatever happens (run/simulation/histories.py): nothing is leaked, launched
twice, over-committed or lost. Raises `Violation` with what was found."""

from __future__ import annotations

from collections import Counter
from typing import Any

from areal_sky.core.events import LaunchIntended, fold
from areal_sky.core.lifecycle import SERVING
from areal_sky.core.model import ClusterState, ReplicaState
from areal_sky.errors import ArealSkyError
from areal_sky.run.simulation.historyworld import World

ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")


class Violation(AssertionError):
    """An invariant does not hold."""


class Invariants:
    """Looks at one world after every step; what it has seen before is held against what it sees now."""

    def __init__(self, world: World):
        self._world = world
        self._state = ClusterState()
        self._intents: Counter[str] = Counter()
        self._ended: dict[str, tuple[str, int]] = {}
        self._disk = 0
        self._terminated: set[tuple[str, int]] = set()

    def hold(self) -> None:
        """Of machines and their records, of Ray, of tasks. Raises Violation."""
        self._machines()
        self._ray()
        self._tasks()

    def at_rest(self) -> bool:
        """Whether nothing is left to do for anybody."""
        w = self._world
        alive = all(r.state is ReplicaState.READY for r in self._state.replicas.values())
        sizes = Counter(r.group for r in self._state.replicas.values())
        wanted = all(sizes[g.name] == g.desired for g in self._state.groups.values())
        calm = w.service is not None and not w.service.busy() and not w.asked and not w.ray.gangs_left()
        return alive and wanted and calm

    def rested(self) -> None:
        """All that was accepted has ended, all that was taken is given back, the cluster has its size."""
        w = self._world
        if w.service is None:
            raise Violation(f"the head does not come back: {self._replicas()}")
        left = {t["task_id"]: f"{t['state']}: {t['reason']}" for t in w.service.list("active")}
        _must(not left, f"tasks that never end: {left}; {self._replicas()}")
        _must(not w.asked, f"submits without an answer: {sorted(w.asked)}")
        _must(not w.ray.gangs_left(), f"placement groups leaked: {w.ray.gangs_left()}")
        sizes = Counter(r.group for r in self._state.replicas.values() if r.state is ReplicaState.READY)
        for g in self._state.groups.values():
            _must(sizes[g.name] == g.desired, f"{g.name} wants {g.desired}: {self._replicas()}")
        _must(fold(w.store.read()) == self._state, "the state is not the fold of the events")

    def ended(self) -> None:
        """The cluster is down: no machine is left, and no bill runs on."""
        w = self._world
        _must(w.controller.done, f"`down` never ends: {self._replicas()}")
        _must(not w.cloud.existing, f"machines leaked after `down`: {sorted(w.cloud.existing)}")
        self._read()
        _must(all(x.until_s is not None for x in self._state.ledger), "a bill runs on after `down`")

    def events(self) -> int:
        """How many facts have been recorded in all."""
        journal = self._world.service._journal.read() if self._world.service is not None else []
        return self._state.version + len(journal)

    # ---------------------------------------------------------------- machines

    def _read(self) -> None:
        for record in self._world.store.read(self._state.version):
            if isinstance(record.event, LaunchIntended):
                self._intents[record.event.replica] += 1
            self._state = fold([record], self._state)

    def _machines(self) -> None:
        self._read()
        w, state = self._world, self._state
        unknown = set(w.cloud.existing) - set(state.replicas)
        _must(not unknown, f"machines that no record knows: {sorted(unknown)}")
        # A launch whose answer was lost is asked for again, and makes machines anew where the first were taken back.
        twice = [r for r, n in w.cloud.born.items() if n > self._intents[r] + w.cloud.taken[r]]
        _must(not twice, f"launched more often than intended: {twice}")
        for group in (w.plan.head, *w.plan.groups):
            serving = [r.name for r in state.replicas.values() if r.group == group.name and r.state in SERVING]
            most = group.max_replicas + group.elastic  # one more while spot takes the place of what stood in for it
            _must(len(serving) <= most, f"{group.name} may have {group.max_replicas}: {serving}")
        running = Counter(x.replica for x in state.ledger if x.until_s is None)
        accepted = {r.name for r in state.replicas.values() if r.launched_s is not None}
        _must(running == Counter(accepted), f"bills {dict(running)} for replicas {sorted(accepted)}")
        self._drained_are_empty()

    def _drained_are_empty(self) -> None:
        """What the controller ends because it is drained runs nothing when it is first told to end."""
        w = self._world
        for r in self._state.replicas.values():
            key = (r.name, self._intents[r.name])
            if r.state is not ReplicaState.TERMINATING or key in self._terminated:
                continue
            self._terminated.add(key)
            if r.reason.startswith("drained"):
                nodes = set(w.joined.get(r.name, ()))
                here = [(g, rank) for g, rank in w.ray.running() if w.ray.all_gangs[g].node_ids[rank] in nodes]
                _must(not here, f"{r.name} was ended as drained while {here} ran there")

    def _replicas(self) -> str:
        return ", ".join(f"{r.name} {r.state} ({r.reason})" for r in self._state.replicas.values())

    # ---------------------------------------------------------------- Ray and tasks

    def _ray(self) -> None:
        ray = self._world.ray
        _must(not ray.over_committed(), "a node gives away more than it has")
        again = [rank for rank, n in ray.started.items() if n > 1] if not self._world.head_disk else []
        _must(not again, f"started twice: {again}")
        attempts = {g for g, _ in ray.running()}
        twice = [t for t, n in Counter(g.split(".")[0] for g in attempts).items() if n > 1]
        _must(not twice, f"two attempts run at once: {twice}")

    def _tasks(self) -> None:
        w = self._world
        if w.head_disk != self._disk:
            self._disk = w.head_disk
            self._ended.clear()
        if w.service is None:
            return
        try:
            seen = {t["task_id"]: t for t in w.service.list()}
        except ArealSkyError:
            return
        lost = set(w.answered.values()) - set(seen)
        _must(not lost, f"accepted and lost: {sorted(lost)}")
        _must(len(set(w.answered.values())) == len(w.answered), f"two submits, one task: {w.answered}")
        most = len(w.answered) + len(w.asked)
        _must(w.head_disk > 0 or len(seen) <= most, f"more tasks than submits: {sorted(seen)}")
        for task_id, (state, attempt) in self._ended.items():
            now = (seen[task_id]["state"], seen[task_id]["attempt"])
            _must(now == (state, attempt), f"{task_id} was {state} in attempt {attempt}, is {now}")
        for task_id, t in seen.items():
            if t["state"] in ENDED and task_id not in self._ended:
                self._ended[task_id] = (t["state"], t["attempt"])
                self._ended_rightly(t)

    def _ended_rightly(self, t: dict[str, Any]) -> None:
        """Who has succeeded did all of its work, in the run that is told."""
        if t["state"] == "SUCCEEDED":
            gang = f"{t['task_id']}.{t['attempt']}"
            ranks = set(range(t["bundles"])) - set(t["gone_ranks"])
            codes = {rank: self._world.codes.get((gang, rank), "still runs") for rank in ranks}
            _must(t["min_bundles"] < t["bundles"] or set(codes.values()) == {0}, f"{gang} succeeded with {codes}")


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)
