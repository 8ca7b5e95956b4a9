"""The controller's loop: one tick() over 100 and 1,000 replicas on the shipped fakes, and what an idle one weighs.

The tick runs on a real event store on disk. Replicas are busy, twenty gangs wait that nothing can hold, and the clock
moves a second per tick: the controller looks at everything and has nothing to change, as it does nearly always.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from areal_sky.adapters.fakes import FakeClock, FakeCloud, FakeHead
from areal_sky.adapters.processes import rss_mib
from areal_sky.adapters.store import EventStore
from areal_sky.core.events import ClusterCreated, ControllerStarted, GroupDesired
from areal_sky.core.model import Bundle, GangDemand, GroupPlan, LaunchPlan, NodeShape, Offer, replica_name
from areal_sky.core.reconcile import Patience
from areal_sky.run.controller import Controller, first_wishes
from areal_sky.run.plugins import scaling_policy
from areal_sky.spec.cluster import ClusterSpec, NodeGroupSpec, ResourcesSpec
from benchmarks.local_up import BIN, SPEC, clean_env, run, scratch

REPLICAS = 100
MANY = 1000  # of 8 GPUs each
TICKS = 300


def measure() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        times_ms = sorted(tick_ms(Path(folder), REPLICAS))
    with tempfile.TemporaryDirectory() as folder:
        many_ms = tick_ms(Path(folder), MANY, ticks=TICKS // 5)
    return {
        "median_ms": statistics.median(times_ms),
        "p95_ms": times_ms[int(0.95 * len(times_ms))],
        "median_1000_replicas_ms": statistics.median(many_ms),
        "idle_rss_mib": idle_rss_mib(),
    }


def tick_ms(folder: Path, replicas: int, ticks: int = TICKS) -> list[float]:
    clock = FakeClock()
    cloud = FakeCloud(clock)
    plan, spec = fleet(replicas)
    names = [replica_name("bench", "rollout", slot) for slot in range(replicas)]
    head = FakeHead(
        cloud,
        running=dict.fromkeys(names, 2),
        utilization=dict.fromkeys(names, 0.85),
        demand=tuple(
            GangDemand(f"t{n}", "rollout", 64, Bundle(gpus=8), (), score=float(n), waiting_s=60.0) for n in range(20)
        ),
    )
    store = EventStore(folder / "events.db")
    full = GroupDesired("rollout", replicas, "for this benchmark", by="user")
    store.append(clock.now(), ClusterCreated("bench"), *first_wishes(plan), full)
    controller = Controller(
        spec=spec, plan=plan, store=store, cloud=cloud, head=head, clock=clock,
        policy=scaling_policy(spec.scaling), patience=Patience(),
    )  # fmt: skip
    for _ in range(10):
        controller.tick()
        clock.advance(1)
    ready = [r.name for r in controller.state.replicas.values() if r.state == "READY" and r.group == "rollout"]
    if len(ready) != replicas:
        raise SystemExit(f"only {len(ready)} of {replicas} replicas came up on the fakes")
    times: list[float] = []
    for _ in range(ticks):
        clock.advance(1)
        started = time.perf_counter()
        controller.tick()
        times.append((time.perf_counter() - started) * 1000)
    store.close()
    return times


def fleet(replicas: int) -> tuple[LaunchPlan, ClusterSpec]:
    """One elastic group of at most that many replicas."""
    shape = NodeShape(gpus=8, cpus=96, memory_gib=1000, accelerator="H100", gpu_memory_gib=80)
    offer = Offer("aws", "us-east-1", None, "p5.48xlarge", shape, "on_demand", 98.32, "made up for this benchmark")
    rollout = GroupPlan("rollout", True, 1, replicas, 1, "on_demand", 0, shape, offer, on_demand_offer=offer)
    head = GroupPlan("head", False, 1, 1, 1, "on_demand", 0, NodeShape(cpus=4), offer, on_demand_offer=offer)
    group = NodeGroupSpec(
        name="rollout", resources=ResourcesSpec(), elastic=True, min_replicas=replicas, max_replicas=replicas,
        nodes_per_replica=1, market="on_demand",
    )  # fmt: skip
    spec = ClusterSpec(name="bench", infra=None, head=ResourcesSpec(), groups=(group,))
    return LaunchPlan("bench", None, head, (rollout,)), spec


def idle_rss_mib(settle_s: float = 10.0) -> float:
    """Resident memory of the controller of a real local cluster that has had nothing to do for `settle_s`."""
    with scratch() as folder:
        (folder / "bench.yaml").write_text(SPEC)
        env = {**clean_env(), "AREAL_SKY_HOME": str(folder / "home")}
        areal_sky = str(BIN / "areal-sky")
        try:
            run([areal_sky, "up", str(folder / "bench.yaml")], env)
            time.sleep(settle_s)
            store = EventStore(folder / "home/clusters/bench/events.db")
            pids = [r.event.pid for r in store.read() if isinstance(r.event, ControllerStarted)]
            store.close()
            return rss_mib(pids[-1])
        finally:
            run([areal_sky, "down", "bench", "--drain", "0s"], env)
