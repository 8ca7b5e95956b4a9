"""Generated task YAMLs: golden bytes, what SkyPilot reads in them, and what their bash does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from areal_sky.adapters.catalog import shipped_offers
from areal_sky.core import taskscripts, tasksources
from areal_sky.core.launch import plan
from areal_sky.core.nodeenv import HeadEnv, NodeEnv
from areal_sky.core.tasksources import secret_envs
from areal_sky.core.taskyaml import header, render_files, task_dicts, to_yaml
from areal_sky.errors import InvalidInput
from areal_sky.spec import load_text
from areal_sky.spec.cluster import AcceleratorAsk, ClusterSpec, NodeGroupSpec, ResourcesSpec

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
CASES = sorted(p.parent.name for p in GOLDEN.glob("*/spec.yaml"))
NOW_S = 1_790_000_000.0
WHEEL = "./areal_sky-0.1.0-py3-none-any.whl"
MOUNTED = "~/.areal_sky/wheel/areal_sky-0.1.0-py3-none-any.whl"


def rendered(text: str, name: str = "spec.yaml") -> dict[str, str]:
    spec = load_text(text, name, NOW_S)
    return render_files(spec, plan(spec, shipped_offers()), WHEEL)


def tasks_of(text: str) -> dict[str, Any]:
    return {name: yaml.safe_load(body) for name, body in rendered(text).items()}


# ---------------------------------------------------------------- golden files


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str) -> None:
    """Same spec, same bytes. After a change on purpose: REWRITE_GOLDEN=1 pytest tests/core/test_taskyaml.py, and read
    the diff."""
    text = (GOLDEN / case / "spec.yaml").read_text()
    files = rendered(text, f"{case}.yaml")
    assert files == rendered(text, f"{case}.yaml")
    if os.environ.get("REWRITE_GOLDEN"):
        for name, body in files.items():
            (GOLDEN / case / name).write_text(body)
    kept = {p.name: p.read_text() for p in (GOLDEN / case).glob("*.yaml") if p.name != "spec.yaml"}
    assert files == kept


@pytest.mark.parametrize("case", CASES)
def test_golden_bash_is_sound(case: str) -> None:
    for path in (GOLDEN / case).glob("*.yaml"):
        task = yaml.safe_load(path.read_text())
        for part in ("setup", "run"):
            if path.name != "spec.yaml":
                subprocess.run(["bash", "-n"], input=task[part], text=True, check=True)


def test_no_golden_file_holds_a_secret_value() -> None:
    for path in GOLDEN.glob("plain/*.yaml"):
        if path.name != "spec.yaml":
            assert "never_to_be_seen" not in path.read_text()


def test_planted_secrets_reach_no_file_whatever_block_they_stand_in() -> None:
    text = """
infra: aws
resources: {accelerators: V100:8}
envs:
  WANDB_API_KEY: planted-1
  hf_token: planted-2
  DB_PASSWORD: planted-3
  PROXY: http://me:planted-4@proxy:3128
  AWS_SECRET_ACCESS_KEY: planted-5
  KEYBOARD: qwerty
  TOKENIZER: bpe
  MAX_TOKENS: 4096
  EMPTY_TOKEN: ''
secrets:
  ODD: planted-6
"""
    files = rendered(text)
    assert "planted" not in "".join(files.values())
    task = yaml.safe_load(files["main.yaml"])
    hidden = ("ODD", "WANDB_API_KEY", "hf_token", "DB_PASSWORD", "PROXY", "AWS_SECRET_ACCESS_KEY")
    assert task["secrets"] == dict.fromkeys((*hidden, "AREAL_SKY_NODE_TOKEN", "AREAL_SKY_RAY_TOKEN"))
    seen = [task["envs"][k] for k in ("KEYBOARD", "TOKENIZER", "MAX_TOKENS", "EMPTY_TOKEN")]
    assert seen == ["qwerty", "bpe", 4096, ""]
    assert all(f" --secret {name}" in files["main.yaml"] for name in hidden)
    given = secret_envs(load_text(text, "x.yaml", NOW_S))
    assert sorted(given) == sorted(hidden[1:]) and all("planted" in value for value in given.values())


def test_generated_bash_never_stops_rays_of_others() -> None:
    """`ray stop` ends every Ray on the host."""
    for text in (taskscripts.head_run(), taskscripts.node_run("x"), taskscripts.head_setup()):
        assert "ray stop" not in text and "pkill" not in text and "killall" not in text
        assert "RAY_AUTH_MODE=token" in text or "pip install" in text


@pytest.mark.parametrize("name", ["head.yaml", "worker.yaml"])
def test_the_checked_in_yamls_behave_as_the_generated_ones(name: str) -> None:
    task = yaml.safe_load((ROOT / "task_yamls" / name).read_text())
    if name == "head.yaml":
        assert (task["setup"], task["run"]) == (taskscripts.head_setup(), taskscripts.head_run())
        head = HeadEnv.from_env({**task["envs"], "AREAL_SKY_STATE_DIR": "/s"})
        assert (head.cluster, head.replica, head.ray_port) == ("my-cluster", "my-cluster-head-0", 6379)
    else:
        assert (task["setup"], task["run"]) == (taskscripts.node_setup(None), taskscripts.node_run(None))
        node = NodeEnv.from_env({**task["envs"], "AREAL_SKY_HEAD_IP": "10.0.0.7", "SKYPILOT_NODE_RANK": "1"})
        assert (node.group, node.replica, node.index, node.head_ip) == (
            "workers",
            "my-cluster-workers-0",
            1,
            "10.0.0.7",
        )
    assert task["resources"]["autostop"]["down"] is True


# ---------------------------------------------------------------- what is carried


def test_everything_of_a_plain_task_is_carried_and_secrets_are_only_named() -> None:
    task = tasks_of((GOLDEN / "plain" / "spec.yaml").read_text())["main.yaml"]
    assert task["num_nodes"] == 2
    assert task["workdir"] == "~/code/sft"
    assert task["file_mounts"] == {"/data": "gs://bucket/data", "~/.netrc": "~/.netrc", MOUNTED: WHEEL}
    assert task["resources"]["image_id"].startswith("docker:pytorch/")
    assert task["resources"]["disk_size"] == 512
    assert task["resources"]["labels"] == {"team": "rl", "areal-sky-cluster": "sft", "areal-sky-group": "main"}
    assert task["envs"]["GREETING"] == "it's $(hostname) and `date`"
    assert task["secrets"] == dict.fromkeys(
        ("HF_TOKEN", "WANDB_API_KEY", "AREAL_SKY_NODE_TOKEN", "AREAL_SKY_RAY_TOKEN")
    )
    node = NodeEnv.from_env(task["envs"] | {"AREAL_SKY_HEAD_IP": "10.0.0.7", "SKYPILOT_NODE_RANK": "1"})
    assert (node.cluster, node.group, node.index, node.shape, node.simulated_gpus) == ("sft", "main", 1, None, False)


def test_the_head_knows_the_cluster_and_runs_nothing_of_the_user() -> None:
    head = tasks_of((GOLDEN / "plain" / "spec.yaml").read_text())["head.yaml"]
    assert "workdir" not in head and head["file_mounts"] == {MOUNTED: WHEEL}
    assert "torchrun" not in head["run"] and "MODEL" not in head["envs"]
    # Nodes run in a container image: the head shares it, since Python and Ray must be alike.
    assert head["resources"]["image_id"].startswith("docker:pytorch/")
    env = HeadEnv.from_env(head["envs"])
    assert [(g.name, g.nodes_per_replica, g.shape.gpus) for g in env.groups] == [("main", 2, 8.0)]
    assert head["secrets"] == {"AREAL_SKY_TOKENS": None}


def test_nodes_and_head_are_pinned_to_the_one_region_of_the_plan() -> None:
    tasks = tasks_of("resources: {accelerators: V100:8, infra: aws}\n")
    assert {t["resources"]["infra"] for t in tasks.values()} == {"aws/us-east-1"}


def test_entries_of_any_of_are_whole_and_keep_their_own() -> None:
    entries = tasks_of((GOLDEN / "places" / "spec.yaml").read_text())["main.yaml"]["resources"]["any_of"]
    ours = {"team": "rl", "areal-sky-cluster": "anywhere", "areal-sky-group": "main"}
    assert [e["labels"] for e in entries] == [ours, {"kind": "old", **ours}]
    assert [e["cpus"] for e in entries] == ["32+", "32+"]
    assert [e.get("use_spot") for e in entries] == [None, True]
    assert all(e["autostop"]["down"] for e in entries)


@pytest.mark.parametrize(
    ("group", "spot"),
    [("market: spot", True), ("market: mixed, on_demand_base: 0", True), ("market: mixed, on_demand_base: 1", None)],
)
def test_a_file_has_the_market_of_the_first_replica(group: str, spot: bool | None) -> None:
    text = f"infra: aws\nnode_groups: {{g: {{resources: {{accelerators: V100:8}}, max_replicas: 3, {group}}}}}\n"
    assert tasks_of(text)["g.yaml"]["resources"].get("use_spot") is spot


def test_slurm_gets_neither_spot_nor_autostop() -> None:
    resources = tasks_of("infra: slurm/hpc\nresources: {accelerators: H100:8, use_spot: true}\n")["main.yaml"][
        "resources"
    ]
    assert "autostop" not in resources and "use_spot" not in resources
    assert resources["infra"] == "slurm/hpc"


def test_a_wheel_is_mounted_and_named_unless_the_user_says_what_to_install() -> None:
    text = "infra: aws\nresources: {accelerators: V100:8}\nenvs: {AREAL_SKY_PYTHON: /x/python, A: b%s}\n"
    for task in tasks_of(text % "").values():
        assert task["file_mounts"] == {MOUNTED: WHEEL}
        assert (task["envs"]["AREAL_SKY_PACKAGE"], task["envs"]["AREAL_SKY_PYTHON"]) == (MOUNTED, "/x/python")
    for task in tasks_of(text % ", AREAL_SKY_PACKAGE: 'areal-sky==9'").values():
        assert "file_mounts" not in task and task["envs"]["AREAL_SKY_PACKAGE"] == "areal-sky==9"


def test_relative_sources_are_skypilots_business_unless_a_folder_is_given() -> None:
    text = "infra: aws\nresources: {accelerators: V100:8}\nworkdir: .\nfile_mounts: {/d: data, /b: 's3://b', /h: ~/h}\n"
    spec = load_text(text, "x.yaml", NOW_S)
    launch = plan(spec, shipped_offers())
    task = task_dicts(spec, launch, WHEEL)["main"]
    assert (task["workdir"], task["file_mounts"]["/d"]) == (".", "data")
    assert "'.', 'data': SkyPilot looks there" in header(spec, launch, "main")
    task = task_dicts(spec, launch, "/w/areal_sky-1.whl", "/home/me")["main"]
    assert (task["workdir"], task["file_mounts"].pop("/d")) == ("/home/me/.", "/home/me/data")
    assert task["file_mounts"] == {
        "/b": "s3://b", "/h": "~/h", "~/.areal_sky/wheel/areal_sky-1.whl": "/w/areal_sky-1.whl",
    }  # fmt: skip


def test_sources_of_storage_are_rooted_too() -> None:
    mounts = {"/c": {"source": "./ckpt", "mode": "COPY"}, "/m": {"source": ["a", "/b"]}, "/s": {"source": "s3://b"}}
    task = {"workdir": {"url": "https://x/y.git"}, "file_mounts": mounts}
    assert tasksources.local_sources(task) == ["./ckpt", "a"]
    assert tasksources.rooted(task, "/home/me") == {"file_mounts": {
        "/c": {"source": "/home/me/./ckpt", "mode": "COPY"}, "/m": {"source": ["/home/me/a", "/b"]},
        "/s": {"source": "s3://b"},
    }}  # fmt: skip


def test_local_has_no_task() -> None:
    spec = load_text("infra: local\nresources: {accelerators: V100:8}\n", "x.yaml", NOW_S)
    with pytest.raises(InvalidInput, match="local"):
        task_dicts(spec, plan(spec, shipped_offers()))


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=60) | st.integers() | st.none(), max_size=4))
def test_to_yaml_reads_back_as_it_was(task: dict[str, Any]) -> None:
    # YAML itself cannot carry some characters (NUL, lone surrogates): refused, never changed.
    try:
        text = to_yaml(task, "a header\nof two lines")
    except (InvalidInput, yaml.YAMLError, UnicodeEncodeError):
        return
    assert yaml.safe_load(text) == task


def test_trailing_spaces_do_not_cost_a_script_its_readability() -> None:
    assert "run: |\n  echo a  \n  echo b\n" in to_yaml({"run": "echo a  \necho b\n"})


# ---------------------------------------------------------------- hostile input

EVIL = "x'\"$(touch pwned)`touch pwned`\nname: evil; touch pwned #"


def hostile_spec() -> ClusterSpec:
    resources = ResourcesSpec(
        accelerators=(AcceleratorAsk(name="V100", count=8),), raw={"accelerators": "V100:8", "labels": {"k": EVIL}}
    )
    group = NodeGroupSpec(
        name=EVIL, resources=resources, elastic=False, min_replicas=1, max_replicas=1, nodes_per_replica=1,
        market="on_demand",
    )  # fmt: skip
    task = {
        "run": "echo started\nAREAL_SKY_RUN\ntouch escaped\nAREAL_SKY_RUN_2\n",
        "setup": "true\nAREAL_SKY_SETUP\ntrue ')' \" `",
        "envs": {"EVIL": EVIL},
        "secrets": {"S": EVIL},
        "workdir": EVIL,
    }
    return ClusterSpec(name=EVIL, infra=None, head=ResourcesSpec(), groups=(group,), task=task)


def test_hostile_names_and_values_are_data_in_the_yaml() -> None:
    spec = hostile_spec()
    launch = plan(spec, shipped_offers())
    for stem, task in task_dicts(spec, launch).items():
        text = to_yaml(task, header(spec, launch, stem))
        assert yaml.safe_load(text) == json.loads(json.dumps(task))
        assert all(EVIL not in task[part] and "pwned" not in task[part] for part in ("setup", "run"))
        comment = text[: text.index("\nname: ")]
        assert all(line.startswith("#") for line in comment.splitlines())
    group = task_dicts(spec, launch)[EVIL]
    assert group["envs"]["EVIL"] == EVIL and group["workdir"] == EVIL and group["secrets"]["S"] is None


# ---------------------------------------------------------------- SkyPilot reads them


@pytest.mark.sky
def test_skypilot_reads_every_file_offline(tmp_path: Path) -> None:
    """In a process of its own: SkyPilot reads its folders from the environment when it is imported."""
    pytest.importorskip("sky")
    files = [p for p in sorted(GOLDEN.glob("*/*.yaml")) if p.name != "spec.yaml"]
    files += sorted((ROOT / "task_yamls").glob("*.yaml"))
    (tmp_path / "home" / "code" / "sft").mkdir(parents=True)
    (tmp_path / "home" / ".netrc").write_text("")
    code = """
import json, sys
import sky
for path in sys.argv[1:]:
    task = sky.Task.from_yaml(path)
    found = [{"labels": r.labels, "spot": r.use_spot, "infra": str(r.infra), "down": bool(r.autostop_config
              and r.autostop_config.down), "accelerators": r.accelerators} for r in task.resources]
    print("TASK", json.dumps({"path": path, "nodes": task.num_nodes, "envs": task.envs, "resources": found,
          "secrets": sorted(r.name for r in task.managed_secret_refs)}))
"""

    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path / "home"),
        "SKY_RUNTIME_DIR": str(tmp_path / "home"),
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "http_proxy": "http://127.0.0.1:9",  # no way out
        "https_proxy": "http://127.0.0.1:9",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, files)], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    read = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("TASK ")]
    assert len(read) == len(files)
    for seen in read:
        raw = yaml.safe_load(Path(seen["path"]).read_text())
        assert seen["nodes"] == raw.get("num_nodes", 1)
        assert seen["envs"] == {k: str(v) for k, v in raw["envs"].items()}
        assert seen["secrets"] == sorted(raw["secrets"])
        for r in seen["resources"]:
            assert r["down"]
            if "areal_grpo" not in seen["path"]:  # a user's own task, for a cluster or a machine
                assert {"areal-sky-cluster", "areal-sky-group"} <= r["labels"].keys()
    by_case = {tuple(Path(s["path"]).parts[-2:]): s for s in read}
    full = by_case["full", "rollout.yaml"]
    assert sorted(next(iter(r["accelerators"])) for r in full["resources"]) == ["A100-80GB", "H100", "L40S"]
    places = by_case["places", "main.yaml"]["resources"]
    assert sorted(str(r["labels"].get("kind")) for r in places) == ["None", "old"]
    assert sorted(r["spot"] for r in places) == [False, True]
