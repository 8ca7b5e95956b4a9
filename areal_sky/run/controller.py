"""The controller of one cluster: observe -> append events -> decide -> act, many times a second, never waiting.

The event store is the truth and the state is its fold. Other processes (the command line) append wishes such as
`GroupDesired` or `DownRequested` to the same store; a tick that finds that it decided on old state drops its decision.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from areal_sky.adapters.ports import Clock, Cloud, Events, HeadPort, LaunchRequest
from areal_sky.core import reconcile, scaling
from areal_sky.core.cost import hourly_usd
from areal_sky.core.events import (
    CloudAnswers,
    CloudSilent,
    Event,
    GroupDesired,
    LaunchAccepted,
    ScalingHeld,
    fold,
)  # fmt: skip
from areal_sky.core.lifecycle import STARTING
from areal_sky.core.model import ClusterState, GroupPlan, LaunchPlan, ReplicaState
from areal_sky.core.view import HeadView
from areal_sky.errors import ArealSkyError, NoCapacity, Unreachable
from areal_sky.spec.cluster import ClusterSpec

log = logging.getLogger(__name__)
SILENT_S = 20.0  # a cloud that has not answered for so long is said to be silent
REPEAT_S = 1.0  # a drain or termination that has not shown effect is asked for again after this long


class Controller:
    """Keeps one cluster as its events say it shall be. Call `tick()` in a loop until `done`."""

    def __init__(
        self,
        spec: ClusterSpec,
        plan: LaunchPlan,
        store: Events,
        cloud: Cloud,
        head: HeadPort,
        clock: Clock,
        policy: scaling.Policy,
        patience: reconcile.Patience,
    ):
        self._spec = spec
        self._plan = plan
        self._store = store
        self._cloud = cloud
        self._head = head
        self._clock = clock
        self._policy = policy
        self._patience = patience
        self._missing: dict[str, float] = {}
        self._asked: dict[reconcile.Action, float] = {}
        self._held: dict[str, str] = {}
        self._silent_since_s: float | None = None
        self.state = fold(store.read())

    @property
    def done(self) -> bool:
        """Whether the cluster is down and nothing is left to do."""
        return self.state.down_s is not None

    def tick(self) -> None:
        """One look and what follows from it. Raises StateError when the store cannot be read or written."""
        self.state = fold(self._store.read(self.state.version), self.state)
        if self.done:
            return
        now_s = self._clock.now()
        try:
            seen = self._look(now_s)
        except ArealSkyError as e:
            self._silent(e, now_s)
            return
        self._silent_since_s = None
        if self.state.cloud_problem and not self._record(now_s, [CloudAnswers()]):
            return
        if not self._record(now_s, reconcile.observe(self.state, seen, now_s, self._patience)):
            return
        if not self._record(now_s, self._scale(seen.view, now_s)):
            return
        if self._record(now_s, reconcile.decide(self.state, self._plan, seen, now_s, self._patience)):
            self._act(now_s)

    def _look(self, now_s: float) -> reconcile.Observation:
        view = self._head.view()
        self._missing = reconcile.track_missing(self._missing, self.state, view, now_s)
        machines = {m.replica: m for m in self._cloud.machines()}
        for name in reconcile.doubtful(self.state, self._missing, now_s):
            self._cloud.doubt(name)
        return reconcile.Observation(machines=machines, view=view, missing_since_s=self._missing)

    def _silent(self, error: ArealSkyError, now_s: float) -> None:
        """Without knowledge of the machines nothing is decided about them."""
        if self._silent_since_s is None:
            self._silent_since_s = now_s
        if not self.state.cloud_problem and now_s - self._silent_since_s > SILENT_S:
            self._record(now_s, [CloudSilent(str(error))])

    def _record(self, now_s: float, events: Sequence[Event]) -> bool:
        """Appends the events; False when somebody else appended first and the tick must start over."""
        if not events:
            return True
        records = self._store.append_if(now_s, self.state.version, *events)
        if records is None:
            return False
        for record in records:
            log.info("%s", record.event)
        self.state = fold(records, self.state)
        return True

    # ------------------------------------------------------------ acting

    def _act(self, now_s: float) -> None:
        actions = reconcile.todo(self.state)
        self._asked = {a: t for a, t in self._asked.items() if a in actions}
        for action in actions:
            if now_s - self._asked.get(action, float("-inf")) < REPEAT_S:
                continue
            self._asked[action] = now_s
            try:
                self._carry_out(action, now_s)
            except ArealSkyError as e:
                log.warning("%s: %s", action, e)

    def _carry_out(self, action: reconcile.Action, now_s: float) -> None:
        replica = self.state.replicas[action.replica]
        match action:
            case reconcile.Launch():
                group = self._plan.group(replica.group)
                if group is None:
                    return
                request = LaunchRequest(self._plan.cluster, replica.name, group, replica.market)
                try:
                    request_id = self._cloud.launch(request)
                except ArealSkyError as e:
                    none, fault = isinstance(e, NoCapacity), not isinstance(e, NoCapacity | Unreachable)
                    failed = reconcile.launch_failed(
                        replica, self.state, str(e), now_s, self._patience, none, fault=fault
                    )
                    self._append(now_s, failed)
                    return
                if request_id:
                    self._append(now_s, LaunchAccepted(replica.name, request_id))
            case reconcile.Drain(deadline_s=deadline_s):
                self._head.drain(replica.name, replica.reason, deadline_s)
            case reconcile.Terminate():
                self._cloud.terminate(replica.name)
            case _:
                pass

    def _append(self, now_s: float, event: Event) -> None:
        """A fact about a call that was made: recorded whatever else was appended meanwhile."""
        self._store.append(now_s, event)
        log.info("%s", event)
        self.state = fold(self._store.read(self.state.version), self.state)

    # ------------------------------------------------------------ scaling

    def _scale(self, view: HeadView | None, now_s: float) -> list[Event]:
        if view is None or self.state.down_requested_s is not None:
            return []
        elastic = [g for g in self._plan.groups if g.elastic and g.name in self.state.groups]
        demand = scaling.assign_demand(view.demand, elastic, view.nodes, self._ready(elastic))
        events: list[Event] = []
        for group in elastic:
            context = self._context(group, view, demand, now_s)
            decision = self._in_budget(scaling.decide(self._policy, context), context)
            if decision.desired != context.desired:
                self._held.pop(group.name, None)
                events.append(
                    GroupDesired(group.name, decision.desired, decision.reason, by="policy", victims=decision.victims)
                )
            elif self._held.get(group.name) != _kind(decision.reason):
                self._held[group.name] = _kind(decision.reason)
                events.append(ScalingHeld(group.name, decision.reason))
        return events

    def _ready(self, groups: Sequence[GroupPlan]) -> dict[str, int]:
        return {g.name: len(self._ready_names(g.name)) for g in groups}

    def _ready_names(self, group: str) -> set[str]:
        """Replicas that can be used now. One that misses nodes will be back or be replaced: its room is on its way."""
        mine = (r for r in self.state.replicas.values() if r.group == group and r.state is ReplicaState.READY)
        return {r.name for r in mine if r.name not in self._missing}

    def _context(
        self,
        group: GroupPlan,
        view: HeadView,
        demand: Mapping[str, Sequence[scaling.GangDemand]],
        now_s: float,
    ) -> scaling.ScalingContext:
        wanted = self.state.groups[group.name]
        mine = [r for r in self.state.replicas.values() if r.group == group.name]
        ready = self._ready_names(group.name)
        return scaling.ScalingContext(
            now_s=now_s,
            group=group,
            desired=wanted.desired,
            ready=len(ready),
            starting=sum(1 for r in mine if r.state in STARTING),
            loads=tuple(x for x in view.loads if x.replica in ready),
            demand=tuple(demand.get(group.name, ())),
            target_utilization=self._spec.scaling.target_utilization,
            cooldown_s=self._spec.scaling.cooldown_s,
            idle_s=self._spec.scaling.idle_s,
            last_grow_s=wanted.last_grow_s,
            last_shrink_s=wanted.last_shrink_s,
            nodes=view.nodes,
        )

    def _in_budget(self, decision: scaling.ScalingDecision, context: scaling.ScalingContext) -> scaling.ScalingDecision:
        cap = self._spec.budget.max_hourly_usd
        if cap is None or decision.desired <= context.desired:
            return decision
        sizes = desired_sizes(self.state)
        for desired in range(decision.desired, context.desired, -1):
            if hourly_usd(self._plan, {**sizes, context.group.name: desired}) <= cap:
                break
        else:
            desired = context.desired
        if desired == decision.desired:
            return decision
        reason = f"{decision.reason}; held at {desired} by budget.max_hourly_usd {cap:g}"
        return replace(decision, desired=desired, reason=reason)


def desired_sizes(state: ClusterState) -> dict[str, int]:
    """Replicas wanted per group."""
    return {g.name: g.desired for g in state.groups.values()}


def first_wishes(plan: LaunchPlan) -> Iterable[GroupDesired]:
    """What a new cluster shall be: the head, and each group at its smallest."""
    yield GroupDesired(plan.head.name, 1, "every cluster has one head", by="spec")
    for g in plan.groups:
        size = "min_replicas" if g.elastic else "fixed"
        yield GroupDesired(g.name, g.min_replicas, f"{size} in the spec", by="spec")


def _kind(reason: str) -> str:
    # Two reasons that differ in numbers alone are the same answer.
    return re.sub(r"[0-9]+(\.[0-9]+)?", "#", reason)
