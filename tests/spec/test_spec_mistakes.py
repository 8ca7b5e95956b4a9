"""Every kind of mistake: where it is told to be, and in which words."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from areal_sky.errors import SpecError
from areal_sky.spec import load_text

NOW_S = datetime(2026, 7, 1, tzinfo=UTC).timestamp()


def mistakes(text: str) -> list[str]:
    """`line:column: what` of each mistake."""
    with pytest.raises(SpecError) as refused:
        load_text(text, "c.yaml", NOW_S)
    assert all(m.file == "c.yaml" for m in refused.value.mistakes)
    return [f"{m.line}:{m.column}: {m.what}" for m in refused.value.mistakes]


GROUP = "node_groups:\n  g: {%s}\n"

# (text, where, what is said of it): each text has exactly one mistake.
ONE: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "unknown key, near": ("scheduling:\n  stratgy: x\n", "2:3", ("unknown key `stratgy`", "did you mean `strategy`?")),
    "unknown key, far": ("xyzzy: 1\n", "1:1", ("unknown key `xyzzy` at the top", "expected one of:", "node_groups")),
    "unknown key, by another name": (GROUP % "count: 2", "2:7", ("did you mean `replicas`?",)),
    "unknown resources key": ("resources:\n  cpu: 4\n", "2:3", ("unknown key `cpu`", "did you mean `cpus`?")),
    "duplicate key": ("name: a\nname: b\n", "2:1", ("duplicate key `name`", "line 1")),
    "duplicate nested key": ("scaling: {policy: a, policy: b}", "1:22", ("duplicate key `policy`",)),
    "key is a number": ("resources: {8: x}", "1:13", ("the key `8` reads as a number", 'write "8"')),
    "key is a boolean": ("envs: {NO: x}", "1:8", ("reads as a boolean", 'write "NO"')),
    "key is a list": ("? [a]\n: b\n", "1:3", ("a list as a key",)),
    "not a mapping": ("- a\n", "1:1", ("the spec is a list",)),
    "just text": ("hello", "1:1", ("the spec is `hello`", "expected a mapping")),
    "empty": ("", "1:1", ("the file is empty",)),
    "only a comment": ("# hello\n", "1:1", ("the file is empty",)),
    "two documents": ("name: a\n---\nname: b\n", "2:1", ("a second YAML document",)),
    "block is text": ("scheduling: dynamic", "1:13", ("scheduling is `dynamic`", "expected a mapping")),
    "list is a mapping": ("alerts: {when: x}", "1:9", ("alerts is a mapping", "a list of alerts")),
    "item is text": ("models: [qwen]", "1:10", ("models[0] is `qwen`",)),
    # names
    "name too long": ("infra: k8s\nname: a-very-long-name-of-a-cluster", "2:7", ("(29 characters)", "at most 26",
                      "did you mean `a-very-long-name-of-a-clus`?")),
    "name illegal": ("infra: k8s\nname: My_Cluster", "2:7", ("did you mean `my-cluster`?",)),
    "name ends with a dash": ("infra: k8s\nname: a-", "2:7", ("did you mean `a`?",)),
    "name is a boolean": ("name: no", "1:7", ("name is `no` (a boolean in YAML)", 'write "no"')),
    "group is head": ("node_groups: {head: {}}", "1:15", ("`head` is taken",)),
    "group illegal": ("node_groups: {Roll_out: {}}", "1:15", ("did you mean `roll-out`?",)),
    "no groups": ("node_groups: {}", "1:14", ("node_groups is empty",)),
    # groups
    "min above max": (GROUP % "min_replicas: 4, max_replicas: 2", "2:21", ("min_replicas 4 is above max_replicas 2",)),
    "replicas and min": (GROUP % "replicas: 2, max_replicas: 4", "2:7", ("both `replicas` (fixed) and",)),
    "no max": (GROUP % "min_replicas: 1", "2:7", ("without `max_replicas`",)),
    "base above max": (
        GROUP % "max_replicas: 2, market: mixed, on_demand_base: 3", "2:55", ("on_demand_base 3 is above",)),
    "base without mixed": (GROUP % "max_replicas: 2, on_demand_base: 1", "2:24", ("expected market: mixed",)),
    "market": (GROUP % "market: ondemand", "2:15", ("g.market is `ondemand`", "did you mean `on_demand`?")),
    "mixed and fixed": (GROUP % "market: mixed, replicas: 2", "2:15", ("mixed in a fixed group",)),
    "market against use_spot": (GROUP % "market: on_demand, resources: {use_spot: true}", "2:15", ("drop use_spot",)),
    "zero replicas": (GROUP % "replicas: 0", "2:17", ("is `0`", "a whole number from 1")),
    "half a replica": (GROUP % "replicas: 1.5", "2:17", ("is `1.5`",)),
    "replicas in quotes": (GROUP % 'replicas: "2"', "2:17", ('is "2" (text)', "did you mean `2` without quotes?")),
    "replicas of a fixed group of many": (GROUP % "replicas: 2, nodes_per_replica: 4", "2:20", ("`replicas: 8`",)),
    "num_nodes beside groups": ("num_nodes: 2\nnode_groups: {g: {}}", "1:1", ("`num_nodes` beside `node_groups`",)),
    "num_nodes": ("num_nodes: -1", "1:12", ("is `-1`",)),
    # resources
    "unknown accelerator": ("resources:\n  accelerators: V10O:8\n", "2:17", ("did you mean `V100`?",)),
    "unknown accelerator in a mapping": ("resources:\n  accelerators: {V10O: 8}\n", "2:18", ("did you mean `V100`?",)),
    "accelerator inherited by two groups": (
        "resources: {accelerators: V10O}\nnode_groups: {a: {}, b: {}}", "1:27", ("did you mean `V100`?",)),
    "region is a boolean": (
        "resources: {cloud: azure, region: no}", "1:35", ("is `no` (a boolean in YAML)", 'write "no"')),
    "cpus": ("resources: {cpus: 4-}", "1:19", ("cpus is `4-`", "8+")),
    "cpus below zero": ("resources: {cpus: 0}", "1:19", ("cpus is `0`",)),
    "memory": ("resources: {memory: 32XB}", "1:21", ("memory is `32XB`", "32+")),
    "disk": ("resources: {disk_size: 10.5}", "1:24", ("disk_size is `10.5`",)),
    "use_spot": ("resources: {use_spot: 'yes'}", "1:23", ('use_spot is "yes" (text)', "true or false")),
    "both any_of and ordered": (
        "resources: {any_of: [{cpus: 2}], ordered: [{cpus: 2}]}", "1:34", ("both `any_of` and",)),
    "both accelerators and gpus": (
        "resources: {gpus: V100, accelerators: V100}", "1:13", ("both `accelerators` and `gpus`",)),
    "infra beside cloud": ("resources: {infra: aws, cloud: aws}", "1:25", ("`cloud` beside `infra`",)),
    "any_of in any_of": ("resources: {any_of: [{any_of: []}]}", "1:23", ("unknown key `any_of`",)),
    "several beside ordered": (
        "resources: {accelerators: {V100: 1, L4: 1}, ordered: [{infra: aws}]}", "1:45",
        ("expected them in its entries",)),
    "disk_tier": ("resources: {disk_tier: hgih}", "1:24", ("did you mean `high`?",)),
    # places
    "cloud": ("infra: asw/us-east-1", "1:8", ("`asw` is no cloud", "did you mean `aws`?")),
    "cloud by another name": ("infra: google", "1:8", ("did you mean `gcp`?",)),
    "cloud in resources": ("resources: {cloud: gpc}", "1:20", ("did you mean `gcp`?",)),
    "empty part": ("infra: aws//us-east-1a", "1:8", ("an empty part",)),
    "too many parts": ("infra: aws/a/b/c", "1:8", ("too many parts",)),
    "local with parts": ("infra: local/x", "1:8", ("`local` alone",)),
    "a group that is not local": (
        "infra: local\nnode_groups: {g: {resources: {infra: aws}}}", "2:15", ("on aws in a cluster on local",)),
    # ours
    "weight of zero": (
        "scheduling: {priority: [{model_type: moe, weight: 0}]}", "1:51", ("is `0`", "a weight above 0")),
    "negative weight": ("scheduling: {priority: {moe: -1}}", "1:30", ("is `-1`", "a weight above 0")),
    "weight is not a number": ("scheduling: {priority: {moe: .nan}}", "1:30", ("is `.nan`",)),
    "weight is infinite": ("scheduling: {priority: {moe: .inf}}", "1:30", ("is `.inf`",)),
    "no weight": ("scheduling: {priority: [{model_type: moe}]}", "1:25", ("has no `weight`",)),
    "no weight in a mapping": ("scheduling: {priority: {moe: }}", "1:25", ("has no weight",)),
    "no model type": ("scheduling: {priority: [{weight: 1}]}", "1:25", ("has no `model_type`",)),
    "model type twice": (
        "scheduling: {priority: [{model_type: a, weight: 1}, {model_type: a, weight: 2}]}", "1:66", ("`a` twice",)),
    "model type unknown": ("models: [{name: a, model_type: mo}]", "1:32", ("does not list", "did you mean `moe`?")),
    "model twice": ("models: [{name: a}, {name: a}]", "1:28", ("the model name `a` twice",)),
    "model without a name": ("models: [{train: 'fsdp:d8'}]", "1:10", ("has no `name`",)),
    "train backend": ("models: [{name: a, train: 'fdsp:d8'}]", "1:27", ("did you mean `fsdp`?",)),
    "memory unknown": ("models: [{name: a, memory: {tokens: 3}}]", "1:29", ("did you mean `micro_batch_tokens`?",)),
    "memory optimizer": ("models: [{name: a, memory: {optimizer: adamw}}]", "1:40", ("expected one of: adam, ",)),
    "memory context": ("models: [{name: a, memory: {context: 0}}]", "1:38", ("a whole number from 1 to",)),
    "rollout backend": ("models: [{name: a, rollout: 'fsdp:d8'}]", "1:29", ("expected one of: sglang, vllm",)),
    "pool above its limit": (
        "scheduling: {pools: [{name: p, model_type: moe, guaranteed_gpus: 4, max_gpus: 2}]}", "1:66",
        ("is above max_gpus 2",)),
    "pool of an unknown type": ("scheduling: {pools: [{name: p, model_type: mo}]}", "1:44", ("did you mean `moe`?",)),
    "policy": ("scaling: {policy: 'a b'}", "1:19", ("module:function",)),
    "share in percent": ("scaling: {target_utilization: 85}", "1:31", ("is `85`", "such as 0.85")),
    "spot share": ("spot: {max_spot_price_frac: 60%}", "1:29", ("is `60%`",)),
    "spot patience": ("spot: {patience: 10}", "1:18", ("without a unit", "did you mean")),
    "spot hold": ("spot: {hold: 5s}", "1:14", ("expected 1m to 7d",)),
    "spot partition name": (
        "infra: slurm/hpc\nspot: {slurm_partition: 'a b'}", "2:25", ("whose jobs give way",),
    ),
    "spot partition off Slurm": ("infra: aws\nspot: {slurm_partition: p}", "2:25", ("nothing here is on Slurm",)),
    "spot partition, no cluster": ("infra: slurm\nspot: {slurm_partition: p}", "2:25", ("expected the cluster there",)),
    "spot partition of the infra": (
        "infra: slurm/hpc/p\nspot: {slurm_partition: p}", "2:25", ("the partition of the infra itself",),
    ),
    "partition": ("spot: {partition: p}", "1:8", ("did you mean `slurm_partition`",)),
    "budget of nothing": ("budget: {max_hourly_usd: 0}", "1:26", ("above 0",)),
    "budget in euros": ("budget: {max_total_usd: 5€}", "1:25", ("is not an amount of money",)),
    # durations
    "unit apart": (
        "scaling: {cooldown: 100 m}", "1:21", ("is `100 m`, which is not a duration", "did you mean `100m`?")),
    "minutes for milliseconds": ("telemetry: {critical_interval: 100m}", "1:32", ("(1h40m)", "did you mean `100ms`?")),
    "minutes apart for milliseconds": ("telemetry: {critical_interval: 100 m}", "1:32", ("did you mean `100ms`?",)),
    "no unit": ("scaling: {cooldown: 90}", "1:21", ("is `90` without a unit", "did you mean `90s`?")),
    "in words": ("idle_shutdown: 2 minutes ago", "1:16", ("did you mean `2m`?",)),
    "clock time": ("scaling: {cooldown: 1:30}", "1:21", ("is `1:30`", "such as")),
    "intervals swapped": ("telemetry: {critical_interval: 2s, normal_interval: 1s}", "1:32", ("is longer than",)),
    # deadline
    "deadline in the past": ("budget: {deadline: 2026-06-30T23:00:00Z}", "1:20", ("which was 1h ago",)),
    "deadline without zone": (
        "budget: {deadline: 2026-12-24T08:00:00}", "1:20", ("without a time zone", "08:00:00Z`?")),
    "deadline is a day": ("budget: {deadline: 2026-12-24}", "1:20", ("did you mean `2026-12-24T00:00:00Z`?",)),
    "deadline on no day": ("budget: {deadline: 2026-13-99T00:00:00Z}", "1:20", ("no date and time",)),
    "deadline in words": ("budget: {deadline: 2 hours}", "1:20", ("did you mean `2h`?",)),
    "deadline is a number": ("budget: {deadline: 7200}", "1:20", ("a moment such as",)),
    # alerts
    "alert grammar": ("alerts: [{when: too hot}]", "1:17", ("expected METRIC > NUMBER",)),
    "alert metric": (
        "alerts: [{when: gpu_temprature_celsius > 88}]", "1:17", ("did you mean `gpu_temperature_celsius`?",)),
    "alert action": ("alerts: [{when: reward < 0, then: explode}]", "1:35", ("expected one of: notify, cordon",)),
    "alert line": ('alerts: ["reward < 0 for 5 then cordon"]', "1:10", ("`5` is not a duration",)),
    "alert line action": ('alerts: ["reward < 0 then notify, cordn"]', "1:10", ("did you mean `cordon`?",)),
    "alert line grammar": ('alerts: ["reward"]', "1:10", ("expected METRIC > NUMBER",)),
    "alert name": ("alerts: [{when: stal}]", "1:17", ("or one of: stall,", "did you mean `stall`?")),
    "alert actions": ("alerts: [{when: stall, then: [requeue, 3]}]", "1:40", ("alerts[0].then[1] is `3`",)),
    "webhook": ("notify: {webhook: hooks.example.com/x}", "1:19", ("is no URL, expected https://", "$NAME")),
    "alert without when": ("alerts: [{for: 1s}]", "1:10", ("has no `when`",)),
    # what passes through
    "service": ("service: {}", "1:1", ("SkyServe",)),
    "run is a list": ("run: [a]", "1:6", ("run is a list, expected text",)),
    "setup is a boolean": ("setup: yes", "1:8", ("setup is `yes` (a boolean in YAML)",)),
    "env name": ("envs: {A-B: 1}", "1:8", ("`A-B` cannot name an environment variable",)),
    "env value": ("envs: {A: [1]}", "1:11", ("envs.A is not text",)),
    # YAML itself
    "tab": ("resources:\n\tcpus: 4\n", "2:1", ("a tab in the indentation",)),
    "unclosed": ("resources: {cpus: 4\n", "2:1", ("not valid YAML",)),
    "colon in text": ("run: echo a: b\n", "1:12", ("a `:` where no key can be",)),
    "bad indentation": ("a:\n   - b\n  - c\n", "3:3", ("not valid YAML",)),
    "undefined alias": ("run: *nothing", "1:6", ("a YAML alias",)),
    "alias of itself": ("envs: &a {X: *a}", "1:14", ("the very value that it stands in",)),
    "merge of text": ("spot: {<<: x}", "1:12", ("`<<` merges mappings",)),
    "control character": ("name: é\x07\n", "1:8", ("U+0007",)),
    "lone surrogate": ("name: \ud800\n", "1:7", ("U+D800",)),
    "foreign tag": ("run: !!python/object:os.system x", "1:6", ("cannot read",)),
    "number too long": (f"envs: {{A: {'9' * 5000}}}", "1:11", ("cannot read",)),
}  # fmt: skip


@pytest.mark.parametrize("kind", ONE)
def test_a_mistake_is_told_once_in_its_place_and_its_own_words(kind: str) -> None:
    text, where, words = ONE[kind]
    found = mistakes(text)
    assert len(found) == 1, found
    assert found[0].startswith(where + ": "), found
    for word in words:
        assert word in found[0]
    assert "\n" not in found[0]


def test_all_mistakes_come_at_once_in_file_order() -> None:
    text = """\
infra: asw
resources: {accelerators: V10O:8, cpus: none}
node_groups:
  rollout: {min_replicas: 3, max_replicas: 2, markt: spot}
scheduling: {priority: {moe: 0}}
budget: {max_hourly_usd: -1, deadline: yesterday}
alerts: [{when: x}]
bogus: 1
"""
    places = [m.split(": ")[0] for m in mistakes(text)]
    assert places == ["1:8", "2:27", "2:41", "4:27", "4:47", "5:30", "6:26", "6:40", "7:17", "8:1"]


def test_columns_count_characters_not_bytes() -> None:
    (found,) = mistakes('envs: {A: "数学é🎉", B: [1]}')
    assert found.startswith("1:22: ")


@pytest.mark.parametrize(
    "text",
    ["secrets: hunter2", "secrets: {A: [hunter2]}", "secrets: [[hunter2]]", "secrets: {A: *hunter2}", "envs: hunter2",
     "secrets: {A: hunter2: b}", "secrets: {A: !hunter2 x}", "secrets: {A: \"hunter2\\q\"}", "managed_secrets: hunter2",
     "envs: {A: {hunter2: x}}", "secrets:\n\tA: hunter2", "config: hunter2",
     "secrets: {A: 0b_hunter2, B: !!int hunter2}"],
)  # fmt: skip
def test_no_mistake_repeats_a_secret(text: str) -> None:
    assert "hunter2" not in "".join(mistakes(text))


def test_what_nests_too_deep_expands_too_far_or_is_too_big_is_refused_at_once() -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
    )
    assert "aliases expand to more than" in mistakes(bomb)[0]
    merges = "a0: &a0 {k: v}\n" + "".join(
        f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}, <<: *a{i - 1}}}\n" for i in range(1, 40)
    )
    assert "aliases expand to more than" in mistakes(merges)[-1]
    assert "nest" in mistakes("[" * 100_000)[0], "ours or libyaml's limit, whichever is reached first"
    assert "nested more than" in mistakes("envs: " + "{a: " * 60 + "}" * 60)[0]
    assert "bytes, expected at most" in mistakes("#" * (1 << 20) + "\n")[0]
