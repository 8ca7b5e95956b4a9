"""Memory estimates against what was published: formulas of papers, and measurements of engines at work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sky.core.architecture import Architecture
from areal_sky.core.memory import estimate, least
from areal_sky.core.memory_rollout import kv_bytes_per_token, weights_per_device
from areal_sky.core.memory_terms import GIB
from areal_sky.core.memory_train import largest_share, layer_bytes_per_token, lora_parameters
from areal_sky.core.model_table import MODELS, find_model
from areal_sky.core.parallelism import COMFORT_FRAC, nearest, smallest
from areal_sky.errors import InvalidInput
from areal_sky.spec.backends import ENGINES, Backend, parse_backend
from areal_sky.spec.memory import Settings

LLAMA_7B = Architecture("llama-7b", 32, 4096, 11008, 32, 32, 128, 32000)
STATES = ("weights", "gradients", "optimizer")


def known(name: str) -> Architecture:
    return find_model(name).architecture


def gpt(layers: int, hidden: int, heads: int) -> Architecture:
    return Architecture(
        "gpt", layers, hidden, 4 * hidden, heads, heads, hidden // heads, 51200, True, feed_forward_matrices=2
    )


# ---------------------------------------------------------------- training: formulas


@pytest.mark.parametrize(
    ("model", "heads_term", "saved"),
    [(gpt(96, 12288, 96), 80, 0.70), (gpt(105, 20480, 128), 64, 0.65)],
    ids=["GPT-3 175B", "MT-NLG 530B"],
)
def test_a_layer_keeps_what_korthikanti_et_al_derive(model: Architecture, heads_term: int, saved: float) -> None:
    """arXiv 2205.05198, equation 1 and section 5: sbh (34 + 5as/h) bytes; 5as/h is 80 and 64, and not keeping the
    scores saves 70 % and 65 %."""
    eager = layer_bytes_per_token(model, False, Settings(attention="eager", context=2048), False)
    flash = layer_bytes_per_token(model, False, Settings(), False)
    assert eager == model.hidden * (34 + heads_term)
    assert flash == 34 * model.hidden
    assert 1 - flash / eager == pytest.approx(saved, abs=0.006)


@pytest.mark.parametrize("tensor", [1, 8])
def test_activations_of_megatron_are_split_by_tensor_parallelism(tensor: int) -> None:
    """Table 2 of the same, tensor + sequence parallelism: sbh/t (34 + 5as/h), with full recomputation 2sbh/t."""
    model = gpt(96, 12288, 96)
    for recompute, each in (("none", 34), ("full", 2)):
        s = Settings(micro_batch_tokens=2048, recompute=recompute)
        found = estimate(model, "train", Backend("megatron", 1, tensor), s).part("activations")
        assert found == pytest.approx(96 * 2048 * 12288 * each / tensor / GIB)


def test_the_first_pipeline_stage_keeps_a_micro_batch_for_each_stage() -> None:
    """Section 4.2.3 of the same: with 1F1B the first stage keeps as much as if all layers were on it."""
    model = gpt(96, 12288, 96)
    s = Settings(micro_batch_tokens=2048, recompute="none")
    one, eight = (estimate(model, "train", Backend("megatron", 1, 8, p), s).part("activations") for p in (1, 8))
    assert eight == pytest.approx(one)


@pytest.mark.parametrize(("gpus", "gigabytes"), [(1, 120.0), (64, 1.875), (1024, 0.1172)])
def test_fsdp_shards_the_sixteen_bytes_of_zero(gpus: int, gigabytes: float) -> None:
    """arXiv 1910.02054, figure 1 (7.5B parameters: 120 GB, with stage 3 on 64 GPUs 1.9 GB) and table 1."""
    model = Architecture("7.5B", 36, 4096, 11008, 32, 32, 128, 51200)
    found = estimate(model, "train", Backend("fsdp", gpus))
    states = sum(found.part(p) for p in STATES) * GIB / 1e9
    assert states == pytest.approx(gigabytes * model.parameters / 7.5e9, rel=1e-3)


@pytest.mark.parametrize("data", [1, 2, 8])
def test_megatron_takes_six_bytes_and_twelve_shared(data: int) -> None:
    """Megatron Core's guide to the distributed optimizer: bf16 parameters, fp32 gradients: 6 + 12/d bytes."""
    found = estimate(known("llama-3.1-8b"), "train", Backend("megatron", data, 2))
    share = largest_share(known("llama-3.1-8b"), Backend("megatron", data, 2)).all
    assert sum(found.part(p) for p in STATES) * GIB == pytest.approx(share * (6 + 12 / data))


def test_experts_are_split_by_expert_parallelism_and_their_optimizer_over_their_replicas() -> None:
    model = known("qwen3-30b-a3b")
    share = largest_share(model, parse_backend("megatron:d2p2t4e4", ENGINES))
    assert share.experts == model.routed_experts / 2 / 4
    found = estimate(model, "train", "megatron:d2p2t4e4")
    # 16 GPUs / (2 stages x 4 expert ranks) leaves each expert on two devices; so does d2 each dense parameter.
    assert found.part("optimizer") * GIB == pytest.approx(12 * (share.dense / 2 + share.experts / 2))
    halved = estimate(model, "train", "megatron:(attn:d2p2t4|ffn:d1p2t2e4)")
    assert largest_share(model, Backend("megatron", 2, 4, 2, 1, 4, 2)).experts == share.experts / 2
    assert halved.part("weights") < found.part("weights")


def test_lora_trains_adapters_alone() -> None:
    """arXiv 2106.09685: rank x (in + out) for each matrix; of Llama-3.1-8B's seven, rank 16, 41.9M parameters."""
    assert lora_parameters(known("llama-3.1-8b"), 16) == 41_943_040
    full, lora = (estimate(known("llama-3.1-8b"), "train", "fsdp:d1", Settings(lora_rank=r)) for r in (0, 16))
    assert lora.part("weights") == pytest.approx(full.part("weights"))
    assert lora.part("adapters") * GIB == pytest.approx(41_943_040 * 16)
    assert lora.device_gib < full.device_gib / 2


# ---------------------------------------------------------------- training: measured


@pytest.mark.parametrize(
    ("backend", "tokens", "measured_gib"),
    [("fsdp:d8", 32768, 83.9), ("fsdp:d4c2", 65536, 84.2), ("fsdp:d2c4", 131072, 84.0), ("fsdp:d1c8", 262144, 84.5)],
)
def test_llama_8b_with_fsdp_as_torchtitan_measured_it(backend: str, tokens: int, measured_gib: float) -> None:
    """benchmarks/llama3_h100_202412_torchtitan.md, table 2: 8 H100, full activation checkpointing, peak reserved."""
    s = Settings(micro_batch_tokens=tokens, loss="whole")
    assert estimate(known("llama-3.1-8b"), "train", backend, s).device_gib == pytest.approx(measured_gib, rel=0.06)


def test_the_shards_of_128_gpus_instead_of_8_save_what_torchtitan_measured() -> None:
    """The same document, tables 1 and 3: 82.4 GiB on 8 GPUs, 67.0 GiB on 128."""
    s = Settings(micro_batch_tokens=16384, loss="whole")
    on_8, on_128 = (estimate(known("llama-3.1-8b"), "train", f"fsdp:d{n}", s).device_gib for n in (8, 128))
    assert on_8 - on_128 == pytest.approx(82.4 - 67.0, rel=0.1)


def test_llama_70b_with_fsdp_and_tensor_parallelism_is_within_a_quarter() -> None:
    """The same, table 4: 256 GPUs (32 x 8), 16 sequences of 8192: 71.9 GiB, 67.6 with asynchronous TP, in float8."""
    s = Settings(micro_batch_tokens=16 * 8192, loss="whole")
    assert estimate(known("llama-3.1-70b"), "train", "fsdp:d32t8", s).device_gib == pytest.approx(71.9, rel=0.25)


@pytest.mark.parametrize(("recompute", "total_gib"), [("full", 102.20), ("none", 147.02)])
def test_llama_7b_with_adamw_as_the_lomo_paper_measured_it(recompute: str, total_gib: float) -> None:
    """arXiv 2306.09782, table 1: batch 8 x 512, mixed precision AdamW, without and with activation checkpointing."""
    s = Settings(micro_batch_tokens=4096, context=512, attention="eager", recompute=recompute, loss="whole")
    found = estimate(LLAMA_7B, "train", "fsdp:d1", s)
    assert [round(found.part(p), 2) for p in STATES] == [12.55, 12.55, 75.31]  # to the digit
    assert found.device_gib == pytest.approx(total_gib, rel=0.03)


# ---------------------------------------------------------------- rollout: measured


@pytest.mark.parametrize(
    ("model", "backend", "measured_gib"),
    [
        ("llama-3-8b", "vllm:d1", 14.96),  # vllm pull request 10511
        ("llama-3-8b", "vllm:t2", 7.48),
        ("llama-3.1-8b", "vllm:d1", 14.9889),  # vllm pull request 17122
        ("qwen2.5-32b", "vllm:t2", 30.7098),  # vllm issue 15815
        ("qwen3-30b-a3b", "vllm:t4", 14.2474),  # vllm issue 17469
    ],
)
def test_weights_are_what_vllm_loads(model: str, backend: str, measured_gib: float) -> None:
    assert estimate(known(model), "rollout", backend).part("weights") == pytest.approx(measured_gib, rel=0.01)


@pytest.mark.parametrize(
    ("model", "backend", "tokens", "measured_gib"),
    [
        ("qwen2.5-32b", "vllm:t2", 3947 * 16, 7.71),  # vllm issue 15815: 3947 blocks of 16 tokens
        ("qwen3-235b-a22b", "sglang:t4", 367_404, 8.23 * 2),  # vllm issue 21348: SGLang's K and V
    ],
)
def test_a_token_of_kv_cache_takes_what_engines_report(
    model: str, backend: str, tokens: int, measured_gib: float
) -> None:
    each = kv_bytes_per_token(known(model), parse_backend(backend, ENGINES), Settings())
    assert tokens * each / GIB == pytest.approx(measured_gib, rel=0.005)


def test_latent_attention_caches_one_vector_on_every_device() -> None:
    """DeepSeek-V2, arXiv 2405.04434, table 1: (d_c + d_R) l elements, as much as 2.25 groups of GQA. ik_llama.cpp pull
    request 259 reports 1166.62 MiB for 32768 tokens of DeepSeek-R1 in q8_0 (34 bytes for 32 elements)."""
    model = known("deepseek-r1")
    assert model.kv_elements() == 61 * 576 == 61 * 2.25 * 2 * 128
    assert 32768 * model.kv_elements() * 34 / 32 / 2**20 == pytest.approx(1166.62, rel=1e-4)
    one, eight = (kv_bytes_per_token(model, Backend("sglang", 1, t), Settings()) for t in (1, 8))
    assert one == eight == 61 * 576 * 2


def test_windowed_layers_stop_growing() -> None:
    model = known("gpt-oss-20b")
    assert model.kv_elements(128) == model.kv_elements() == 24 * 2 * 8 * 64
    assert model.kv_elements(128_000) == pytest.approx(12 * 2 * 8 * 64 * 1.001)


def test_keys_and_values_are_not_split_finer_than_their_heads() -> None:
    model = known("qwen2.5-7b")  # 4 heads of keys and values
    four, eight = (kv_bytes_per_token(model, Backend("vllm", 1, t), Settings()) for t in (4, 14))
    assert four == eight
    split, _ = weights_per_device(model, Backend("vllm", 1, 14))
    assert split > model.parameters / 14


@pytest.mark.parametrize(("model", "backend"), [("llama-3-8b", "vllm:d1"), ("qwen2.5-32b", "vllm:t2")])
def test_the_workspace_is_near_what_vllm_profiled(model: str, backend: str) -> None:
    """1.26 GiB in both (pull request 10511, issue 15815)."""
    assert estimate(known(model), "rollout", backend).part("workspace") == pytest.approx(1.26, rel=0.15)


def test_mxfp4_holds_the_experts_alone() -> None:
    model = known("gpt-oss-120b")
    found = estimate(model, "rollout", "vllm:d1", Settings(weights="mxfp4")).part("weights") * GIB
    assert found == pytest.approx(model.routed_experts * 4.25 / 8 + (model.parameters - model.routed_experts) * 2)
    assert found / 1e9 == pytest.approx(65, rel=0.02)  # its checkpoint: 60.8 GiB (arXiv 2508.10925, table 1)


# ---------------------------------------------------------------- invariants


settings = st.builds(
    Settings,
    optimizer=st.sampled_from(["adam", "adam_bf16", "adam_8bit", "sgd"]),
    micro_batch_tokens=st.integers(1, 200_000),
    recompute=st.sampled_from(["full", "none"]),
    offload=st.sampled_from(["none", "optimizer", "all"]),
    lora_rank=st.sampled_from([0, 8]),
    context=st.integers(1, 200_000),
    concurrent=st.integers(1, 500),
)
models = st.sampled_from(MODELS).map(lambda m: m.architecture)
degrees = st.sampled_from([1, 2, 4, 8])
backends = st.builds(
    Backend, st.sampled_from(["fsdp", "megatron", "archon", "vllm", "sglang"]), degrees, st.sampled_from([1, 2]),
    st.sampled_from([1, 2]), st.just(1), st.just(1), st.just(1),
)  # fmt: skip


@given(models, backends, settings)
def test_every_part_is_positive_and_the_least_is_no_more(a: Architecture, b: Backend, s: Settings) -> None:
    for stage in ("rollout",) if b.engine in ("vllm", "sglang") else ("train", "inference"):
        found = estimate(a, stage, b, s)
        assert found.parts and all(p.gib > 0 and p.how and p.source for p in (*found.parts, *found.host))
        assert 0 < least(a, stage, b, s).device_gib <= found.device_gib


@given(models, settings, degrees)
def test_more_data_parallelism_never_takes_more_of_a_device(a: Architecture, s: Settings, data: int) -> None:
    for engine in ("fsdp", "megatron"):
        fewer, more = (estimate(a, "train", Backend(engine, d), s) for d in (2 * data, 4 * data))
        assert more.device_gib <= fewer.device_gib + 1e-9


@given(models, settings)
def test_more_tokens_never_take_less(a: Architecture, s: Settings) -> None:
    bigger = replace(s, micro_batch_tokens=s.micro_batch_tokens * 2, context=s.context * 2)
    pairs = (("train", "fsdp:d8"), ("train", "megatron:d2p2"), ("rollout", "vllm:d1"), ("inference", "fsdp:d8"))
    for stage, b in pairs:
        assert estimate(a, stage, b, bigger).device_gib >= estimate(a, stage, b, s).device_gib - 1e-9


# ---------------------------------------------------------------- the smallest that fits


@pytest.mark.parametrize("engine", ["fsdp", "megatron", "sglang"])
@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-7b", "qwen3-30b-a3b", "llama-3.1-70b"])
def test_the_smallest_fits_and_no_smaller_one_does(name: str, engine: str) -> None:
    stage = "rollout" if engine == "sglang" else "train"
    found = smallest(known(name), stage, engine, 79.0)
    assert found is not None
    assert estimate(known(name), stage, found).device_gib <= COMFORT_FRAC * 79.0
    assert found.gpus == 1 or smallest(known(name), stage, engine, 79.0, max_gpus=found.gpus - 1) is None


def test_a_correction_asks_for_more_gpus() -> None:
    model = known("llama-3.1-70b")
    found, corrected = (smallest(model, "train", "megatron", 79.0, correction=c) for c in (1.0, 2.0))
    assert found and corrected and corrected.gpus > found.gpus


def test_nothing_fits_a_tiny_gpu() -> None:
    assert smallest(known("llama-3.1-405b"), "rollout", "vllm", 8.0, max_gpus=64) is None
    assert nearest(known("llama-3.1-405b"), "rollout", Backend("vllm", 1, 8), 8.0, max_gpus=64) is None


def test_the_nearest_keeps_the_number_of_gpus_where_it_can() -> None:
    model = known("qwen3-30b-a3b")
    asked = parse_backend("megatron:d2p2t4e4", ENGINES)
    found = nearest(model, "train", asked, 44.0)
    assert found is not None and found.gpus == asked.gpus and (found.tensor, found.pipeline) == (4, 2)
    instances = nearest(known("qwen2.5-32b"), "rollout", Backend("vllm", 8), 79.0)
    assert instances is not None and (instances.tensor, instances.gpus) == (2, 8)


@pytest.mark.parametrize(
    ("name", "stage", "backend", "reason"),
    [
        ("qwen2.5-7b", "train", "sglang:d8", "cannot do train, expected an engine that trains"),
        ("qwen2.5-7b", "rollout", "fsdp:d8", "expected an engine that generates"),
        ("qwen2.5-7b", "rollout", "vllm:t8", "t8 does not divide its 28 attention heads"),
        ("qwen2.5-7b", "train", "megatron:d4e4", "needs experts, and it has none"),
        ("qwen2.5-7b", "train", "megatron:p32", "p32 is more than its 28 layers"),
        ("qwen3-30b-a3b", "train", "megatron:d3e3", "e3 does not divide its 128 experts"),
    ],
)
def test_what_a_model_does_not_allow_says_why(name: str, stage: str, backend: str, reason: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        estimate(known(name), stage, backend)  # type: ignore[arg-type]
    assert reason in str(refused.value)


def test_wrong_settings_are_told_at_once() -> None:
    with pytest.raises(InvalidInput) as refused:
        Settings(optimizer="adamw", micro_batch_tokens=0, context=2**62)
    assert all(word in str(refused.value) for word in ("'adamw' is none of adam", "micro_batch_tokens: 0", "context"))
