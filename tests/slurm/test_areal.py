"""AReaL's own way of starting, the plain SkyPilot task of examples/05, by `areal-sky up` on real machines.

Only what this testbed cannot have is changed: the GPU's name, the container image, the bucket. Git is told of a mirror,
where the training script is a stand-in that says what AReaL would find in Ray.
"""

from __future__ import annotations

import subprocess
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
def mirror(clean_testbed: Testbed) -> dict[str, str]:
    """What tells git to clone AReaL from a repository on the machines' shared disk."""
    repository = clean_testbed.shared / "mirror/AReaL"
    script = repository / "examples/math/gsm8k_rl.py"
    if not repository.exists():
        script.parent.mkdir(parents=True)
        script.write_text(TRAINER)
        git = ["git", "-C", str(repository), "-c", "user.name=test", "-c", "user.email=test@example.org"]
        for command in ("init -q", "add -A", "commit -q -m stand-in", "tag v1.0.2"):
            subprocess.run([*git, *command.split()], check=True)
    return {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{repository}.insteadOf",
        "GIT_CONFIG_VALUE_0": "https://github.com/inclusionAI/AReaL",
    }


def example(bed: Testbed, envs: dict[str, str]) -> str:
    spec = yaml.safe_load(EXAMPLE.read_text())
    spec["resources"] = {"accelerators": bed.accelerators, "cpus": "32+", "memory": "256+"}
    del spec["file_mounts"]
    spec["envs"] |= envs
    return yaml.safe_dump(spec, sort_keys=False)


@pytest.mark.timeout(1800)
def test_areals_own_task_comes_up_unchanged(
    clean_testbed: Testbed, mirror: dict[str, str], tmp_path: Path
) -> None:
    bed, spec = clean_testbed, tmp_path / "areal.yaml"
    spec.write_text(example(bed, mirror))
    home = tmp_path / "areal_sky_home"

    def areal_sky(*args: str) -> str:
        return bed.areal_sky(home, *args, WANDB_API_KEY="w" * 40)

    try:
        areal_sky("up", str(spec))  # no `infra`: SkyPilot chooses among what is enabled, Slurm here
        log = until(lambda: "AREAL " in (t := bed.sky("logs", "areal-grpo-main-0", "1", "--no-follow")) and t, 180, 2)
        said = next(line for line in log.splitlines() if "AREAL " in line)
        assert "AREAL 16 GPUs; 40 letters; --config examples/math/gsm8k_grpo.yaml scheduler.type=ray" in said
        assert "cluster.n_nodes=2 cluster.n_gpus_per_node=8" in said
        assert ClusterHome("areal-grpo", home / "clusters/areal-grpo").state().replicas
    finally:
        areal_sky("down", "areal-grpo", "--drain", "1s")
