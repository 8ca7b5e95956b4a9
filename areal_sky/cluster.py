"""The Python API: bring a cluster up, grow and shrink it, give it work, ask it why, and end it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_sky.core.cost import Bill, Breakdown
from areal_sky.core.events import ClusterCreated, DownRequested, Event, GroupDesired, Record, fold
from areal_sky.core.market import offer_for
from areal_sky.core.memory_check import refuse
from areal_sky.core.model import ClusterState, GroupPlan, LaunchPlan, ReplicaState
from areal_sky.core.scaling import ScalingDecision
from areal_sky.errors import AlreadyExists, InvalidInput, NotFound, Refused, StateError
from areal_sky.home import ClusterHome, choose_cluster, locked
from areal_sky.run import supervise
from areal_sky.run.controller import first_wishes
from areal_sky.run.names import check_names, names_ahead
from areal_sky.spec.cluster import ClusterSpec
from areal_sky.units import format_usd

if TYPE_CHECKING:
    from areal_sky.task import Task, TaskHandle

Progress = Callable[[Record], None]
POLL_S = 0.1


@dataclass(frozen=True)
class Leftover:
    """Something that `down` could not end, or could not verify."""

    what: str


class Cluster:
    """A handle on one cluster by name; holds no connection and may be made as often as you like."""

    def __init__(self, home: ClusterHome):
        """Use `up` or `attach`."""
        self.home = home
        self.name = home.name

    # ------------------------------------------------------------ coming and going

    @classmethod
    def create(
        cls, path: str | Path, *, infra: str | None = None, warn: Callable[[str], None] | None = None
    ) -> Cluster:
        """Records the cluster's intent and nothing more: the controller does the rest.

        Idempotent: the same spec again changes nothing, but that groups which were given up are tried anew. `warn` gets
        a sentence for each model that is tight on GPUs.
        Raises SpecError, Refused (over budget, infra not reachable, a model that cannot fit), AlreadyExists (the name
        is taken by a cluster with another spec, or its replicas' names by another cluster).
        """
        now_s = time.time()
        source = supervise.SpecSource.read(Path(path), infra)
        spec = source.spec()
        supervise.check_reachable(spec)
        home = ClusterHome(spec.name)
        ahead = None
        if not home.exists() or home.state().down_s is not None:
            ahead = names_ahead(spec)
            source = source.with_offers()
        with locked(home.dir.with_name(f".{home.name}.lock"), wait_s=30.0) as mine:
            if not mine:
                raise AlreadyExists(f"another `up` of {spec.name!r} has been at it for 30 s")
            if home.exists() and home.state().down_s is None:
                if supervise.SpecSource.saved(home) != source:
                    raise AlreadyExists(
                        f"cluster {spec.name!r} is up with another spec: `areal-sky down {spec.name}` first, "
                        "or give this one another `name`"
                    )
                cluster = cls(home)
                cluster._try_again()
                return cluster
            spec, launch = source.load()
            check_names(spec, launch, ahead)
            refuse(launch.memory)
            for line in launch.memory.warnings if warn else ():
                warn(line)
            supervise.load_policy(spec.scaling, source)
            supervise.load_order(spec.scheduling, source)
            if home.exists():
                home.archive(now_s)
            home.create(source.to_json())
            _first_events(home, launch, now_s)
        return cls(home)

    @classmethod
    def up(cls, path: str | Path, *, infra: str | None = None, progress: Progress | None = None) -> Cluster:
        """Brings a cluster up and returns when every group has its replicas ready.

        `progress` gets each event as it happens. Interrupting the wait changes nothing: the controller goes on.
        Raises what `create` and `wait_ready` raise.
        """
        cluster = cls.create(path, infra=infra)
        supervise.start_controller(cluster.home)
        cluster.wait_ready(progress=progress)
        return cluster

    @classmethod
    def attach(cls, name: str | None = None) -> Cluster:
        """The named cluster, or the only one that is up. Raises NotFound, InvalidInput."""
        return cls(choose_cluster(name))

    def wait_ready(self, *, timeout_s: float = 3600.0, progress: Progress | None = None) -> ClusterState:
        """Returns once every group has as many READY replicas as it wants.

        Raises StateError when the cluster goes down meanwhile, when the controller is gone, after `timeout_s`, or when
        a group is given up because every launch fails.
        """
        return self._follow(_is_ready, "be ready", timeout_s, progress)

    def down(
        self, *, drain_s: float = 30.0, timeout_s: float = 3600.0, progress: Progress | None = None
    ) -> list[Leftover]:
        """Drains (running tasks get `drain_s` seconds), ends every replica and the head, and looks whether any is left.

        Returns what is left or could not be verified: empty when the cluster is verifiably gone.
        """
        if self.request_down(drain_s):
            self._follow(lambda s: s.down_s is not None, "go down", timeout_s, progress)
        return self.leftovers()

    def request_down(self, drain_s: float = 30.0) -> bool:
        """Starts what `down` does and returns at once; False when the cluster is down already."""
        state = self.state()
        if state.down_s is not None:
            return False
        if state.down_requested_s is None:
            self._append(DownRequested("asked for", drain_s))
        supervise.start_controller(self.home)
        return True

    def leftovers(self) -> list[Leftover]:
        """What still runs of a cluster that went down: processes here, or clusters that SkyPilot lists.

        That SkyPilot could not be asked is in the list too.
        """
        spec, launch = self.spec_and_plan()
        if spec.is_local:
            cloud = supervise.local_cloud(self.home, spec, launch)
            return [Leftover(f"process {pid} of {self.name}") for pid in cloud.pids()]
        from areal_sky.run.skyside import still_listed

        return [Leftover(x) for x in still_listed(self.home)]

    # ------------------------------------------------------------ growing and shrinking

    def grow(self, group: str, by: int = 1, market: str | None = None) -> ScalingDecision:
        """Wants `by` more replicas of an elastic group. Returns at once. Raises NotFound, Refused, InvalidInput."""
        return self._resize(group, lambda now: now + by, market)

    def shrink(self, group: str, by: int = 1) -> ScalingDecision:
        """Wants `by` fewer: idle ones go first, each is drained before it ends. Raises NotFound, Refused."""
        return self._resize(group, lambda now: now - by, None)

    def scale(self, group: str, replicas: int, market: str | None = None) -> ScalingDecision:
        """Wants exactly that many replicas. Raises NotFound, Refused, InvalidInput."""
        return self._resize(group, lambda _: replicas, market)

    def _resize(self, name: str, size: Callable[[int], int], market: str | None) -> ScalingDecision:
        state = self.state()
        if state.down_requested_s is not None:
            raise Refused(f"cluster {self.name!r} is going down")
        _, launch = self.spec_and_plan()
        group = next((g for g in launch.groups if g.name == name), None)
        if group is None:
            known = ", ".join(g.name for g in launch.groups)
            raise NotFound(f"cluster {self.name!r} has no group {name!r} (it has {known})")
        wanted = state.groups[name]
        desired = size(wanted.desired)
        _check_size(group, desired, market)
        reason = f"asked for: {wanted.desired} -> {desired}"
        if desired > wanted.desired:
            reason += _price_note(group, state, market)
        if desired != wanted.desired:
            self._append(GroupDesired(name, desired, reason, by="user", market=market))
            supervise.start_controller(self.home)
        return ScalingDecision(group=name, desired=desired, reason=reason)

    # ------------------------------------------------------------ work

    def submit(self, task: Task) -> TaskHandle:
        """Queues a task. Raises Refused when it can never fit, InvalidInput, Unreachable."""
        from areal_sky.task import submit

        return submit(self.home, task)

    # ------------------------------------------------------------ reading

    def state(self) -> ClusterState:
        """The fold of everything that happened so far."""
        return self.home.state()

    def events(self, after_seq: int = 0) -> list[Record]:
        """What happened, in order, after that number."""
        return self.home.records(after_seq)

    def status(self) -> dict[str, Any]:
        """Groups, replicas and load as plain JSON values."""
        from areal_sky.run.report import status

        return status(self.home)

    def why(self, subject: str) -> list[tuple[float, str]]:
        """The story of a task, replica or group as (Unix time, sentence). Raises NotFound."""
        from areal_sky.run.report import why

        return why(self.home, subject)

    def cost(self, by: Breakdown = "group") -> Bill:
        """The bill so far, by group, role (kind of task), replica or task. Works after the cluster's end, too."""
        from areal_sky.run.bills import read_bill

        return read_bill(self.home, by, time.time())

    def spec_and_plan(self) -> tuple[ClusterSpec, LaunchPlan]:
        """What the cluster was brought up with."""
        return supervise.load_plan(self.home)

    # ------------------------------------------------------------

    def _try_again(self) -> None:
        given_up = [g for g in self.state().groups.values() if g.given_up]
        if given_up:
            self._append(*(GroupDesired(g.name, g.desired, "tried anew", by="user") for g in given_up))

    def _append(self, *events: Event) -> None:
        store = self.home.store()
        try:
            store.append(time.time(), *events)
        finally:
            store.close()

    def _follow(
        self, reached: Callable[[ClusterState], bool], what: str, timeout_s: float, progress: Progress | None
    ) -> ClusterState:
        store = self.home.store()
        state = ClusterState()
        until_s = time.monotonic() + timeout_s
        first = True
        try:
            while True:
                records = store.read(state.version)
                state = fold(records, state)
                for record in () if first and progress is None else records:
                    if progress is not None:
                        progress(record)
                first = False
                if reached(state):
                    return state
                if what != "go down" and state.down_requested_s is not None:
                    raise StateError(f"cluster {self.name!r} is going down")
                for g in state.groups.values() if what != "go down" else ():
                    if g.given_up:
                        raise StateError(
                            f"group {g.name} is given up: {g.faults} launches in a row have failed, the last because "
                            f"{g.last_fault}; the same command again tries anew, `areal-sky down {self.name}` ends all"
                        )
                if time.monotonic() > until_s:
                    raise StateError(f"cluster {self.name!r} did not {what} within {timeout_s:.0f} s")
                if not records and not supervise.controller_runs(self.home):
                    raise StateError(
                        f"the controller of {self.name!r} has ended (see {self.home.controller_log}); "
                        "the same command again starts it anew"
                    )
                time.sleep(POLL_S)
        finally:
            store.close()


def _is_ready(state: ClusterState) -> bool:
    ready: dict[str, int] = {}
    for r in state.replicas.values():
        ready[r.group] = ready.get(r.group, 0) + (r.state is ReplicaState.READY)
    return bool(state.groups) and all(ready.get(g.name, 0) >= g.desired for g in state.groups.values())


def _first_events(home: ClusterHome, launch: LaunchPlan, now_s: float) -> None:
    from areal_sky.adapters.store import EventStore

    store = EventStore(home.events_db)
    try:
        store.append_if(now_s, 0, ClusterCreated(launch.cluster), *first_wishes(launch))
    finally:
        store.close()


def _check_size(group: GroupPlan, desired: int, market: str | None) -> None:
    if not group.elastic:
        raise Refused(
            f"group {group.name!r} is fixed (one gang of {group.nodes_per_replica} nodes): "
            "give it min_replicas and max_replicas in the spec to scale it"
        )
    if not group.min_replicas <= desired <= group.max_replicas:
        raise Refused(
            f"group {group.name!r} may have {group.min_replicas} to {group.max_replicas} replicas, not {desired}"
        )
    if market is not None and market not in ("on_demand", "spot"):
        raise InvalidInput(f"market {market!r}: expected on_demand or spot")
    if market is not None and group.market not in (market, "mixed"):
        raise Refused(f"group {group.name!r} is {group.market} in the spec, not {market}")


def _price_note(group: GroupPlan, state: ClusterState, market: str | None) -> str:
    on_demand = sum(1 for r in state.replicas.values() if r.group == group.name and r.market == "on_demand")
    offer = offer_for(group, on_demand, market)
    if offer.price_usd_per_hour is None:
        return ""
    each = offer.price_usd_per_hour * group.nodes_per_replica
    return f", {offer.market} at {format_usd(each)} per replica and hour"
