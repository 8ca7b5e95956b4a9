"""`areal-sky up` on real SkyPilot, against `sky launch` of the same rendered YAMLs by hand; and nodes that are lost.

Runs on the Slurm testbed of tests/testbed: a head, and groups of one whole node each. "Up" is when the head lists every
node, for both ways. They alternate in one run, so that a busy machine is busy for both; all clusters are new ones.
By hand is what head.yaml says: launch the head, take its address, launch the group; each with `-d`, so that nothing is
waited for that is not needed. The address comes from Slurm at once, quicker than a person could read it in the log.

A node is lost in two ways: reclaimed, when Slurm kills (-9) all of its job, and the network says at once that nobody
is there; and by a power cut, which the network only tells by silence.
"""

from __future__ import annotations

import functools
import json
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from areal_sky.core.model import Bundle
from areal_sky.core.taskmodel import TaskSpec
from areal_sky.errors import ArealSkyError
from areal_sky.home import ClusterHome
from tests.testbed import testbed as beds
from tests.testbed.testbed import Testbed, until

ROUNDS = 3
GROUPS = 4
UP_S = 900.0  # more than this is a failure; it takes a tenth on a machine of its own
# The head fills its node, so that a power cut of another node does not hit it.
SPEC = """\
name: {name}
infra: {infra}
head: {{resources: {{cpus: 60}}}}
resources: {{accelerators: "{accelerators}", cpus: 8}}
node_groups:
"""


def why_not() -> str | None:
    """Why this cannot be measured here; None when it can."""
    return beds.why_not()


def measure() -> dict[str, float]:
    with beds.running(nodes=GROUPS + 1) as bed, tempfile.TemporaryDirectory(prefix="skybench", dir="/tmp") as scratch:
        warm_up(bed)
        bare, ours, four, four_bare = [], [], [], []
        reclaim: list[float] = []
        power_cut: list[float] = []
        for n in range(ROUNDS):
            folder = Path(scratch) / str(n)
            bare.append(by_hand_s(bed, folder / "hand", 1))
            four_bare.append(by_hand_s(bed, folder / "hand4", GROUPS))
            ours.append(up_s(bed, folder / "one", 1, lambda c: reclaim.append(requeue_s(bed, c, kill_job))))
            four.append(up_s(bed, folder / "four", GROUPS, lambda c: power_cut.append(requeue_s(bed, c, cut_power))))
    return {
        "sky_launch_s": statistics.median(bare),
        "up_s": statistics.median(ours),
        "four_groups_s": statistics.median(four),
        "ratio_vs_sky_launch": statistics.median(o / b for o, b in zip(ours, bare, strict=True)),
        "four_groups_ratio": statistics.median(f / o for f, o in zip(four, ours, strict=True)),
        # The same by hand: what SkyPilot itself makes of four at once on this machine.
        "four_sky_launches_ratio": statistics.median(f / o for f, o in zip(four_bare, bare, strict=True)),
        "four_ratio_vs_sky_launch": statistics.median(f / o for f, o in zip(four, four_bare, strict=True)),
        "reclaim_to_requeue_s": statistics.median(reclaim),
        "power_cut_to_requeue_s": statistics.median(power_cut),
    }


def warm_up(bed: Testbed) -> None:
    """The first launch of a new API server starts its workers."""
    bed.launch("bench-warm", "--infra", bed.infra, "--cpus", "2", "true")
    bed.down("bench-warm")


def spec_file(bed: Testbed, folder: Path, name: str, groups: int) -> Path:
    folder.mkdir(parents=True)
    spec = folder / f"{name}.yaml"
    text = SPEC.format(name=name, infra=bed.infra, accelerators=bed.accelerators)
    spec.write_text(text + "".join(f"  g{n}: {{replicas: 1}}\n" for n in range(groups)))
    return spec


def by_hand_s(bed: Testbed, folder: Path, groups: int) -> float:
    """`sky launch` of the rendered head.yaml, then of all groups at once, until the head lists every node."""
    spec, out = spec_file(bed, folder, "hand", groups), folder / "out"
    bed.areal_sky(folder / "home", "render", str(spec), "--out", str(out))
    tokens = {right: secrets.token_hex(32) for right in ("read", "submit", "operate", "node", "ray")}
    given = bed.env(
        AREAL_SKY_TOKENS=json.dumps(tokens), AREAL_SKY_NODE_TOKEN=tokens["node"], AREAL_SKY_RAY_TOKEN=tokens["ray"]
    )
    launch = functools.partial(bed.launch, timeout_s=UP_S, env=given, folder=out)
    began_s = time.perf_counter()
    try:
        launch("hand-head-0", "head.yaml", "--secret", "AREAL_SKY_TOKENS")
        head = bed.node_of("hand-head-0")
        address = bed.on(head, "hostname", "-I").split()[0]
        join = ("--env", f"AREAL_SKY_HEAD_IP={address}", *secret("NODE"), *secret("RAY"))
        with ThreadPoolExecutor(groups) as pool:
            for done in [pool.submit(launch, f"hand-g{n}-0", f"g{n}.yaml", *join) for n in range(groups)]:
                done.result()
        until(lambda: nodes_seen(bed, head, tokens["read"]) == groups + 1, UP_S)
        return time.perf_counter() - began_s
    finally:
        bed.clear()


def secret(whose: str) -> tuple[str, str]:
    return "--secret", f"AREAL_SKY_{whose}_TOKEN"


def nodes_seen(bed: Testbed, head: str, token: str) -> int:
    """How many nodes the gateway on that host lists; 0 while it does not answer."""
    header = bed.shared / "header"  # a file, so that no argv holds the token
    header.touch(mode=0o600)
    header.write_text(f"Authorization: Bearer {token}")
    try:
        text = bed.on(head, "curl", "-fsS", "-m", "5", "-H", f"@{header}", "http://127.0.0.1:8790/v1/view")
        return len(json.loads(text)["nodes"])
    except AssertionError:
        return 0
    finally:
        header.unlink()


def up_s(bed: Testbed, folder: Path, groups: int, then: Callable[[ClusterHome], None]) -> float:
    """`areal-sky up` until it says ready; `then` is done to the cluster before it is taken down."""
    name = f"ours{groups}"
    spec = spec_file(bed, folder, name, groups)
    began_s = time.perf_counter()
    try:
        bed.areal_sky(folder / "home", "up", str(spec), timeout_s=UP_S)
        took_s = time.perf_counter() - began_s
        then(ClusterHome(name, folder / "home/clusters" / name))
        return took_s
    finally:
        bed.areal_sky(folder / "home", "down", name, "--drain", "0s", timeout_s=UP_S)
        bed.clear()


def requeue_s(bed: Testbed, cluster: ClusterHome, lose: Callable[[Testbed, str], None]) -> float:
    """From the loss of group g0's node until its running task waits again at its place."""
    with cluster.gateway("operate") as head:
        spec = TaskSpec(kind="rollout", command="sleep 600", bundle=Bundle(gpus=1, cpus=1), group="g0")
        task_id = head.submit(spec)["task_id"]
        until(lambda: head.task(task_id)["state"] == "RUNNING", 120)
        began_s = time.perf_counter()
        lose(bed, f"{cluster.name}-g0")

        def waits() -> bool:
            try:
                task = head.task(task_id)
            except ArealSkyError:
                return False
            return task["state"] == "QUEUED" or task["attempt"] > 1

        until(waits, 120, every_s=0.02)
        return time.perf_counter() - began_s


def kill_job(bed: Testbed, cluster: str) -> None:
    bed.scancel(cluster, "--signal=KILL", "--full")


def cut_power(bed: Testbed, cluster: str) -> None:
    bed.crash(bed.node_of(cluster))
