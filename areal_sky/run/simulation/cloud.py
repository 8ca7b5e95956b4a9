"""`ports.Cloud` over a virtual world: machines that take their time, fail, are reclaimed, and calls that go wrong.

Only this adapter knows that nothing is real; the controller above it is the one that runs real clusters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from areal_sky.adapters.fakes import FakeClock
from areal_sky.adapters.ports import LaunchRequest
from areal_sky.core.model import GroupPlan, Machine, MachineState, Offer
from areal_sky.errors import Unreachable
from areal_sky.run.simulation.world import (
    HOUR_S,
    NOTICE_S,
    OTHER_NOTICE_S,
    SpotPrices,
    SpotTrace,
    World,
    launch_s,
    lots,
)  # fmt: skip

S = MachineState
# (market, zone, dollars per node and hour in the plan, at most so many: spot is never dearer than on demand)
Tariff = tuple[str, str, float | None, float | None]


class Guest:
    """Who is told what happens to machines. The engine is one."""

    def up(self, machine: VirtualMachine) -> None: ...
    def gone(self, machine: VirtualMachine, index: int | None, reclaimed: bool) -> None: ...
    def notice(self, machine: VirtualMachine) -> None: ...


@dataclass(slots=True)
class VirtualMachine:
    """A replica's machines. `index` in `dead`: nodes that broke."""

    replica: str
    plan: GroupPlan
    market: str
    zone: str
    attempt: int
    request_id: str
    state: MachineState = S.STARTING
    error: str = ""
    no_capacity: bool = False
    dead: set[int] = field(default_factory=set[int])
    leaving: bool = False  # reclaimed, its notice runs
    counted: bool = False  # it is paid for, and takes room of its zone
    seen: Machine | None = None  # as the cloud lists it, while that holds

    @property
    def offer(self) -> Offer:
        plan = self.plan
        return (plan.spot_offer if self.market == "spot" else plan.on_demand_offer) or plan.offer

    @property
    def tariff(self) -> Tariff:
        """What it costs, whatever the hour."""
        regular = self.plan.on_demand_offer
        limit = regular.price_usd_per_hour if regular is not None and self.market == "spot" else None
        return self.market, self.zone, self.offer.price_usd_per_hour, limit


class VirtualCloud:
    """See the module. `at` calls something at a time; `guest` is told of machines."""

    def __init__(
        self,
        clock: FakeClock,
        world: World,
        seed: int,
        at: Callable[[float, Callable[[], None]], None],
        guest: Guest,
        traces: Sequence[SpotTrace] = (),
    ):
        self._clock, self._world, self._seed, self._at, self._guest = clock, world, seed, at, guest
        self._start_s = clock.now_s
        self._traces = tuple(traces)
        self._prices = SpotPrices(seed, world.price_sigma)
        self._machines: dict[str, VirtualMachine] = {}
        self._attempts: dict[str, int] = {}
        self._listed: tuple[Machine, ...] | None = ()
        self._calls = 0
        self._billed_s = clock.now_s
        self._nodes_at: dict[Tariff, int] = {}  # nodes that are paid for now
        self.silent = False
        self.refused = 0  # calls that raised
        self.version = 0  # changes with every change that `machines` would show
        self.launches = self.launch_failures = self.reclaims = 0
        self.usd: dict[str, float] = {"on_demand": 0.0, "spot": 0.0}
        self.unpriced_hours = 0.0
        for trace in self._traces:
            self._follow(trace)

    # ---------------------------------------------------------------- the port

    def launch(self, request: LaunchRequest) -> str:
        lost_reply = self._call()
        known = self._machines.get(request.replica)
        if known is None:
            known = self._launch(request)
        if lost_reply:
            self.refused += 1
            raise Unreachable("the answer was lost")
        return known.request_id

    def machines(self) -> tuple[Machine, ...]:
        if self.silent:
            raise Unreachable("the cloud's API does not answer")
        if self._listed is None:
            self._listed = tuple(m.seen or _seen(m) for m in self._machines.values())
        return self._listed

    def terminate(self, replica: str) -> None:
        lost_reply = self._call()
        m = self._machines.get(replica)
        if m is not None and m.state is not S.STOPPING:
            self._guest.gone(m, None, False)
            stop_s = self._world.stop_s if m.counted else 0.0
            self._to(m, S.STOPPING)
            self._at(self._clock.now_s + stop_s, lambda: self._remove(m))
        if lost_reply:
            self.refused += 1
            raise Unreachable("the answer was lost")

    def doubt(self, replica: str) -> None:
        """Nothing here is seen late."""

    # ---------------------------------------------------------------- what is seen from outside

    def all(self) -> list[VirtualMachine]:
        return list(self._machines.values())

    def bill(self) -> Mapping[str, float]:
        """Dollars so far by market, at the prices of each hour. Machines without a price are left out."""
        now_s = self._clock.now_s
        while self._billed_s < now_s:
            hour = math.floor((self._billed_s - self._start_s) / HOUR_S + 1e-9)
            until_s = min(now_s, self._start_s + (hour + 1) * HOUR_S)
            hours = (until_s - self._billed_s) / HOUR_S
            for (market, zone, usd, limit), nodes in self._nodes_at.items():
                if usd is None:
                    self.unpriced_hours += hours * nodes
                    continue
                if market == "spot":
                    usd *= self._prices.factor(zone, self._billed_s - self._start_s)
                self.usd[market] += (usd if limit is None else min(usd, limit)) * nodes * hours
            self._billed_s = until_s
        return dict(self.usd)

    # ---------------------------------------------------------------- how: launches

    def _call(self) -> bool:
        """One call of the API: raises, or says whether its answer will be lost."""
        if self.silent:
            self.refused += 1
            raise Unreachable("the cloud's API does not answer")
        world = self._world
        if not world.api_error_frac and not world.lost_reply_frac:
            return False
        self._calls += 1
        lot = lots(self._seed, "call", self._calls).random()
        if lot < world.api_error_frac:
            self.refused += 1
            raise Unreachable("503 Service Unavailable")
        return lot < world.api_error_frac + world.lost_reply_frac

    def _launch(self, request: LaunchRequest) -> VirtualMachine:
        attempt = self._attempts[request.replica] = self._attempts.get(request.replica, 0) + 1
        zone = self._zone(request) if request.market == "spot" else ""
        m = VirtualMachine(
            request.replica, request.plan, request.market, zone or "", attempt, f"virtual-{request.replica}-{attempt}"
        )
        self._machines[m.replica] = m
        self.launches += 1
        now_s, world = self._clock.now_s, self._world
        draw = lots(self._seed, "launch", m.replica, attempt)
        up_s = launch_s(world, m.offer.cloud, draw)
        if zone is not None:
            self._count(m, True)
        if zone is None:
            self._at(now_s + world.refused_s, lambda: self._fail(m, "no spot capacity in any zone", True))
        elif draw.random() < world.failed_launch_frac.get(m.market, 0.0):
            self._at(now_s + up_s, lambda: self._fail(m, "the launch ended in an error", False))
        else:
            self._at(now_s + up_s, lambda: self._come_up(m))
        self._changed()
        return m

    def _zone(self, request: LaunchRequest) -> str | None:
        """The first zone with room for its nodes; None: there is none. Without traces there always is."""
        if not self._traces:
            return "spot"
        nodes = request.plan.nodes_per_replica
        for trace in self._traces:
            if self._taken(trace.zone) + nodes <= trace.room(self._clock.now_s - self._start_s):
                return trace.zone
        return None

    def _taken(self, zone: str) -> int:
        return sum(
            m.plan.nodes_per_replica
            for m in self._machines.values()
            if m.zone == zone and m.counted and not m.leaving and m.state is not S.STOPPING
        )

    def _fail(self, m: VirtualMachine, error: str, no_capacity: bool) -> None:
        if self._machines.get(m.replica) is m and m.state is S.STARTING:
            self.launch_failures += 1
            m.error, m.no_capacity = error, no_capacity
            self._count(m, False)
            self._to(m, S.FAILED)

    def _come_up(self, m: VirtualMachine) -> None:
        if self._machines.get(m.replica) is not m or m.state is not S.STARTING:
            return
        self._to(m, S.UP)
        self._guest.up(m)
        draw = lots(self._seed, "life", m.replica, m.attempt)
        now_s, world = self._clock.now_s, self._world
        hazard = world.reclaims_per_hour * m.plan.nodes_per_replica
        if m.market == "spot" and not self._traces and hazard > 0:
            self._at(now_s + draw.expovariate(hazard / HOUR_S), lambda: self._reclaim(m))
        faults = world.faults_per_gpu_hour * m.plan.shape.gpus
        for index in range(m.plan.nodes_per_replica if faults > 0 else 0):
            self._at(now_s + draw.expovariate(faults / HOUR_S), lambda i=index: self._break(m, i))

    # ---------------------------------------------------------------- how: what befalls machines

    def _follow(self, trace: SpotTrace) -> None:
        t_s = trace.next_change_s(max(0.0, self._clock.now_s - self._start_s))
        if t_s < math.inf:
            self._at(self._start_s + t_s, lambda: self._supply(trace))

    def _supply(self, trace: SpotTrace) -> None:
        """The zone has another number of machines now: what is beyond it is taken back, the newest first."""
        room = trace.room(self._clock.now_s - self._start_s)
        taken = self._taken(trace.zone)
        for m in reversed(self.all()):
            if taken <= room:
                break
            if m.zone != trace.zone or not m.counted or m.leaving:
                continue
            if m.state is S.UP:
                taken -= m.plan.nodes_per_replica
                self._reclaim(m)
            elif m.state is S.STARTING:
                taken -= m.plan.nodes_per_replica
                self._fail(m, "spot capacity went away", True)
        self._follow(trace)

    def _reclaim(self, m: VirtualMachine) -> None:
        """The notice; its end follows."""
        if self._machines.get(m.replica) is not m or m.state is not S.UP or m.leaving:
            return
        m.leaving = True
        self.reclaims += 1
        self._guest.notice(m)
        notice_s = NOTICE_S.get(m.offer.cloud, OTHER_NOTICE_S)
        self._at(self._clock.now_s + notice_s, lambda: self._take(m))

    def _take(self, m: VirtualMachine) -> None:
        if self._machines.get(m.replica) is m and m.state is S.UP:
            self._guest.gone(m, None, True)
            self._remove(m)

    def _break(self, m: VirtualMachine, index: int) -> None:
        if self._machines.get(m.replica) is m and m.state is S.UP and index not in m.dead:
            m.dead.add(index)
            m.error = "a node has failed"
            self._guest.gone(m, index, True)
            self._to(m, S.FAILED)

    def _remove(self, m: VirtualMachine) -> None:
        if self._machines.get(m.replica) is m:
            self._count(m, False)
            del self._machines[m.replica]
            self._to(m, S.STOPPING)

    def _count(self, m: VirtualMachine, counted: bool) -> None:
        """It is paid for, from now on or no more."""
        if m.counted != counted:
            self.bill()
            m.counted = counted
            nodes = m.plan.nodes_per_replica if counted else -m.plan.nodes_per_replica
            self._nodes_at[m.tariff] = self._nodes_at.get(m.tariff, 0) + nodes

    def _to(self, m: VirtualMachine, state: MachineState) -> None:
        m.state, m.seen = state, None
        self._changed()

    def _changed(self) -> None:
        self._listed = None
        self.version += 1


def _seen(m: VirtualMachine) -> Machine:
    m.seen = Machine(
        m.replica, m.state, m.plan.nodes_per_replica - len(m.dead) if m.state is S.UP else 0, error=m.error,
        no_capacity=m.no_capacity, request_id=m.request_id,
    )  # fmt: skip
    return m.seen
