"""What was launched behind our back on a real (local) Slurm cluster is listed, and ended; what is not ours is left."""

from __future__ import annotations

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.testbed import Testbed, until

LABELS = "labels: {areal-sky-cluster: tb-lost, areal-sky-group: rollout}"


def task(folder: Path, bed: Testbed, name: str, labels: str = "") -> Path:
    file = folder / f"{name}.yaml"
    kind = bed.accelerators.partition(":")[0]
    file.write_text(
        f"resources:\n  infra: {bed.infra}\n  accelerators: {kind}:1\n  cpus: 1\n  {labels}\nrun: sleep 1000\n"
    )
    return file


@pytest.mark.timeout(1200)  # three minutes on two idle cores
def test_a_labelled_cluster_is_an_orphan_and_a_foreign_one_is_not(
    clean_testbed: Testbed, tmp_path: Path
) -> None:
    bed = clean_testbed
    areal_sky = functools.partial(bed.areal_sky, tmp_path / "areal_sky_home")
    behind_our_back = {
        "tb-lost-rollout-0": task(tmp_path, bed, "lost", LABELS), "tb-new-main-0": task(tmp_path, bed, "foreign")
    }  # fmt: skip
    with ThreadPoolExecutor() as pool:
        list(pool.map(bed.launch, *zip(*behind_our_back.items(), strict=True)))

    def shown() -> dict[str, Any]:
        return json.loads(areal_sky("status", "--orphans", "--json"))

    (orphan,) = shown()["orphans"]
    assert (orphan["id"], orphan["where"]) == ("tb-lost-rollout-0", bed.infra.rpartition("/")[0])
    assert "no state here knows cluster tb-lost" in orphan["reason"]

    spec = tmp_path / "new.yaml"
    spec.write_text(f"name: tb-new\ninfra: {bed.infra}\nresources: {{accelerators: {bed.accelerators}}}\n")
    refused = areal_sky("up", str(spec), code=1)
    assert "tb-new-main-0" in refused and "did not make" in refused
    assert areal_sky("status").startswith("no clusters")

    until(lambda: shown()["orphans"][0]["ripe"], 90)
    out = areal_sky("down", "--orphans", "--yes")
    assert "tb-lost-rollout-0: ended by `sky down`" in out
    assert shown()["orphans"] == [] and bed.clusters() == ("tb-new-main-0",)
    assert all(not job["name"].startswith("tb-lost") for job in bed.jobs())
    bed.down("tb-new-main-0")
