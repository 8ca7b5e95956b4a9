"""What a language model is made of, as far as memory goes: read from a Hugging Face config.json, counted in parameters.

Counts follow the layouts of the `transformers` modelling files (Llama, Qwen2, Qwen3, Mixtral, DeepSeek-V2/V3,
GPT-OSS, GLM-4-MoE): gated feed-forward, RMS norms, grouped-query or multi-head latent attention. They agree with what
the models' cards publish within 1 % (tests/core/test_architecture.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from areal_sky.errors import InvalidInput

MAX_SIZE = 10**7  # of any dimension: a larger one is no model but a slip


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values share one compressed vector.

    `q_rank` None: queries are not compressed. Sizes per head but for the ranks.
    """

    kv_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    q_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """One decoder. Sizes count elements.

    `intermediate` is the feed-forward size of a dense layer, `expert_intermediate` that of one expert. The first
    `layers - moe_layers` layers are dense. `active_experts` of `experts` serve a token, beside `shared_experts` that
    serve all. `window_layers` keep only the last `window` tokens in their KV cache. `feed_forward_matrices` is 3 for
    gated layers (SwiGLU), 2 for GPT-2 and GPT-3.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    active_experts: int = 0
    expert_intermediate: int = 0
    shared_experts: int = 0
    moe_layers: int = 0
    qkv_bias: bool = False
    all_bias: bool = False
    latent: LatentAttention | None = None
    window: int = 0
    window_layers: int = 0
    feed_forward_matrices: int = 3

    @property
    def is_moe(self) -> bool:
        return self.moe_layers > 0

    @property
    def dense_layers(self) -> int:
        return self.layers - self.moe_layers

    @property
    def embedding(self) -> int:
        """Parameters of the input embedding."""
        return self.vocabulary * self.hidden

    @property
    def output_head(self) -> int:
        """Parameters of the output projection of its own; 0 where it is the embedding."""
        return 0 if self.tied else self.embedding

    @property
    def attention(self) -> int:
        """Parameters of one layer's attention, its projections' biases and norms of heads included."""
        if self.latent is not None:
            return self._latent_attention(self.latent)
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden * (2 * q + 2 * kv)
        if self.all_bias:  # GPT-OSS: biases everywhere, one sink per head
            return weights + q + 2 * kv + self.hidden + self.heads
        return weights + (q + 2 * kv if self.qkv_bias else 0)

    @property
    def dense_feed_forward(self) -> int:
        return self.feed_forward_matrices * self.hidden * self.intermediate

    @property
    def expert(self) -> int:
        """Parameters of one expert."""
        bias = 2 * self.expert_intermediate + self.hidden if self.all_bias else 0
        return self.feed_forward_matrices * self.hidden * self.expert_intermediate + bias

    @property
    def router(self) -> int:
        return self.experts * (self.hidden + (1 if self.all_bias else 0))

    @property
    def norms(self) -> int:
        """Parameters of one layer's two norms."""
        return 2 * self.hidden

    @property
    def routed_experts(self) -> int:
        """Parameters of all routed experts of all layers: what expert parallelism splits."""
        return self.moe_layers * self.experts * self.expert

    @property
    def layers_without_experts(self) -> int:
        """Parameters of all layers but the routed experts: what tensor parallelism splits."""
        per_moe = self.router + self.shared_experts * self.expert
        shared = self.moe_layers * per_moe + self.dense_layers * self.dense_feed_forward
        return self.layers * (self.attention + self.norms) + shared

    @property
    def parameters(self) -> int:
        """All of them, without heads for multi-token prediction."""
        return self.embedding + self.output_head + self.layers_without_experts + self.routed_experts + self.hidden

    @property
    def active_parameters(self) -> int:
        """Those that one token meets."""
        idle = self.moe_layers * (self.experts - self.active_experts) * self.expert
        return self.parameters - idle

    def kv_elements(self, context: int | None = None) -> float:
        """Elements of the KV cache per token and replica, over all layers.

        Two vectors of each KV head; with latent attention one compressed vector and the rotary part of the key
        (DeepSeek-V2, table 1). Windowed layers stop growing at `window` tokens, so that a sequence of `context` tokens
        takes less per token; without `context` their saving is left out.
        """
        if self.latent is not None:
            return float(self.layers * (self.latent.kv_rank + self.latent.rope_dim))
        each = 2 * self.kv_heads * self.head_dim
        short = self.window_layers * min(1.0, self.window / context) if context and self.window else self.window_layers
        return each * (self.layers - self.window_layers + short)

    def _latent_attention(self, a: LatentAttention) -> int:
        qk = a.nope_dim + a.rope_dim
        q_rank = a.q_rank
        queries = self.hidden * self.heads * qk
        if q_rank is not None:
            queries = self.hidden * q_rank + q_rank + q_rank * self.heads * qk
        down = self.hidden * (a.kv_rank + a.rope_dim) + a.kv_rank
        up = a.kv_rank * self.heads * (a.nope_dim + a.v_dim)
        return queries + down + up + self.heads * a.v_dim * self.hidden


# ---------------------------------------------------------------- from config.json


def from_hf_config(raw: object, name: str) -> Architecture:
    """The architecture that a Hugging Face config.json describes. Raises InvalidInput listing every mistake.

    Vision-language models count their `text_config` alone.
    """
    if not isinstance(raw, Mapping):
        raise InvalidInput(f"{name}: expected a JSON object, as a Hugging Face config.json is")
    top = cast("Mapping[str, Any]", raw)
    inner = top.get("text_config")
    config = _Config({**top, **cast("Mapping[str, Any]", inner)} if isinstance(inner, Mapping) else dict(top), name)
    layers, hidden = config.size("num_hidden_layers", "n_layer"), config.size("hidden_size", "n_embd")
    heads = config.size("num_attention_heads", "n_head")
    gpt2 = config.values.get("model_type") == "gpt2"
    experts = config.size("num_experts", "n_routed_experts", "num_local_experts", default=0)
    moe_layers = config.moe_layers(layers) if experts else 0
    intermediate = config.size("intermediate_size", "n_inner", default=4 * hidden if gpt2 else None)
    latent = None
    if config.values.get("kv_lora_rank"):
        latent = LatentAttention(
            config.size("kv_lora_rank"),
            config.size("qk_rope_head_dim"),
            config.size("qk_nope_head_dim"),
            config.size("v_head_dim"),
            config.size("q_lora_rank", default=0) or None,
        )
    kinds = config.values.get("layer_types")
    windowed = sum(k == "sliding_attention" for k in cast("list[Any]", kinds)) if isinstance(kinds, list) else 0
    family = str(config.values.get("model_type", ""))
    made = Architecture(
        name=name,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=config.size("num_key_value_heads", default=heads),
        head_dim=config.size("head_dim", default=hidden // heads if heads else 0) if latent is None else 0,
        vocabulary=config.size("vocab_size"),
        # Transformers' default is True, but these families' own configuration classes say False.
        tied=bool(config.values.get("tie_word_embeddings", family in ("gpt2", "gemma", "gemma2", "gemma3_text"))),
        experts=experts if moe_layers else 0,
        active_experts=config.size("num_experts_per_tok", "experts_per_token", default=0) if moe_layers else 0,
        expert_intermediate=config.size("moe_intermediate_size", default=intermediate) if moe_layers else 0,
        shared_experts=config.shared_experts() if moe_layers else 0,
        moe_layers=moe_layers,
        qkv_bias=bool(config.values.get("attention_bias", family == "qwen2")) and family != "gpt_oss",
        all_bias=family == "gpt_oss",
        latent=latent,
        window=config.size("sliding_window", default=0) if windowed else 0,
        window_layers=windowed,
        feed_forward_matrices=2 if gpt2 else 3,
    )
    if made.active_experts > made.experts:
        config.wrong.append(f"{made.active_experts} active experts of {made.experts}")
    if latent is None and made.kv_heads > made.heads:
        config.wrong.append(f"num_key_value_heads {made.kv_heads} is above num_attention_heads {made.heads}")
    if config.wrong:
        raise InvalidInput(f"{name}: " + "; ".join(dict.fromkeys(config.wrong)))
    return made


class _Config:
    def __init__(self, values: dict[str, Any], name: str):
        self.values, self.name = values, name
        self.wrong: list[str] = []

    def size(self, *keys: str, default: int | None = None) -> int:
        """The first of `keys` that is there: a whole number from 0 to MAX_SIZE, above 0 where it has no default."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            whole = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if whole and value == int(value) and (1 if default is None else 0) <= value <= MAX_SIZE:
                return int(value)
            self.wrong.append(f"{key} is {str(value)[:40]}, expected a whole number")
            return default or 1
        if default is None:
            self.wrong.append(f"it has no {' or '.join(keys)}")
        return 1 if default is None else default

    def moe_layers(self, layers: int) -> int:
        """Dense layers are the first ones (DeepSeek, GLM), those listed (`mlp_only_layers`) or all but every n-th."""
        dense = min(layers, self.size("first_k_dense_replace", default=0))
        listed = self.values.get("mlp_only_layers")
        if isinstance(listed, list):
            dense = max(dense, len(cast("list[Any]", listed)))
        marks = self.values.get("moe_layer_freq")  # DeepSeek's number, or one 0 or 1 per layer
        if isinstance(marks, list):
            return sum(bool(m) for m in cast("list[Any]", marks))
        step = max(1, self.size("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step", default=1))
        return max(0, (layers - dense) // step)

    def shared_experts(self) -> int:
        """How many routed experts the shared part is as large as."""
        count = self.size("n_shared_experts", default=0)
        shared = self.size("shared_expert_intermediate_size", default=0)
        each = self.size("moe_intermediate_size", default=0)
        return count or (round(shared / each) if shared and each else 0)
