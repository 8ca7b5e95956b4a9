"""What was launched behind our back on a real (local) Slurm cluster is listed, and ended; what is not ours is left."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.testbed import ROOT, Testbed, until

LABELS = "labels: {areal-sky-cluster: tb-lost, areal-sky-group: rollout}"


def areal_sky(env: dict[str, str], *args: str, code: int = 0) -> str:
    command = [str(ROOT / ".venv/bin/areal-sky"), *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def task(folder: Path, bed: Testbed, name: str, labels: str = "") -> Path:
    file = folder / f"{name}.yaml"
    kind = bed.accelerators.partition(":")[0]
    file.write_text(
        f"resources:\n  infra: {bed.infra}\n  accelerators: {kind}:1\n  cpus: 1\n  {labels}\nrun: sleep 1000\n"
    )
    return file


@pytest.mark.timeout(1200)  # three minutes on two idle cores
def test_a_labelled_cluster_is_an_orphan_and_a_foreign_one_is_not(
    clean_testbed: Testbed, sky_env: dict[str, str], tmp_path: Path
) -> None:
    bed = clean_testbed
    behind_our_back = {
        "tb-lost-rollout-0": task(tmp_path, bed, "lost", LABELS), "tb-new-main-0": task(tmp_path, bed, "foreign")
    }  # fmt: skip
    with ThreadPoolExecutor() as pool:
        list(pool.map(bed.launch, *zip(*behind_our_back.items(), strict=True)))

    def shown() -> dict[str, Any]:
        return json.loads(areal_sky(sky_env, "status", "--orphans", "--json"))

    (orphan,) = shown()["orphans"]
    assert (orphan["id"], orphan["where"]) == ("tb-lost-rollout-0", bed.infra.rpartition("/")[0])
    assert "no state here knows cluster tb-lost" in orphan["reason"]

    spec = tmp_path / "new.yaml"
    spec.write_text(f"name: tb-new\ninfra: {bed.infra}\nresources: {{accelerators: {bed.accelerators}}}\n")
    command = [str(ROOT / ".venv/bin/areal-sky"), "up", str(spec)]
    refused = subprocess.run(command, env=sky_env, capture_output=True, text=True, timeout=240, check=False)
    assert refused.returncode == 1 and "tb-new-main-0" in refused.stderr and "did not make" in refused.stderr
    assert areal_sky(sky_env, "status").startswith("no clusters")

    until(lambda: shown()["orphans"][0]["ripe"], 90)
    out = areal_sky(sky_env, "down", "--orphans", "--yes")
    assert "tb-lost-rollout-0: ended by `sky down`" in out
    assert shown()["orphans"] == [] and bed.clusters() == ("tb-new-main-0",)
    assert all(not job["name"].startswith("tb-lost") for job in bed.jobs())
    bed.down("tb-new-main-0")
