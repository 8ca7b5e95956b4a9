"""The admission engine at scale: 10,000 nodes x 8 GPUs of three types, 1,000,000 waiting tasks of 200 shapes.

A decision is one task placed. Sustained: the cluster is full, tasks end in random order, and each end is told and
decided upon by itself; 200,000 placements, all the work of ends, reservations and searches for victims included. One
process, one core, its own CPU time (others on the machine do not count). Collections of cyclic garbage are off while
it is measured, as nothing here makes any; the time of all else counts.

Peers in the same run: Ray makes placement groups ready, with the bundles of the first of the same tasks (GPUs, CPUs and
memory, packed) on one bare local node that says that it has enough for all of them. GPUs are a plain amount there: told
of hundreds of devices on one node, as no real one has, Ray is 3 to 4 times as slow. slurmctld, where a cluster answers,
starts the tasks of a job array.
"""

from __future__ import annotations

import gc
import json
import math
import os
import random
import secrets
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from areal_sky.adapters.processes import kill_marked, rss_mib
from areal_sky.core.admission import Admission, Entry, Place
from areal_sky.core.gangs import Ask
from areal_sky.core.model import Bundle, NodeShape
from areal_sky.core.nodeenv import NODE_MARK
from areal_sky.core.room import empty_room
from benchmarks.local_up import BIN, clean_env, free_port, run, scratch
from tests.testbed import testbed as beds

NODES = 10_000
TASKS = 1_000_000
SHAPES = 200
DECISIONS = 200_000
TYPES = ("H100", "A100-80GB", "L40S")
GROUPS = 200  # placement groups asked of Ray
ARRAY = 1000  # tasks asked of Slurm, at most MaxArraySize - 1
MOST_SLURM_S = 300.0
RAY = """\
import json, sys, time, ray
from ray.util.placement_group import placement_group
ray.init(address=sys.argv[1], log_to_driver=False)
wanted = json.load(sys.stdin)
ray.get(placement_group([{"CPU": 0.001}]).ready())
started = time.perf_counter()
groups = [placement_group(bundles, strategy="PACK") for bundles in wanted]
ready = [g.wait(60) for g in groups]
assert all(ready), f"{ready.count(False)} groups are not ready"
print(len(wanted) / (time.perf_counter() - started))
"""


def measure() -> dict[str, float | None]:
    ours = decisions()
    ray_per_s, slurm_per_s = ray_groups_per_s(), slurm_starts_per_s()
    return {
        "decisions_per_s": ours.per_s,
        "p99_decision_ms": p99_decision_ms(),
        "bytes_per_waiting_task": ours.bytes_per_task,
        "ratio_vs_ray_pg": ours.per_s / ray_per_s,
        "ratio_vs_slurmctld": None if slurm_per_s is None else ours.per_s / slurm_per_s,
        "ray_pg_per_s": ray_per_s,
        "submits_per_s": ours.submits_per_s,
    }


@dataclass(frozen=True)
class Ours:
    per_s: float
    bytes_per_task: float
    submits_per_s: float


def decisions(nodes: int = NODES, tasks: int = TASKS, count: int = DECISIONS) -> Ours:
    admission, rng = full_of_nodes(nodes), random.Random(1)
    entries = Arrivals(rng)
    before_mib = rss_mib(os.getpid())
    started = time.process_time()
    for _ in range(tasks):
        admission.submit(entries.next())
    submit_s = time.process_time() - started
    bytes_per_task = (rss_mib(os.getpid()) - before_mib) * 2**20 / tasks
    now_s = entries.now_s
    running = [d.task_id for d in admission.decide(now_s) if isinstance(d, Place)]
    gc.collect()
    gc.disable()
    placed, started = 0, time.process_time()
    try:
        while placed < count:
            now_s += 20e-6  # about as long as a decision may take
            i = int(rng.random() * len(running))
            running[i], running[-1] = running[-1], running[i]
            admission.ended(running.pop(), now_s)
            for d in admission.decide(now_s):
                if isinstance(d, Place):
                    running.append(d.task_id)
                    placed += 1
    finally:
        gc.enable()
    return Ours(placed / (time.process_time() - started), bytes_per_task, tasks / submit_s)


def p99_decision_ms(nodes: int = NODES, waiting: int = 100_000, rounds: int = 5_000) -> float:
    """One submit and the decision upon it, with so many waiting; every second time a task has ended just before."""
    admission, rng = full_of_nodes(nodes), random.Random(2)
    entries = Arrivals(rng)
    for _ in range(waiting):
        admission.submit(entries.next())
    running = [d.task_id for d in admission.decide(entries.now_s) if isinstance(d, Place)]
    gc.collect()
    gc.freeze()
    times_ms: list[float] = []
    for n in range(rounds):
        entry = entries.next(later_s=0.02)
        if n % 2:
            admission.ended(running.pop(rng.randrange(len(running))), entry.submitted_s)
        started = time.process_time()
        admission.submit(entry)
        decided = admission.decide(entry.submitted_s)
        times_ms.append((time.process_time() - started) * 1000)
        running += [d.task_id for d in decided if isinstance(d, Place)]
    gc.unfreeze()
    return statistics.quantiles(times_ms, n=100)[98]


def full_of_nodes(nodes: int) -> Admission:
    admission = Admission()
    for i in range(nodes):
        shape = NodeShape(8, 128, 1024, TYPES[i % 3], 80)
        admission.set_node(empty_room(f"n{i:05d}", f"g{i % 3}", shape, f"n{i:05d}"))
    return admission


class Arrivals:
    """Tasks of 200 shapes: GPU shares to 8 GPUs, one in seven a gang of 2 to 8, some bound to one type or to two in
    order, CPUs and memory in proportion to the GPUs or above it. Some are popular and most are not.
    """

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._shapes: list[tuple[Ask, str, float | None]] = []
        while len(self._shapes) < SHAPES:
            gpus = rng.choice((0.25, 0.5, 1, 1, 1, 1, 2, 2, 4, 8))
            bundle = Bundle(gpus, max(1, gpus * rng.choice((8, 12, 16))), max(8, gpus * rng.choice((64, 96, 128))))
            count = rng.choice((2, 4, 8)) if gpus >= 1 and rng.random() < 0.2 else 1
            types = rng.choice(((), (), TYPES[:1], TYPES[1:2], TYPES[2:], TYPES[:2]))
            shape = (
                Ask(bundle, count, None, types, ordered=len(types) > 1),
                rng.choice(("train", "rollout", "rollout", "eval")),
                rng.choice((None, 600.0, 3600.0, 40_000.0)),
            )
            if all(shape[0] != ask for ask, _, _ in self._shapes):
                self._shapes.append(shape)
        self._popular = [1 / (n + 10) for n in range(SHAPES)]
        self._drawn: list[int] = []
        self._number = 0
        self.now_s = 0.0

    def next(self, later_s: float = 1e-3) -> Entry:
        if not self._drawn:
            self._drawn = self._rng.choices(range(SHAPES), self._popular, k=1000)
        ask, kind, estimate_s = self._shapes[self._drawn.pop()]
        self._number += 1
        self.now_s += later_s
        n = self._number
        return Entry(
            f"t{n}", n, ask, self.now_s, float(n % 10), 1.5 if n % 3 == 0 else 1.0, kind, None, None, estimate_s,
            preemptible=kind != "train", min_runtime_s=60.0,
        )  # fmt: skip


# ---------------------------------------------------------------- peers


def ray_groups_per_s() -> float:
    """Placement groups like our tasks that a bare local Ray makes ready per second."""
    wanted = groups_like_ours()
    enough = {name: math.ceil(sum(b[name] for g in wanted for b in g)) + 1 for name in ("CPU", "gpu", "memory")}
    with scratch() as folder:
        mark = f"bench-groups/{secrets.token_hex(4)}"
        env = {**clean_env(), NODE_MARK: mark, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        port = free_port()
        env["RAY_prestart_worker_first_driver"] = "0"  # it would start a process for each of the CPUs
        head = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}"]
        gpus = json.dumps({"gpu": enough["gpu"]})
        has = [f"--num-cpus={enough['CPU']}", f"--resources={gpus}", f"--memory={enough['memory']}"]
        common = ["--disable-usage-stats", "--node-ip-address=127.0.0.1", "--object-store-memory=100000000"]
        try:
            run([str(BIN / "ray"), "start", *head, *has, *common], env)
            argv = [sys.executable, "-c", RAY, f"127.0.0.1:{port}"]
            given = json.dumps(wanted)
            done = subprocess.run(argv, env=env, input=given, capture_output=True, text=True, check=True)
            return float(done.stdout.split()[-1])
        finally:
            kill_marked(mark)


def groups_like_ours() -> list[list[dict[str, float]]]:
    """The bundles of the first tasks of the same arrivals, as Ray wants them: memory in bytes, whole ones."""
    entries = Arrivals(random.Random(1))
    asks = [entries.next().ask for _ in range(GROUPS)]
    return [
        [{"gpu": a.bundle.gpus, "CPU": a.bundle.cpus, "memory": int(a.bundle.memory_gib * 2**30)}] * a.count
        for a in asks
    ]


def slurm_starts_per_s() -> float | None:
    """Tasks of a job array that slurmctld has started and ended per second; None where there is no Slurm.

    On the cluster that answers here, else on one node of tests/testbed.
    """
    if shutil.which("sbatch") is not None and subprocess.run(["sinfo"], capture_output=True).returncode == 0:
        return _array_per_s(lambda argv: subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
    if reason := beds.why_not():
        print(f"ratio_vs_slurmctld: null: no Slurm cluster answers `sinfo` here, and {reason}", file=sys.stderr)
        return None
    with beds.running(nodes=4) as bed:
        return _array_per_s(lambda argv: bed.on("login", *argv))


def _array_per_s(run_on_slurm: Callable[[list[str]], str]) -> float:
    """Until the queue has none of them any more. Each takes next to nothing, so that a node runs many at once."""
    started = time.perf_counter()
    job = run_on_slurm(
        ["sbatch", "--parsable", f"--array=1-{ARRAY}", "--mem=1", "--output=/dev/null", "--wrap=true"]
    )
    beds.until(lambda: not run_on_slurm(["squeue", "-h", "-j", job.strip()]).strip(), MOST_SLURM_S, every_s=0.2)
    return ARRAY / (time.perf_counter() - started)
