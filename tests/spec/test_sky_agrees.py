"""Where SkyPilot is installed: it and we read the same form as the same accelerators, and know the same keys.

It runs in a process of its own with an empty home, whose catalog is made of our table, so that it needs no network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import yaml

from areal_sky.spec import load_text
from areal_sky.spec.accelerators import find, known_names, matching
from areal_sky.spec.skypilot_keys import RESOURCES_KEYS, TASK_KEYS, TASK_KEYS_READ, TASK_KEYS_REFUSED
from tests.spec.test_accelerators import FORMS

pytestmark = pytest.mark.sky

BY_MEMORY = ["80GB+:8", "80GB:8", "24gb", "nvidia:80GB", "AMD:192GB+:8"]

ASK_SKY = """
import json, sys
import sky
from sky.utils import accelerator_registry, schemas

def canonical(name):
    return accelerator_registry.canonicalize_accelerator_name(name, None)

told = {"forms": {}, "keys": {}}
for form, config in json.load(sys.stdin).items():
    found = sky.Resources.from_yaml_config(config)
    asks = [[canonical(name), count] for r in found for name, count in r.accelerators.items()]
    told["forms"][form] = [isinstance(found, list), asks]
task = schemas.get_task_schema()["properties"]
resources = schemas.get_resources_schema()["properties"]
told["keys"] = {"task": sorted(task), "resources": sorted(resources)}
print("TOLD" + json.dumps(told))
"""


@pytest.fixture(scope="module")
def sky_says(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("home")
    common = home / ".sky" / "catalogs" / "v8" / "common"
    common.mkdir(parents=True)
    known = [find(n) for n in known_names()]
    rows = [a for a in known if a is not None and a.memory_gib is not None]
    header = "AcceleratorName,Clouds\n"
    (common / "accelerators.csv").write_text(header + "".join(f"{a.name},['AWS']\n" for a in rows))
    memory = "".join(f"{a.name},{a.memory_gib:g},{a.vendor}\n" for a in rows)
    (common / "metadata.csv").write_text("GPU,MemoryGB,Manufacturer\n" + memory)
    forms = {f: {"accelerators": yaml.safe_load(f)} for f in [*(form for form, _, _ in FORMS), *BY_MEMORY]}
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ASK_SKY], input=json.dumps(forms), capture_output=True, text=True, timeout=120,
        env=environment, cwd=home, check=False,
    )  # fmt: skip
    if "ModuleNotFoundError: No module named 'sky'" in done.stderr:
        pytest.skip("SkyPilot is not installed")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.partition("TOLD")[2])


def ours(form: str) -> tuple[bool, set[tuple[str, float]]]:
    read = load_text(f"resources:\n  accelerators: {form}\n", "x.yaml").groups[0].resources
    return read.ordered, {(name, ask.count) for ask in read.accelerators for name in matching(ask)}


# SkyPilot has no name for v5e but v5litepod, and takes the number after a TPU's colon as a count of whole slices;
# we read what was meant, and tell it `tpu-v5litepod-8`.
TPU_BY_CORES = {"tpu-v6e:8", "tpu-v5e:8", "tpu-v5e-8", "{tpu-v5e: 8}"}


@pytest.mark.parametrize("form", [*(f for f, _, _ in FORMS if f not in TPU_BY_CORES), *BY_MEMORY])
def test_skypilot_reads_the_same_accelerators(form: str, sky_says: dict[str, Any]) -> None:
    is_list, found = sky_says["forms"][form]
    ordered, asks = ours(form)
    assert asks == {(name, float(count)) for name, count in found}
    if len(asks) > 1:
        assert ordered is is_list


@pytest.mark.parametrize("form", sorted(TPU_BY_CORES))
def test_skypilot_would_not_know_these_tpus(form: str, sky_says: dict[str, Any]) -> None:
    _, found = sky_says["forms"][form]
    assert {name for name, _ in found} <= {"tpu-v5e", "tpu-v5e-8", "tpu-v6e"}


def test_our_table_of_keys_is_that_of_the_installed_skypilot(sky_says: dict[str, Any]) -> None:
    public = {which: {k for k in keys if not k.startswith("_")} for which, keys in sky_says["keys"].items()}
    assert public["task"] == {*TASK_KEYS, *TASK_KEYS_READ, *TASK_KEYS_REFUSED}
    assert public["resources"] == {*RESOURCES_KEYS} - {"gpus"}
