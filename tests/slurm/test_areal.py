"""AReaL's own way of starting, the plain SkyPilot task of examples/05, by `areal-sky up` on real machines.

Only what this testbed cannot have is changed: the GPU's name, the container image, the bucket. Its `setup` finds a
checkout, and that checkout's training script is a stand-in that says what AReaL would find in Ray.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from areal_sky.home import ClusterHome
from tests.testbed.testbed import ROOT, Testbed, until

EXAMPLE = ROOT / "examples/05-areal-ray-cluster.yaml"
TRAINER = """\
import os, sys, ray
from ray.util.placement_group import placement_group
ray.init()
pg = placement_group([{"GPU": 8, "CPU": 1}] * 2, strategy="STRICT_SPREAD")  # AReaL's: one bundle per machine
ray.get(pg.ready(), timeout=60)
gpus, letters = int(ray.cluster_resources()["GPU"]), len(os.environ["WANDB_API_KEY"])
print("AREAL", gpus, "GPUs;", letters, "letters;", *sys.argv[1:])
"""


@pytest.fixture
def checkout(clean_testbed: Testbed) -> Iterator[Path]:
    """~/AReaL on every machine."""
    script = clean_testbed.shared / "AReaL/examples/math/gsm8k_rl.py"
    script.parent.mkdir(parents=True)
    script.write_text(TRAINER)
    yield script
    script.unlink()


def example(bed: Testbed) -> str:
    spec = yaml.safe_load(EXAMPLE.read_text())
    spec["resources"] = {"accelerators": bed.accelerators, "cpus": "32+", "memory": "256+"}
    del spec["file_mounts"]
    return yaml.safe_dump(spec, sort_keys=False)


@pytest.mark.timeout(1800)
def test_areals_own_task_comes_up_unchanged(
    clean_testbed: Testbed, checkout: Path, sky_env: dict[str, str], tmp_path: Path
) -> None:
    bed, spec = clean_testbed, tmp_path / "areal.yaml"
    spec.write_text(example(bed))
    env = sky_env | {"WANDB_API_KEY": "w" * 40}

    def areal_sky(*args: str) -> str:
        done = subprocess.run(
            ["areal-sky", *args], env=env, capture_output=True, text=True, timeout=900, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, f"{args}: {done.stdout}{done.stderr}"
        return done.stdout

    try:
        areal_sky("up", str(spec))  # no `infra`: SkyPilot chooses among what is enabled, Slurm here
        log = until(lambda: "AREAL " in (t := bed.sky("logs", "areal-grpo-main-0", "1", "--no-follow")) and t, 180, 2)
        said = next(line for line in log.splitlines() if "AREAL " in line)
        assert "AREAL 16 GPUs; 40 letters; --config examples/math/gsm8k_grpo.yaml scheduler.type=ray" in said
        assert "cluster.n_nodes=2 cluster.n_gpus_per_node=8" in said
        assert ClusterHome("areal-grpo", Path(env["AREAL_SKY_HOME"]) / "clusters/areal-grpo").state().replicas
    finally:
        areal_sky("down", "areal-grpo", "--drain", "1s")
