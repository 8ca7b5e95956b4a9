"""A cluster in a virtual world: the production controller and the production scheduler, on adapters that pretend.

Time jumps from one thing that happens to the next. The controller is called on a grid of `tick_s` seconds, but only
where a tick could do something (wake.py). One simulation is one thread without clock or lots of its own: the same
arguments give the same events, byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush

from areal_sky.adapters.fakes import FakeClock, MemoryEvents
from areal_sky.core.admission import PATIENCE_S
from areal_sky.core.events import ClusterCreated, Record
from areal_sky.core.model import HEAD_GROUP, LaunchPlan, MachineState
from areal_sky.core.pools import Pool
from areal_sky.core.queueing import OrderPolicy
from areal_sky.core.scaling import Policy
from areal_sky.run.admitting import MIN_RUNTIME_S
from areal_sky.run.controller import REPEAT_S, Controller, first_wishes
from areal_sky.run.simulation.cloud import Guest, VirtualCloud, VirtualMachine
from areal_sky.run.simulation.head import VirtualHead
from areal_sky.run.simulation.measures import Measures
from areal_sky.run.simulation.result import SimResult
from areal_sky.run.simulation.rlrun import RlRun, RlRunSpec
from areal_sky.run.simulation.simtask import Clairvoyance, SimTask
from areal_sky.run.simulation.tasks import TaskWorld
from areal_sky.run.simulation.wake import next_wake_s
from areal_sky.run.simulation.world import DAY_S, SpotTrace, World, lots, outages
from areal_sky.run.supervise import SKY_PATIENCE
from areal_sky.spec.cluster import ClusterSpec

START_S = 1_700_000_000.0
TICK_S = 5.0  # a controller ticks five times a second, but what it waits for takes minutes
POINTS = 500


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated, whatever the policy: the work, the world, for how long. `spot`: one trace per zone."""

    name: str
    tasks: tuple[SimTask, ...] = ()
    runs: tuple[RlRunSpec, ...] = ()
    world: World = World()  # noqa: RUF009 - frozen
    spot: tuple[SpotTrace, ...] = ()
    days: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy under comparison. `known`: what its order may know of the future; `patience_s`: see Admission.

    `exact_estimates`: the scheduler is told how long each task will run.
    """

    name: str
    spec: ClusterSpec
    plan: LaunchPlan
    scaling: Policy
    order: OrderPolicy
    known: Clairvoyance
    preemptible: bool = True
    patience_s: float = PATIENCE_S
    exact_estimates: bool = False


class Simulation(Guest):
    """One run. `every_tick`: leave no tick out, to see that it makes no difference."""

    def __init__(self, scenario: Scenario, choice: Choice, *, tick_s: float = TICK_S, every_tick: bool = False):
        self._scenario, self._choice, self._every_tick = scenario, choice, every_tick
        self._tick_s = tick_s
        self._clock = clock = FakeClock(START_S)
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._called = 0
        spec = choice.spec
        self.tasks = TaskWorld(
            START_S, choice.order, pools_of(spec), weights={p.model_type: p.weight for p in spec.scheduling.priority},
            known=choice.known, patience_s=choice.patience_s, preemptible=choice.preemptible,
            min_runtime_s=MIN_RUNTIME_S,
        )  # fmt: skip
        self.head = VirtualHead(clock, self.tasks, self._at, self._idle, spec.scaling.idle_s)
        self.cloud = VirtualCloud(clock, scenario.world, scenario.seed, self._at, self, scenario.spot)
        self._store = MemoryEvents()
        self._store.append(clock.now(), ClusterCreated(spec.name), *first_wishes(choice.plan))
        self.controller = Controller(
            spec, choice.plan, self._store, self.cloud, self.head, clock, choice.scaling, SKY_PATIENCE
        )
        exact = choice.exact_estimates
        self.tasks.expect(replace(t, estimate_s=t.duration_s) if exact else t for t in scenario.tasks)
        self.runs = [RlRun(r, self.tasks, lots(scenario.seed, "run", r.name)) for r in scenario.runs]
        self._run_of = {task_id: run for run in self.runs for task_id in run.task_ids}
        self.tasks.on_start = self._started
        self.tasks.on_stop = self._stopped
        self._unjoined: list[VirtualMachine] = []
        self._quiet_since_s: float | None = None
        self._seen: tuple[object, ...] = ()
        self._tick_at_s, self._ticked_s = START_S, -math.inf
        self._end_s = START_S + (2.0 * scenario.days + 1.0) * DAY_S
        self._measures = Measures(START_S, self.cloud, self.head, self.tasks, scenario.days * DAY_S / POINTS)
        self.ticks = 0
        world, seed = scenario.world, scenario.seed
        for what, per_day in ((self.head, world.partitions_per_day), (self.cloud, world.silences_per_day)):
            for spell in outages(seed, type(what).__name__, per_day, world.outage_mean_s, self._end_s - START_S):
                for t_s, silent in zip(spell, (True, False), strict=True):
                    self._at(START_S + t_s, partial(setattr, what, "silent", silent))

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    @property
    def records(self) -> list[Record]:
        """The controller's events."""
        return self._store.records

    def run(self) -> SimResult:
        """To the end: all tasks have ended, or `2 x days + 1` days have passed."""
        while True:
            now_s = min(
                self._calls[0][0] if self._calls else math.inf,
                self.tasks.next_s(),
                min((r.next_s() for r in self.runs), default=math.inf),
                self._tick_at_s,
                self._measures.next_s,
            )
            if now_s > self._end_s:
                break
            self._happen(max(now_s, self._clock.now_s))
            if not self.tasks.unfinished and all(r.finished for r in self.runs):
                break
        return self._measures.result(self._scenario, self._choice.name, self)

    # ---------------------------------------------------------------- what the cloud tells (Guest)

    def up(self, machine: VirtualMachine) -> None:
        if machine.plan.name == HEAD_GROUP:
            self.head.up = True
            joining, self._unjoined = self._unjoined, []
        else:
            joining = [machine]
        for m in joining:
            if not self.head.up:
                self._unjoined.append(m)
                continue
            for index in range(m.plan.nodes_per_replica):
                self._at(self._clock.now_s + self._scenario.world.join_s, partial(self._join, m, index))

    def gone(self, machine: VirtualMachine, index: int | None, reclaimed: bool) -> None:
        self.head.left(machine.replica, index, reclaimed)

    def notice(self, machine: VirtualMachine) -> None:
        self.head.noticed(machine.replica)

    # ---------------------------------------------------------------- one moment

    def _happen(self, now_s: float) -> None:
        self._clock.now_s = now_s
        while self._calls and self._calls[0][0] <= now_s:
            heappop(self._calls)[2]()
        for run in self.runs:
            if run.next_s() <= now_s:
                run.look(now_s)
        self.tasks.step(now_s)
        seen = self._look()
        if seen != self._seen:
            self._seen = seen
            self._ask_tick(now_s)
        if self._tick_at_s <= now_s:
            self._tick(now_s)
            self.tasks.step(now_s)
        if self._measures.next_s <= now_s:
            self._measures.point(now_s)

    def _look(self) -> tuple[object, ...]:
        """All that a controller could see, as far as it may change what it does."""
        tasks, head = self.tasks, self.head
        waits = len(tasks.entries) > tasks.running
        queue = tasks.queue_version if waits else -1
        return self.cloud.version, self.cloud.silent, head.up, head.silent, head.version, queue

    def _tick(self, now_s: float) -> None:
        before = self.controller.state.version, self.cloud.refused, self.head.unheard
        self._tick_at_s = math.inf
        self.controller.tick()
        self.ticks += 1
        self._ticked_s = now_s
        if not self.cloud.silent:
            self._quiet_since_s = None
        elif self._quiet_since_s is None:
            self._quiet_since_s = now_s
        changed = self.controller.state.version != before[0]
        if changed or self._every_tick:
            self._ask_tick(now_s + self._tick_s)
        if (self.cloud.refused, self.head.unheard) != before[1:]:
            self._ask_tick(now_s + REPEAT_S)
        choice = self._choice
        wake_s = next_wake_s(
            self.controller.state, choice.plan, choice.spec.scaling, SKY_PATIENCE, self.head.idle_since_s(),
            self._quiet_since_s, now_s,
        )  # fmt: skip
        self._ask_tick(wake_s)

    def _ask_tick(self, t_s: float) -> None:
        """On the grid, not before that time, and not again at the present one if the tick there is done."""
        n = math.ceil((t_s - START_S) / self._tick_s - 1e-9)
        at_s = START_S + n * self._tick_s
        if at_s <= self._clock.now_s and self._ticked_s == self._clock.now_s:
            at_s = self._clock.now_s + self._tick_s
        self._tick_at_s = min(self._tick_at_s, at_s)

    def _at(self, t_s: float, call: Callable[[], None]) -> None:
        self._called += 1
        heappush(self._calls, (t_s, self._called, call))

    def _join(self, m: VirtualMachine, index: int) -> None:
        if m.state is MachineState.UP and index not in m.dead:
            self.head.joined(m.replica, m.plan, index, m.market)

    def _idle(self, now_s: float) -> None:
        """A replica has nothing to do from now on."""
        self._ask_tick(now_s + self._choice.spec.scaling.idle_s)

    def _started(self, task: SimTask, now_s: float) -> None:
        if (run := self._run_of.get(task.task_id)) is not None:
            run.started(task, now_s)

    def _stopped(self, task: SimTask, now_s: float) -> None:
        if (run := self._run_of.get(task.task_id)) is not None:
            run.stopped(task, now_s)


def pools_of(spec: ClusterSpec) -> tuple[Pool, ...]:
    """The quotas of a spec, each under its model type."""
    return tuple(
        Pool(p.model_type, p.guaranteed_gpus, math.inf if p.max_gpus is None else p.max_gpus, p.borrow)
        for p in spec.scheduling.pools
    )
