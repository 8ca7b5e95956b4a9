"""What is accepted, and what it means."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import pytest

from areal_sky.spec import ClusterSpec, load_text
from areal_sky.spec.cluster import AlertSpec, PoolSpec, PriorityWeight

NOW_S = datetime(2026, 7, 1, tzinfo=UTC).timestamp()

ARTICLE = """\
resources:
  accelerators: V100:8
scheduling:
  strategy: dynamic
  priority:
    - model_type: moe
      weight: 1.5
    - model_type: base
      weight: 1.0
"""

FULL = """\
name: grpo-math
infra: aws/us-east-1
resources: {image_id: "docker:areal:v1", disk_size: 256}
node_groups:
  trainer:
    resources: {accelerators: "H100:8"}
    replicas: 2
    market: on_demand
  rollout:
    resources: {accelerators: {H100: 8, A100-80GB: 8, L40S: 8}}
    min_replicas: 1
    max_replicas: 16
    nodes_per_replica: 1
    market: mixed
    on_demand_base: 1
models:
  - {name: qwen3-30b-a3b, model_type: moe, config: qwen3-30b-a3b, train: "megatron:d2p2t4e4", rollout: "sglang:d4t2"}
  - {name: qwen2.5-7b, model_type: base, config: ./config.json, train: "fsdp:d8", rollout: "vllm:d8"}
scheduling:
  strategy: dynamic
  priority: [{model_type: moe, weight: 1.5}, {model_type: base, weight: 1.0}]
  pools: [{name: moe, model_type: moe, guaranteed_gpus: 16, max_gpus: 32, borrow: true}]
scaling: {policy: balance, target_utilization: 0.85, cooldown: 2m, idle: 90s, options: {gain: 0.5}}
spot: {policy: uniform_saver, max_spot_price_frac: 0.6}
budget: {max_hourly_usd: 120, max_total_usd: "$5,000", deadline: 2026-12-24T08:00:00Z}
telemetry: {critical_interval: 100ms, normal_interval: 1s}
alerts: [{when: gpu_temperature_celsius > 88, for: 30s, then: cordon}]
head: {resources: {cpus: 8+, memory: 64GB+}}
idle_shutdown: 1h
setup: pip install areal
envs: {HF_HOME: /hf, N: 3}
secrets: {HF_TOKEN: null}
"""


def load(text: str, file_name: str = "cluster.yaml") -> ClusterSpec:
    return load_text(text, file_name, NOW_S)


def test_the_articles_snippet_is_a_whole_spec() -> None:
    spec = load(ARTICLE, "examples/article.yaml")
    assert spec.name == "article"
    (group,) = spec.groups
    assert (group.name, group.elastic, group.nodes_per_replica, group.market) == ("main", False, 1, "on_demand")
    (ask,) = group.resources.accelerators
    assert (ask.name, ask.count) == ("V100", 8)
    assert spec.scheduling.strategy == "dynamic"
    assert (spec.weight("moe"), spec.weight("base"), spec.weight(None)) == (1.5, 1.0, 1.0)
    assert spec.infra is None and not spec.is_local
    assert any("node_groups" in g for g in spec.guesses)


def test_the_full_spec_is_read_field_by_field() -> None:
    spec = load(FULL)
    trainer, rollout = spec.groups
    assert (spec.name, spec.infra) == ("grpo-math", "aws/us-east-1")
    assert (trainer.elastic, trainer.min_replicas, trainer.max_replicas, trainer.nodes_per_replica) == (False, 1, 1, 2)
    assert (rollout.elastic, rollout.min_replicas, rollout.max_replicas, rollout.nodes_per_replica) == (True, 1, 16, 1)
    assert (rollout.market, rollout.on_demand_base) == ("mixed", 1)
    assert [a.name for a in rollout.resources.accelerators] == ["H100", "A100-80GB", "L40S"]
    assert not rollout.resources.ordered
    assert {g.resources.image_id for g in spec.groups} == {"docker:areal:v1"}, "groups inherit the default resources"
    assert {g.resources.disk_size_gib for g in spec.groups} == {256}
    assert [m.train for m in spec.models] == ["megatron:d2p2t4e4", "fsdp:d8"]
    assert spec.scheduling.priority == (
        PriorityWeight(model_type="moe", weight=1.5),
        PriorityWeight(model_type="base", weight=1.0),
    )
    assert spec.scheduling.pools == (PoolSpec(name="moe", model_type="moe", guaranteed_gpus=16, max_gpus=32),)
    assert (spec.scaling.cooldown_s, spec.scaling.idle_s, spec.scaling.options) == (120, 90, {"gain": 0.5})
    assert spec.spot.max_spot_price_frac == 0.6
    assert (spec.budget.max_hourly_usd, spec.budget.max_total_usd) == (120, 5000)
    assert spec.budget.deadline_s == datetime(2026, 12, 24, 8, tzinfo=UTC).timestamp()
    assert (spec.telemetry.critical_interval_s, spec.telemetry.normal_interval_s) == (0.1, 1.0)
    assert spec.alerts == (
        AlertSpec(when="gpu_temperature_celsius > 88", metric="gpu_temperature_celsius", op=">", threshold=88, for_s=30,
                  then=("cordon",)),
    )  # fmt: skip
    assert (spec.head.cpus, spec.head.memory_gib, spec.head.accelerators) == (8, 64, ())
    assert spec.idle_shutdown_s == 3600
    assert spec.task == {
        "setup": "pip install areal",
        "envs": {"HF_HOME": "/hf", "N": 3},
        "secrets": {"HF_TOKEN": None},
    }
    assert spec.guesses == ()


def test_areals_own_ray_cluster_task_is_a_spec_of_two_nodes() -> None:
    text = """
resources:
  accelerators: A100:8
  image_id: docker:ghcr.io/inclusionai/areal-runtime:v0.3.4
  memory: 32+
  cpus: 8+
num_nodes: 2
workdir: .
file_mounts:
  /storage:
    source: s3://my-bucket/
    mode: MOUNT
run: |
  ray start --head --port=6379
"""
    spec = load(text, "examples/ray_cluster.sky.yaml")
    (group,) = spec.groups
    assert (spec.name, group.nodes_per_replica, group.elastic) == ("ray-cluster", 2, False)
    assert (group.resources.cpus, group.resources.memory_gib) == (8, 32)
    assert group.resources.raw["memory"] == "32+", "SkyPilot gets what the user wrote"
    assert spec.task == {
        "workdir": ".",
        "file_mounts": {"/storage": {"source": "s3://my-bucket/", "mode": "MOUNT"}},
        "run": "ray start --head --port=6379\n",
    }


def test_a_plain_tasks_name_is_made_legal_and_said_so() -> None:
    spec = load("name: My_Task.v2\nresources: {cpus: 4}\n")
    assert spec.name == "my-task-v2"
    assert any("my-task-v2" in g for g in spec.guesses)


@pytest.mark.parametrize(
    ("file_name", "name"),
    [("a/b/GRPO math!.yaml", "grpo-math"), ("8x-h100.yml", "x-h100"), ("-", "cluster"), ("<stdin>", "stdin"),
     ("an-extremely-long-name-of-a-file.yaml", "an-extremely-long-name-of"), ("数学.yaml", "cluster"),
     (r"C:\specs\one.yaml", "one")],
)  # fmt: skip
def test_the_files_name_is_the_default_cluster_name(file_name: str, name: str) -> None:
    assert load("resources: {}", file_name).name == name


def test_priority_may_be_a_mapping() -> None:
    spec = load("scheduling: {priority: {moe: 1.5, base: 1}}")
    assert [(p.model_type, p.weight) for p in spec.scheduling.priority] == [("moe", 1.5), ("base", 1.0)]


def test_a_groups_choice_of_machine_replaces_the_default_one_as_a_whole() -> None:
    spec = load(
        """
resources: {any_of: [{accelerators: V100:8}, {accelerators: T4:4}], infra: gcp, cpus: 16+}
node_groups:
  a: {replicas: 1}
  b: {replicas: 1, resources: {accelerators: H100:8, cloud: aws, region: us-east-1}}
"""
    )
    a, b = spec.groups
    assert [x.name for x in a.resources.accelerators] == ["V100", "T4"]
    assert (a.resources.infra, b.resources.infra) == ("gcp", "aws/us-east-1")
    assert b.resources.raw == {"cpus": "16+", "accelerators": "H100:8", "cloud": "aws", "region": "us-east-1"}
    assert spec.head.infra == "gcp" and spec.head.accelerators == ()


def test_the_head_runs_where_the_default_resources_run_on_a_cpu_machine() -> None:
    spec = load("resources: {infra: k8s/ctx, accelerators: H100:8, use_spot: true, labels: {team: rl}}")
    assert spec.infra == spec.head.infra == "k8s/ctx"
    assert spec.head.raw == {"cpus": "4+", "memory": "16+", "infra": "k8s/ctx", "labels": {"team": "rl"}}
    assert spec.head.use_spot is None
    assert spec.groups[0].market == "spot"


def test_local_is_ours_and_not_told_to_skypilot() -> None:
    for text in ("infra: local\nresources: {accelerators: H100:8}", "resources: {infra: local, accelerators: H100:8}"):
        spec = load(text)
        assert spec.is_local
        assert "infra" not in spec.groups[0].resources.raw


@pytest.mark.parametrize(
    "infra",
    ["aws", "aws/us-east-1", "AWS/us-east-1/us-east-1a", "*/us-east-1", "k8s/ctx/with/slash",
     "slurm/cluster/partition", "ssh/pool", "kubernetes", "local"],
)  # fmt: skip
def test_skypilots_infra_strings_are_taken(infra: str) -> None:
    cloud, _, rest = infra.partition("/")
    assert load(f'infra: "{infra}"\n').infra == f"{cloud.lower()}/{rest}".rstrip("/")


def test_elastic_groups_may_start_at_nothing() -> None:
    (group,) = load("node_groups: {r: {max_replicas: 3}}").groups
    assert (group.elastic, group.min_replicas, group.max_replicas) == (True, 0, 3)


def test_a_deadline_may_count_from_now_and_an_old_one_passes_without_a_clock() -> None:
    assert load("budget: {deadline: 2h}").budget.deadline_s == NOW_S + 7200
    assert load_text("budget: {deadline: 2020-01-01T00:00:00+02:00}", "x").budget.deadline_s == 1577829600


def test_yaml_merge_keys_and_anchors_mean_what_they_mean_to_skypilot() -> None:
    spec = load(
        """
node_groups:
  a: &a {resources: &r {accelerators: H100:8}, min_replicas: 1, max_replicas: 2}
  b: {<<: *a, max_replicas: 4}
  c: {<<: [*a], resources: *r}
"""
    )
    assert [(g.min_replicas, g.max_replicas) for g in spec.groups] == [(1, 2), (1, 4), (1, 2)]
    assert all(g.resources.accelerators[0].name == "H100" for g in spec.groups)


def test_a_key_with_nothing_after_it_is_an_absent_key() -> None:
    blocks = "scheduling scaling spot budget telemetry alerts notify models head node_groups infra idle_shutdown name"
    assert load("".join(f"{b}:\n" for b in blocks.split()) + "resources:\n") == load("resources: {}\n")


def test_a_spec_cannot_be_changed() -> None:
    spec = load(ARTICLE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.name = "other"  # type: ignore[misc]


def test_an_alert_is_one_line_or_a_mapping_or_the_name_of_what_is_found_anyway() -> None:
    spec = load(
        """
alerts:
  - gpu_temperature_celsius > 88 for 30s then cordon
  - {when: gpu_temperature_celsius > 88, for: 30s, then: cordon}
  - "reward<0.1 then notify,requeue"
  - {when: stall, then: [requeue, sample_fast]}
  - lost_gpu for 5s then ignore
  - queue_depth >= 1e3
notify: {webhook: $HOOK, command: ./page.sh}
"""
    )
    line, mapping, reward, stall, lost, depth = spec.alerts
    assert line == mapping
    assert (reward.metric, reward.op, reward.threshold, reward.then) == ("reward", "<", 0.1, ("notify", "requeue"))
    assert (stall.when, stall.op, stall.then) == ("stall", None, ("requeue", "sample_fast"))
    assert (lost.when, lost.for_s, lost.then) == ("lost_gpu", 5.0, ("ignore",))
    assert (depth.threshold, depth.for_s, depth.then) == (1000.0, 0.0, ("notify",))
    assert (spec.notify.webhook, spec.notify.command) == ("$HOOK", "./page.sh")
