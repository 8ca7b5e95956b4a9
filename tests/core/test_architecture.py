"""Architectures: parameters as published, and what a config.json is read as."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sky.core.architecture import Architecture, from_hf_config
from areal_sky.core.model_table import MODELS, KnownModel, find_model, known_models
from areal_sky.errors import InvalidInput

QWEN3_MOE = {  # huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json, what counts of it
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "head_dim": 128,
    "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 6144, "mlp_only_layers": [],
    "moe_intermediate_size": 768, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "sliding_window": None, "tie_word_embeddings": False,
    "vocab_size": 151936,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
    "kv_lora_rank": 512, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "tie_word_embeddings": False, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "sliding_window": 128,
    "tie_word_embeddings": False, "vocab_size": 201088,
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": 131072, "use_sliding_window": False,
    "tie_word_embeddings": False, "vocab_size": 152064,
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_parameters_are_those_published(model: KnownModel) -> None:
    """The card or paper named in `counts`; published figures have two or three digits."""
    assert model.architecture.parameters / 1e9 == pytest.approx(model.published_b, rel=0.0135)
    if model.active_b is not None:
        a = model.architecture
        left_out = (0, a.embedding, a.embedding + a.output_head)[model.active_without]
        assert (a.active_parameters - left_out) / 1e9 == pytest.approx(model.active_b, rel=0.025)


@pytest.mark.parametrize(
    ("config", "name"),
    [(QWEN3_MOE, "qwen3-30b-a3b"), (DEEPSEEK_V3, "deepseek-v3"), (GPT_OSS, "gpt-oss-20b"), (QWEN2, "qwen2.5-7b")],
)
def test_a_config_json_gives_what_the_table_has(config: dict[str, Any], name: str) -> None:
    assert from_hf_config(config, name) == find_model(name).architecture


def test_a_vision_model_counts_its_text_part() -> None:
    wrapped = {"model_type": "qwen2_5_vl", "vision_config": {"hidden_size": 1280}, "text_config": QWEN2}
    assert from_hf_config(wrapped, "x").parameters == find_model("qwen2.5-7b").architecture.parameters


def test_moe_layers_may_be_every_second_one_or_listed() -> None:
    assert from_hf_config(QWEN3_MOE | {"decoder_sparse_step": 2}, "x").moe_layers == 24
    assert from_hf_config(QWEN3_MOE | {"mlp_only_layers": [0, 1, 2]}, "x").moe_layers == 45
    assert from_hf_config(DEEPSEEK_V3 | {"moe_layer_freq": [0] * 3 + [1] * 58}, "x").moe_layers == 58


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": None}, "it has no hidden_size"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is many"),
        ({"vocab_size": 1e300}, "vocab_size is 1e"),
        ({"vocab_size": float("nan")}, "vocab_size is nan"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_experts_per_tok": 500}, "500 active experts of 128"),
        ({"num_key_value_heads": 64}, "above num_attention_heads"),
    ],
)
def test_a_wrong_config_says_what_is_wrong(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        from_hf_config(QWEN3_MOE | change, "mine")
    assert "mine: " in str(refused.value) and reason in str(refused.value)


def test_every_mistake_of_a_config_is_told_at_once() -> None:
    with pytest.raises(InvalidInput) as refused:
        from_hf_config({"model_type": "bert"}, "b")
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "intermediate_size"):
        assert key in str(refused.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*QWEN3_MOE, *DEEPSEEK_V3, *GPT_OSS, "text_config"]), JSON) | JSON)
def test_no_json_breaks_the_reader(raw: Any) -> None:
    try:
        read = from_hf_config(raw, "x")
    except InvalidInput:
        return
    assert isinstance(read, Architecture) and read.parameters > 0


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-v3"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("QWEN2.5-7B", "qwen2.5-7b"),
        ("Qwen/QwQ-32B", "qwen2.5-32b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
    ],
)
def test_models_are_found_by_the_names_people_write(text: str, name: str) -> None:
    assert find_model(text).name == name


def test_an_unknown_model_gets_the_nearest_names() -> None:
    with pytest.raises(InvalidInput, match=r"no known model `qwen3-30b`.*did you mean `qwen3-30b-a3b`"):
        find_model("qwen3-30b")
    with pytest.raises(InvalidInput, match=r"known are qwen2\.5-0\.5b, "):
        find_model("my-own")


def test_no_two_models_of_the_table_go_by_one_name() -> None:
    assert len(set(known_models())) == len(MODELS)
    for m in MODELS:
        assert {find_model(n).name for n in (m.name, m.repo, *m.aliases)} == {m.name}
