"""plan(): which machine, where, in which market, at what price, and what is said about it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_sky.adapters.catalog import shipped_offers
from areal_sky.core.launch import draft, head_env, node_env, plan
from areal_sky.core.model import GroupPlan, LaunchPlan, NodeShape, Offer
from areal_sky.core.nodeenv import HeadEnv, NodeEnv
from areal_sky.core.offers import Place
from areal_sky.core.prices import group_usd_per_hour, market_of, plan_usd_per_hour, replica_usd_per_hour
from areal_sky.errors import InvalidInput, Refused
from areal_sky.spec import load_text
from areal_sky.spec.accelerators import matching
from areal_sky.spec.cluster import ClusterSpec

NOW_S = 1_790_000_000.0


def spec_of(text: str) -> ClusterSpec:
    return load_text(text, "case.yaml", NOW_S)


def planned(text: str, offers: tuple[Offer, ...] | None = None) -> LaunchPlan:
    return plan(spec_of(text), shipped_offers() if offers is None else offers)


def group(text: str) -> GroupPlan:
    return planned(text).groups[0]


def offer(name: str, gpus: float, usd: float, market: Any = "on_demand", region: str = "r1", **shape: Any) -> Offer:
    accelerator = shape.pop("accelerator", "A100" if gpus else None)
    filled = {"cpus": 8.0, "memory_gib": 64.0, "gpu_memory_gib": 40.0 if gpus else None} | shape
    return Offer(
        "aws", region, None, name, NodeShape(gpus=gpus, accelerator=accelerator, **filled), market, usd, "test"
    )


# ---------------------------------------------------------------- which machine


def test_the_articles_snippet() -> None:
    p = planned("resources: {accelerators: V100:8}\nscheduling: {strategy: dynamic}\n")
    g = p.groups[0]
    assert (g.offer.cloud, g.offer.instance_type, g.offer.price_usd_per_hour) == ("lambda", "gpu_8x_v100", 6.32)
    assert (g.min_replicas, g.max_replicas, g.nodes_per_replica, g.elastic) == (1, 1, 1, False)
    assert plan_usd_per_hour(p) == (pytest.approx(6.52), ())
    assert (p.head.offer.cloud, p.head.offer.region, p.head.market) == ("lambda", "us-east-1", "on_demand")


@pytest.mark.parametrize(
    ("resources", "instance"),
    [
        ("{accelerators: {H100: 8, L40S: 8}, infra: aws/us-east-1}", "g6e.48xlarge"),  # a mapping: the cheapest
        ("{accelerators: [H100:8, L40S:8], infra: aws/us-east-1}", "p5.48xlarge"),  # a list: in order
        ("{accelerators: ['80GB+:8'], infra: aws/us-east-1}", "p4de.24xlarge"),
        ("{accelerators: '141GB:8', infra: aws}", "p5en.48xlarge"),
        ("{accelerators: h100:8, infra: nebius}", "gpu-h100-sxm_8gpu-128vcpu-1600gb"),
        ("{accelerators: L40S, infra: nebius, cpus: 16+}", "gpu-l40s-d_1gpu-16vcpu-96gb"),
        ("{accelerators: H100:8, infra: '*/us-east4'}", "a3-highgpu-8g"),
        ("{instance_type: g6.12xlarge, infra: aws}", "g6.12xlarge"),
        ("{cpus: 8+, infra: gcp}", "n2-standard-8"),
        ("{any_of: [{infra: aws, accelerators: 'V100:8'}, {infra: lambda, accelerators: 'H100:8'}]}", "p3.16xlarge"),
        ("{ordered: [{infra: aws, accelerators: 'H100:8'}, {infra: lambda, accelerators: 'V100:8'}]}", "p5.48xlarge"),
    ],
)
def test_the_machine_for_an_ask(resources: str, instance: str) -> None:
    assert group(f"resources: {resources}\n").offer.instance_type == instance


def test_minima_rule_out_machines() -> None:
    offers = (
        offer("small", 8, 1.0, cpus=4),
        offer("big", 8, 9.0, cpus=64, memory_gib=512),
        offer("cpu", 0, 0.1, cpus=16),
    )
    assert planned("resources: {accelerators: A100:8, cpus: 32+}\n", offers).groups[0].offer.instance_type == "big"
    assert planned("resources: {accelerators: A100:8, memory: 256+}\n", offers).groups[0].offer.instance_type == "big"
    assert planned("resources: {accelerators: A100:8}\n", offers).groups[0].offer.instance_type == "small"


def test_alternatives_are_next_best_and_in_reach_of_the_head() -> None:
    g = group("infra: aws\nresources: {accelerators: {H100: 8, A100: 8, A100-80GB: 8}}\n")
    assert [o.instance_type for o in g.alternatives] == ["p4de.24xlarge", "p5.48xlarge"]
    assert {o.region for o in g.alternatives} == {g.offer.region}


def test_all_groups_share_the_region_where_the_whole_costs_least() -> None:
    offers = (
        offer("head", 0, 1.0, region="r1"), offer("head", 0, 1.0, region="r2"),
        offer("a", 8, 10.0, region="r1"), offer("a", 8, 9.0, region="r2"),
        offer("b", 4, 1.0, region="r1"), offer("b", 4, 5.0, region="r2"),
    )  # fmt: skip
    text = "node_groups: {x: {resources: {accelerators: A100:8}}, y: {resources: {accelerators: A100:4}}}\n"
    p = planned(text, offers)
    assert {g.offer.region for g in (p.head, *p.groups)} == {"r1"}
    assert any("region: aws/r1 costs least of the 2" in line and "$12.00/h" in line for line in p.guesses)


def test_groups_that_share_no_region_are_refused() -> None:
    text = (
        "infra: aws/us-east-1\nnode_groups:\n  near: {resources: {accelerators: V100:8}}\n"
        "  far: {resources: {accelerators: H100:8, infra: gcp/us-central1}}\n"
    )
    with pytest.raises(Refused, match="mixed regions: far is in gcp/us-central1 but the head in aws/us-east-1"):
        planned(text)
    shown = draft(spec_of(text), shipped_offers())
    assert len(shown.refusals) == 1 and [g.offer.cloud for g in shown.groups] == ["aws", "gcp"]


def test_groups_that_only_happen_to_share_no_region_are_told_where_they_could_be() -> None:
    offers = (
        offer("head", 0, 1.0, region="r1"), offer("a", 8, 10.0, region="r1"),
        offer("b", 4, 1.0, region="r2"), offer("b", 4, 1.0, region="r3"),
    )  # fmt: skip
    text = "node_groups: {x: {resources: {accelerators: A100:8}}, y: {resources: {accelerators: A100:4}}}\n"
    with pytest.raises(Refused, match=r"y is in aws/r2 but the head in aws/r1.*y can be had in aws/r2, aws/r3"):
        planned(text, offers)


def test_gcp_reaches_across_regions() -> None:
    text = (
        "infra: gcp/us-central1\nnode_groups:\n  near: {resources: {accelerators: H100:8}}\n"
        "  far: {resources: {accelerators: H100:8, infra: gcp/us-east4}}\n"
    )
    p = planned(text)
    assert any("far is in gcp/us-east4" in line and "default VPC they do" in line for line in p.unknowns)


def test_slurm_opens_no_ports() -> None:
    with pytest.raises(Refused, match="main: SkyPilot opens no ports on Slurm"):
        planned("infra: slurm/hpc/gpu\nresources: {accelerators: V100:8, ports: 8080}\n")


def test_a_cap_per_node_rules_machines_out_and_refuses_when_none_is_left() -> None:
    text = "infra: aws/us-east-1\nresources: {{accelerators: {{V100: 8, L4: 8}}, max_hourly_cost: {cap}}}\n"
    assert planned(text.format(cap=30)).groups[0].offer.instance_type == "g6.48xlarge"
    assert planned(text.format(cap=30)).groups[0].alternatives[0].instance_type == "p3.16xlarge"
    assert planned(text.format(cap=20)).groups[0].alternatives == ()
    # The spot price of a machine is no way under the cap for a group that is on demand.
    with pytest.raises(Refused, match=r"max_hourly_cost is 5.00 and .* g6.48xlarge on aws/us-east-1, costs \$13.35/h"):
        planned(text.format(cap=5))


def test_every_refusal_is_told_at_once() -> None:
    text = (
        "node_groups:\n  a: {resources: {accelerators: H100:8, infra: aws/us-east-1}}\n"
        "  b: {resources: {accelerators: H100:8, infra: gcp/us-east4}}\nbudget: {max_hourly_usd: 30}\n"
    )
    with pytest.raises(Refused) as refused:
        planned(text)
    said = str(refused.value)
    assert "mixed regions" in said and "more than budget.max_hourly_usd 30.00" in said
    assert "one node of it alone costs $55.04/h" in said


def test_what_each_accelerator_would_cost() -> None:
    text = "infra: {infra}\nresources: {{accelerators: {{V100: 8, H100: 8, MI300X: 8}}}}\nnum_nodes: 2\n"
    g = group(text.format(infra="aws/us-east-1"))
    assert [(c.accelerator, c.usd_per_hour, c.elsewhere) for c in g.choices] == [
        ("V100:8", pytest.approx(48.96), False), ("H100:8", pytest.approx(110.08), False), ("MI300X:8", None, False),
    ]  # fmt: skip
    assert g.choices[2].why == "no price known"
    assert group("infra: aws\nresources: {accelerators: V100:8}\n").choices == ()
    names = [c.accelerator for c in group("infra: aws/us-east-1\nresources: {accelerators: '40GB+:8'}\n").choices]
    assert names == ["A100:8", "A100-80GB:8", "L40S:8", "H100:8", "H200:8"]  # the cheapest first


def test_the_next_best_places_for_the_whole() -> None:
    p = planned("resources: {accelerators: H100:8}\n")
    assert p.next_places[0][0] == "lambda/us-east-1" and len(p.next_places) == 3
    assert [usd for _, usd in p.next_places] == sorted(usd for _, usd in p.next_places)
    assert plan_usd_per_hour(p)[0] <= p.next_places[0][1]


def test_ports_on_aws_are_warned_of() -> None:
    p = planned("infra: aws\nresources: {accelerators: V100:8, ports: 8080}\n")
    assert any("security group" in line for line in p.unknowns)


@pytest.mark.parametrize(
    ("infra", "place"),
    [
        (None, Place()), ("aws", Place("aws")), ("AWS/r1", Place("aws", "r1")), ("*/r1", Place(None, "r1")),
        ("gcp/r/z", Place("gcp", "r", "z")), ("aws/*/z", Place("aws", None, "z")),
        ("k8s/arn:x/y/z", Place("kubernetes", "arn:x/y/z")), ("slurm/hpc/gpu", Place("slurm", "hpc", "gpu")),
    ],
)  # fmt: skip
def test_infra_strings(infra: str | None, place: Place) -> None:
    assert Place.parse(infra) == place


# ---------------------------------------------------------------- markets


ELASTIC = (
    "infra: {infra}\nnode_groups: {{g: {{resources: {{accelerators: {gpu}}}, "
    "min_replicas: 1, max_replicas: 4, {market}}}}}\n"
)


def elastic(market: str, infra: str = "aws/us-east-1", gpu: str = "V100:8") -> GroupPlan:
    return group(ELASTIC.format(infra=infra, gpu=gpu, market=market))


def test_a_mixed_group_fills_its_on_demand_base_first() -> None:
    g = elastic("market: mixed, on_demand_base: 2")
    assert g.offer.market == "on_demand" and g.spot_offer is not None
    assert [market_of(g, n) for n in range(4)] == ["on_demand", "on_demand", "spot", "spot"]
    assert group_usd_per_hour(g, 4) == pytest.approx(2 * 24.48 + 2 * 2.6694)
    assert elastic("market: mixed, on_demand_base: 0").offer.market == "spot"


def test_spot_and_on_demand_are_the_same_machine() -> None:
    g = elastic("market: spot", gpu="'40GB+:8'")
    assert g.offer == g.spot_offer
    assert g.on_demand_offer is not None and g.on_demand_offer.instance_type == g.offer.instance_type
    assert g.on_demand_offer.region == g.offer.region


@pytest.mark.parametrize("infra", ["slurm/hpc", "k8s/ctx", "lambda"])
def test_spot_where_there_is_none_is_ignored_in_words(infra: str) -> None:
    p = planned(ELASTIC.format(infra=infra, gpu="V100:8", market="market: spot"))
    assert p.groups[0].market == "on_demand" and p.groups[0].spot_offer is None
    assert any("market spot is ignored" in line for line in p.guesses)
    assert "no spot machines" in p.groups[0].no_spot


def test_spot_on_slurm_is_a_partition_that_the_spec_names() -> None:
    text = ELASTIC.format(infra="slurm/hpc/gpu", gpu="V100:8", market="market: mixed, on_demand_base: 1")
    p = planned(text + "spot: {slurm_partition: preempt}\n")
    g = p.groups[0]
    assert (g.market, g.spot_partition, g.no_spot) == ("mixed", "preempt", "")
    assert g.spot_offer is not None and (g.spot_offer.region, g.spot_offer.zone) == ("hpc", "preempt")
    assert g.on_demand_offer is not None and g.on_demand_offer.zone == "gpu"
    assert p.head.market == "on_demand" and p.head.offer.zone == "gpu"
    assert not any("ignored" in line for line in p.guesses)


def test_the_head_is_on_spot_only_where_its_own_resources_say_so() -> None:
    spot = "resources: {accelerators: V100:8, use_spot: true}\n"
    p = planned("infra: aws/us-east-1\n" + spot)
    assert (p.head.market, p.groups[0].market) == ("on_demand", "spot")
    p = planned("infra: aws/us-east-1\nhead: {resources: {use_spot: true}}\n" + spot)
    assert p.head.market == "spot" and p.head.offer.market == "spot"
    assert any("head: on spot as the spec says" in line for line in p.guesses)


def test_the_price_without_spot_is_said_beside_the_budget() -> None:
    text = ELASTIC.format(infra="aws/us-east-1", gpu="V100:8", market="market: spot")
    p = planned(text + "spot: {patience: 5m, hold: 1h}\nbudget: {max_hourly_usd: 50}\n")
    assert (p.spot.give_up_s, p.spot.hold_s) == (300, 3600)
    assert any("refused for 5m" in x and "$98.30/h" in x and "more than max_hourly_usd 50.00" in x for x in p.guesses)


def test_the_cheapest_zone_stands_for_a_region() -> None:
    zones = [replace(offer("a", 8, usd, "spot"), zone=z) for z, usd in (("z2", 3.0), ("z1", 2.0), ("z3", 2.0))]
    p = planned(
        "infra: aws/r1\nresources: {accelerators: A100:8, use_spot: true}\n", (offer("a", 8, 9.0), *zones)
    )
    assert p.groups[0].offer.zone == "z1" and p.groups[0].offer.price_usd_per_hour == 2.0
    p = planned(
        "resources: {accelerators: A100:8, use_spot: true, infra: aws/r1/z2}\n", (offer("a", 8, 9.0), *zones)
    )
    assert p.groups[0].offer.zone == "z2"


def test_a_dear_spot_price_is_not_taken() -> None:
    # Here spot costs 20.11 of 23.57 on demand: 0.85 of it.
    text = ELASTIC.format(infra="gcp/us-central1", gpu="A100-80GB:8", market="market: mixed")
    assert planned(text + "spot: {max_spot_price_frac: 0.9}\n").groups[0].spot_offer is not None
    p = planned(text + "spot: {max_spot_price_frac: 0.6}\n")
    assert p.groups[0].market == "on_demand" and any("0.6 of the on-demand price" in line for line in p.guesses)


def test_a_fixed_group_is_one_replica_priced_as_a_gang() -> None:
    g = group("infra: aws/us-east-1\nresources: {accelerators: V100:8}\nnum_nodes: 3\n")
    assert (g.min_replicas, g.max_replicas, g.nodes_per_replica) == (1, 1, 3)
    assert replica_usd_per_hour(g, "on_demand") == pytest.approx(3 * 24.48)


# ---------------------------------------------------------------- what no table lists


def test_an_unlisted_machine_has_a_guessed_shape_and_no_price() -> None:
    p = planned("infra: aws\nresources: {accelerators: H100:3}\n")
    g = p.groups[0]
    assert (g.offer.price_usd_per_hour, g.offer.source) == (None, "no price known")
    assert (g.shape.gpus, g.shape.cpus, g.shape.memory_gib, g.shape.gpu_memory_gib) == (3, 12, 48, 80)
    assert (g.offer.cloud, g.offer.region) == ("aws", p.head.offer.region)
    assert any("12 vCPUs and 48 GiB (4 vCPUs per GPU)" in line for line in p.guesses)
    assert any("no price known for H100:3" in line and "has 8 per machine" in line for line in p.unknowns)
    assert group_usd_per_hour(g, 1) is None
    assert plan_usd_per_hour(p)[1] == (g.name,)


def test_declared_cpus_and_memory_are_not_guessed() -> None:
    p = planned("infra: slurm/hpc\nresources: {accelerators: H100:8, cpus: 96, memory: 1000}\n")
    assert (p.groups[0].shape.cpus, p.groups[0].shape.memory_gib) == (96, 1000)
    assert not any("vCPUs" in line for line in p.guesses if line.startswith("main"))


def test_tpus_are_no_gpus_to_ray() -> None:
    p = planned("infra: gcp\nresources: {accelerators: tpu-v6e-8}\n")
    assert p.groups[0].shape.gpus == 0 and p.groups[0].shape.accelerator == "tpu-v6e-8"
    assert any("TPU" in line for line in p.unknowns)


# ---------------------------------------------------------------- local


def test_local_nodes_have_the_declared_shape_and_are_priced_as_if_on_a_cloud() -> None:
    p = planned("infra: local\nresources: {accelerators: V100:8, cpus: 16, memory: 64}\n")
    g = p.groups[0]
    assert (g.shape.gpus, g.shape.cpus, g.shape.memory_gib) == (8, 16, 64)
    assert (g.offer.cloud, g.offer.price_usd_per_hour) == ("local", 6.32)
    assert g.offer.source.startswith("as if on lambda us-east-1")


def test_a_local_node_without_a_shape_takes_the_real_machines() -> None:
    p = planned("infra: local\nresources: {accelerators: V100:8}\n")
    assert (p.groups[0].shape.cpus, p.groups[0].shape.memory_gib) == (92, 448)
    assert any("taken from lambda gpu_8x_v100" in line for line in p.guesses)


# Shares of lambda's gpu_8x_v100 (6.32 for 8) and of two AWS g5.xlarge (1.006 for 1), the least per GPU in the table.
@pytest.mark.parametrize(("ask", "usd"), [("V100:2", 1.58), ("V100:0.5", 0.395), ("A10G:2", 2.012)])
def test_a_local_node_of_any_size_is_priced_by_its_share(ask: str, usd: float) -> None:
    p = planned(f"infra: local\nresources: {{accelerators: '{ask}'}}\n")
    assert p.groups[0].shape.gpus == float(ask.split(":")[1])
    assert p.groups[0].offer.price_usd_per_hour == pytest.approx(usd)
    assert any("is priced as" in line for line in p.guesses)


def test_local_spot_is_priced_as_if() -> None:
    g = elastic("market: spot", infra="local", gpu="V100:8")
    assert g.offer.market == "spot" and g.offer.price_usd_per_hour == pytest.approx(2.6694)
    assert g.on_demand_offer is not None and g.on_demand_offer.shape == g.offer.shape


def test_a_local_accelerator_that_no_table_has_needs_a_shape_all_the_same() -> None:
    g = group("infra: local\nresources: {accelerators: MI300X:8}\n")
    assert g.offer.price_usd_per_hour is None and g.shape.cpus == 32 and g.offer.cloud == "local"


# ---------------------------------------------------------------- budget


def test_over_budget_is_refused_with_the_numbers() -> None:
    text = "infra: aws/us-east-1\nresources: {accelerators: H100:8}\nnum_nodes: 2\nbudget: {max_hourly_usd: 100}\n"
    with pytest.raises(Refused) as refused:
        planned(text)
    said = str(refused.value)
    assert "$110.46/h" in said and "100.00" in said and "$110.08/h" in said and "p5.48xlarge" in said


def test_growth_over_budget_is_said_not_refused() -> None:
    p = planned(ELASTIC.format(infra="aws/us-east-1", gpu="V100:8", market="") + "budget: {max_hourly_usd: 50}\n")
    assert any("$98.30/h at the largest is more than max_hourly_usd 50.00" in line for line in p.guesses)


def test_how_long_the_money_lasts() -> None:
    p = planned("infra: aws/us-east-1\nresources: {accelerators: V100:8}\nbudget: {max_total_usd: 2486.4}\n")
    assert any("lasts 100 h at the smallest" in line for line in p.guesses)


def test_a_budget_without_prices_is_said_to_be_blind() -> None:
    p = planned("infra: slurm/hpc\nresources: {accelerators: H100:8}\nbudget: {max_hourly_usd: 1}\n")
    assert any("cannot be held against head, main" in line for line in p.unknowns)


# ---------------------------------------------------------------- what each machine is told


FULL = (
    "name: c\ninfra: {infra}\nnode_groups:\n  t: {{resources: {{accelerators: V100:8}}, replicas: 2}}\n"
    "  r: {{resources: {{accelerators: V100:8}}, min_replicas: 0, max_replicas: 3}}\n"
    "models: [{{name: m, model_type: moe}}]\nscheduling: {{priority: [{{model_type: moe, weight: 1.5}}]}}\n"
)


@pytest.mark.parametrize("infra", ["local", "aws/us-east-1"])
def test_what_a_head_and_a_node_are_told_survives_the_environment(infra: str) -> None:
    spec = spec_of(FULL.format(infra=infra))
    p = plan(spec, shipped_offers())
    head = head_env(spec, p, state_dir="/s", ray_port=0, gateway_port=0, lease_s=9.0)
    assert HeadEnv.from_env(head.to_env()) == head
    assert [(g.name, g.nodes_per_replica, g.min_replicas, g.max_replicas) for g in head.groups] == [
        ("t", 2, 1, 1),
        ("r", 1, 0, 3),
    ]
    assert (head.weights, head.models, head.replica) == ((("moe", 1.5),), (("m", "moe"),), "c-head-0")
    node = node_env(spec, p, "r", "c-r-1", 0, head_ip="h", ray_port=1, gateway_port=2, state_dir="/n")
    assert NodeEnv.from_env(node.to_env()) == node
    assert node.simulated_gpus is (infra == "local")
    assert (node.shape is not None) is (infra == "local") and (head.shape is not None) is (infra == "local")


def test_single_variables_override_the_config() -> None:
    spec = spec_of(FULL.format(infra="aws"))
    node = node_env(spec, plan(spec, shipped_offers()), "r", "c-r-0", 0, head_ip="", state_dir="/n")
    env = {"AREAL_SKY_HEAD_IP": "10.0.0.1", "AREAL_SKY_REPLICA": "c-r-7", "AREAL_SKY_RAY_PORT": "7000"}
    told = NodeEnv.from_env(node.to_env() | env | {"SKYPILOT_NODE_RANK": "3"})
    assert (told.head_ip, told.replica, told.ray_port, told.index) == ("10.0.0.1", "c-r-7", 7000, 3)
    with pytest.raises(InvalidInput, match="AREAL_SKY_RAY_PORT"):
        NodeEnv.from_env(node.to_env() | {"AREAL_SKY_RAY_PORT": "many"})


def test_a_guessed_shape_does_not_limit_what_may_be_submitted() -> None:
    spec = spec_of("infra: slurm/hpc\nresources: {accelerators: H100:8}\n")
    shape = head_env(spec, plan(spec, shipped_offers()), state_dir="/s").groups[0].shape
    assert shape.gpus == 8 and shape.memory_gib > 100_000


def test_an_unknown_group_is_named_with_the_known_ones() -> None:
    spec = spec_of(FULL.format(infra="local"))
    with pytest.raises(InvalidInput, match="it has t, r"):
        node_env(spec, plan(spec, shipped_offers()), "x", "c-x-0", 0, head_ip="h", state_dir="/n")


# ---------------------------------------------------------------- properties


asks = st.sampled_from(["V100:8", "H100:8", "A100:8", "L4:4", "'80GB+:8'", "H100:3", "V100:0.5", "[H100:8, A100:8]"])
infras = st.sampled_from(["", "infra: aws\n", "infra: gcp/us-east4\n", "infra: local\n", "infra: slurm/x\n"])
markets = st.sampled_from(["on_demand", "spot", "mixed"])


@settings(max_examples=60, deadline=None)
@given(
    asks, infras, markets, st.integers(0, 2), st.integers(2, 5), st.integers(1, 3), st.randoms(use_true_random=False)
)
def test_a_plan_depends_on_no_order_and_gives_what_was_asked(
    ask: str, infra: str, market: str, least: int, most: int, nodes: int, rnd: random.Random
) -> None:
    text = (
        f"{infra}node_groups: {{g: {{resources: {{accelerators: {ask}}}, min_replicas: {least}, max_replicas: {most}, "
        f"nodes_per_replica: {nodes}, market: {market}}}}}\n"
    )
    spec = spec_of(text)
    shuffled = list(shipped_offers())
    rnd.shuffle(shuffled)
    p = plan(spec, shipped_offers())
    assert plan(spec, shuffled) == p
    g = p.groups[0]
    wanted = spec.groups[0].resources.accelerators
    assert any(g.shape.gpus == a.count for a in wanted)
    if g.shape.accelerator is None:  # asked for by memory, where no table says what there is
        assert g.offer.price_usd_per_hour is None and wanted[0].name is None
    else:
        assert any(g.shape.accelerator in matching(a) and g.shape.gpus == a.count for a in wanted)
    assert g.offer in (g.on_demand_offer, g.spot_offer)
    for n in range(most):
        now, more = group_usd_per_hour(g, n), group_usd_per_hour(g, n + 1)
        assert more is None or (now is not None and more >= now)
    if infra == "infra: local\n":
        assert g.offer.cloud == "local"
