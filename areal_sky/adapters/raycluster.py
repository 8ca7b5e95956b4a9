"""Our Ray cluster through real Ray: the only place of the service that imports ray.

Gangs are detached placement groups (adapters/placementgroups.py), runners detached actors named `<gang_id>/<rank>`.
Both live in Ray's namespace `areal_sky`, so a new process finds them
again by name. One thread uses an adapter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from areal_sky.adapters import raytenants
from areal_sky.adapters.placementgroups import PREFIX, PlacementGroups
from areal_sky.adapters.ports import GangPhase, RankExit, RankStart, RayNode
from areal_sky.core.model import Bundle, NodeShape
from areal_sky.core.tenancy import Foreign
from areal_sky.errors import ArealSkyError, Unreachable

NAMESPACE = "areal_sky"
GIB = 2**30
_LABEL = "areal-sky/"

# (gang_id, world size, start) -> arguments of the runner's constructor
RunnerArguments = Callable[[str, int, RankStart], tuple[Any, ...]]


class RayClusterAdapter:
    """The RayCluster port.

    `runner` is the class that becomes the actor of a rank: coroutines `free_port()`, `start(addr, port)`,
    `wait_exit()` and `stop(grace_s)`; `runner_arguments` makes its constructor's arguments.
    """

    def __init__(
        self,
        address: str,
        token: str,
        runner: type,
        runner_arguments: RunnerArguments,
        ray_tmp: Path | None = None,
    ):
        """Connects to the Ray head at `address` (host:port). Raises Unreachable.

        `ray_tmp` is the temporary folder of the node to connect through, where several share this machine: Ray
        would else take any of them, and end this process when that one dies.
        """
        # Said out loud: Ray would otherwise look for a token in the home directory, or make one.
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
        import ray

        self._ray = ray
        self._address = address
        self._runner_arguments = runner_arguments
        with self._translated("connect to Ray"):
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=None if ray_tmp is None else str(ray_tmp),
            )
        self._actor_class = ray.remote(max_restarts=0, max_task_retries=0)(runner)
        self._actors: dict[tuple[str, int], Any] = {}
        self._waits: dict[Any, tuple[str, int]] = {}
        self._begins: dict[Any, tuple[str, int]] = {}
        self._groups = PlacementGroups(ray)
        self._lost: list[tuple[str, RankExit]] = []

    def close(self) -> None:
        """Leaves Ray; gangs and runners stay."""
        self._ray.shutdown()

    def nodes(self) -> tuple[RayNode, ...]:
        """Live nodes of ours (those with our labels)."""
        state = self._state()
        with self._translated("list Ray's nodes"):
            all_nodes = self._ray.nodes()
            available = state.available_resources_per_node()
            draining = state.get_draining_nodes()
        found: list[RayNode] = []
        for n in all_nodes:
            labels = {k[len(_LABEL) :]: v for k, v in n["Labels"].items() if k.startswith(_LABEL)}
            if not n["Alive"] or "group" not in labels:
                continue
            free = available.get(n["NodeID"], {})
            total = n["Resources"]
            accelerator = labels.get("accelerator") or n["Labels"].get("ray.io/accelerator-type")
            shape = NodeShape(
                total.get("GPU", 0.0), total.get("CPU", 0.0), total.get("memory", 0.0) / GIB, accelerator or None
            )
            free_gpus, free_cpus, free_bytes = (free.get(k, 0.0) for k in ("GPU", "CPU", "memory"))
            is_draining = n["NodeID"] in draining
            found.append(
                RayNode(n["NodeID"], labels, shape, free_gpus, free_cpus, free_bytes / GIB, is_draining)
            )
        return tuple(found)

    def foreign(self) -> Foreign:
        with self._translated("look at what others hold"):
            own_job = self._ray.get_runtime_context().get_job_id()
            return raytenants.foreign(self._state()._connect_and_get_accessor(), own_job, PREFIX)

    def gangs(self) -> tuple[str, ...]:
        with self._translated("list placement groups"):
            return self._groups.gangs()

    def reserve(self, gang_id: str, bundles: Sequence[Bundle], node_ids: Sequence[str], apart: bool = False) -> None:
        with self._translated(f"reserve {gang_id}"):
            self._groups.reserve(gang_id, bundles, node_ids, apart)

    def gang_phase(self, gang_id: str) -> GangPhase:
        with self._translated(f"look at {gang_id}"):
            states = self._groups.states(gang_id)
        if states == {"CREATED"}:
            return GangPhase.READY
        return GangPhase.PENDING if states and "REMOVED" not in states else GangPhase.GONE

    def start(self, gang_id: str, bundles: Sequence[Bundle], ranks: Sequence[RankStart]) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        with self._translated(f"look for {gang_id}"):
            groups = self._groups.by_rank(gang_id, [r.rank for r in ranks])
        if None in groups.values():
            raise Unreachable(f"cannot start {gang_id}: its placement group is gone")
        with self._translated(f"start {gang_id}"):
            started = set(self._waits.values())
            for r in ranks:
                if (gang_id, r.rank) in started:
                    continue
                r.envs.setdefault("RAY_ADDRESS", self._address)
                r.envs.update(raytenants.job_environment(gang_id))
                bundle = bundles[r.rank]
                apart = self._groups.is_apart(gang_id)
                self._actors[gang_id, r.rank] = self._actor_class.options(
                    name=f"{gang_id}/{r.rank}",
                    namespace=NAMESPACE,
                    lifetime="detached",
                    get_if_exists=True,
                    num_cpus=bundle.cpus,
                    num_gpus=bundle.gpus,
                    memory=int(bundle.memory_gib * GIB) or None,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(groups[r.rank], 0 if apart else r.rank),
                ).remote(*self._runner_arguments(gang_id, len(ranks), r))
            self._begin(gang_id, groups, [r.rank for r in ranks if (gang_id, r.rank) not in started])

    def adopt(self, gang_id: str, ranks: int) -> bool:
        with self._translated(f"find {gang_id}"):
            groups = self._groups.by_rank(gang_id, range(ranks))
            found: list[int] = []
            for rank in range(ranks):
                if (gang_id, rank) in self._actors:
                    continue
                actor = self._find(gang_id, rank)
                if actor is None or groups[rank] is None:
                    self._lost.append((gang_id, RankExit(rank, None, "its runner is gone")))
                    continue
                self._actors[gang_id, rank] = actor
                found.append(rank)
            whole = all((gang_id, rank) in self._actors for rank in range(ranks))
            if whole:
                self._begin(gang_id, groups, found)
            else:  # it is on its way out: what is left is only watched until it ends
                for rank in found:
                    self._waits[self._actors[gang_id, rank].wait_exit.remote()] = (gang_id, rank)
        return whole

    def starts(self) -> tuple[tuple[str, int, tuple[str, ...]], ...]:
        if not self._begins:
            return ()
        from ray.exceptions import RayError

        found: list[tuple[str, int, tuple[str, ...]]] = []
        with self._translated("look for started ranks"):
            ready, _ = self._ray.wait(list(self._begins), num_returns=len(self._begins), timeout=0)
        for ref in ready:
            key = self._begins.pop(ref)
            with suppress(RayError):  # its end says why
                pid, gpu_ids = self._ray.get(ref, timeout=1)
                if pid:
                    found.append((*key, tuple(gpu_ids)))
        return tuple(found)

    def exits(self) -> tuple[tuple[str, RankExit], ...]:
        found, self._lost = self._lost, []
        if not self._waits:
            return tuple(found)
        from ray.exceptions import ActorUnavailableError, RayError

        with self._translated("look for ended ranks"):
            ready, _ = self._ray.wait(list(self._waits), num_returns=len(self._waits), timeout=0)
        for ref in ready:
            gang_id, rank = self._waits.pop(ref)
            try:
                code, lost = self._ray.get(ref, timeout=1)
                found.append((gang_id, RankExit(rank, code, lost)))
            except ActorUnavailableError:
                actor = self._actors[gang_id, rank]  # Ray is not sure yet: ask again
                self._waits[actor.wait_exit.remote()] = (gang_id, rank)
            except RayError as e:
                found.append((gang_id, RankExit(rank, None, _why_lost(e))))
        return tuple(found)

    def kill(self, gang_id: str, grace_s: float, ranks: Collection[int] | None = None) -> None:
        with self._translated(f"stop {gang_id}"):
            for (gang, rank), actor in list(self._actors.items()):
                if gang == gang_id and (ranks is None or rank in ranks):
                    actor.stop.remote(grace_s)

    def release(self, gang_id: str) -> None:
        self._forget(gang_id, None)
        with self._translated(f"release {gang_id}"):
            self._groups.remove(gang_id)  # ends the actors in it

    def release_ranks(self, gang_id: str, ranks: Collection[int]) -> None:
        self._forget(gang_id, ranks)
        with self._translated(f"release ranks of {gang_id}"):
            self._groups.remove(gang_id, ranks)

    def _forget(self, gang_id: str, ranks: Collection[int] | None) -> None:
        def ours(key: tuple[str, int]) -> bool:
            return key[0] == gang_id and (ranks is None or key[1] in ranks)

        self._actors = {key: actor for key, actor in self._actors.items() if not ours(key)}
        self._waits = {ref: key for ref, key in self._waits.items() if not ours(key)}
        self._begins = {ref: key for ref, key in self._begins.items() if not ours(key)}

    def drain(self, node_id: str, reason: str, deadline_s: float) -> None:
        """Tells Ray to place nothing more on the node. Ray ends a drained raylet as soon as it is idle."""
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        preemption = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        with self._translated("drain a node"):
            GcsClient(address=self._address).drain_node(node_id, preemption, reason, int(deadline_s * 1000))

    def _begin(self, gang_id: str, groups: Mapping[int, Any], ranks: Sequence[int]) -> None:
        """Tells the runners to start. Harmless when repeated, so an adopted gang is told again: the process that
        made its runners may have died before it told them.
        """
        from ray.util import placement_group_table

        if not ranks:
            return
        where = placement_group_table(groups[0])["bundles_to_node_id"]
        addresses = {n["NodeID"]: n["NodeManagerAddress"] for n in self._ray.nodes()}
        # The port is a future that Ray hands to the ranks: nobody waits here.
        port = self._actors[gang_id, 0].free_port.remote()
        for rank in ranks:
            actor = self._actors[gang_id, rank]
            self._begins[actor.start.remote(addresses.get(where[0], "127.0.0.1"), port)] = (gang_id, rank)
            self._waits[actor.wait_exit.remote()] = (gang_id, rank)

    def _state(self) -> Any:
        from ray._private.state import state

        return state

    def _find(self, gang_id: str, rank: int) -> Any:
        try:
            return self._ray.get_actor(f"{gang_id}/{rank}", namespace=NAMESPACE)
        except ValueError:
            return None

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except ArealSkyError:
            raise
        except Exception as e:
            # Ray raises RayError, RpcError, ConnectionError, RuntimeError and more for the same thing.
            lines = str(e).strip().splitlines() or [type(e).__name__]
            raise Unreachable(f"cannot {what} (Ray at {self._address}): {lines[0][:300]}") from e


def _why_lost(e: Exception) -> str:
    """Ray's many lines about a dead actor, as one."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    telling = next((line for line in lines if "dead because" in line or "node" in line.lower()), None)
    return (telling or (lines[0] if lines else type(e).__name__))[:200]
