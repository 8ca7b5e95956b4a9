"""Memory of rollout: one instance of SGLang or vLLM over its tensor- and pipeline-parallel devices."""

from __future__ import annotations

import math

from areal_sky.core.architecture import Architecture
from areal_sky.core.memory_terms import Part, billions, gib
from areal_sky.spec.backends import Backend
from areal_sky.spec.memory import KV_BYTES, WEIGHT_BYTES, Settings

VLLM_PROFILE = "vLLM's profiles, pull request 10511 and issue 15815: 1.26 GiB"
PAGED = "PagedAttention, arXiv 2309.06180"
LATENT = "DeepSeek-V2, arXiv 2405.04434, table 1"
# The sampler works on the logits of every running sequence (256 at most by vLLM's default), in several fp32 copies:
# bytes per logit fitted to VLLM_PROFILE, which does not change with tensor parallelism.
SAMPLED, SAMPLER_BYTES = 256, 36
# CUDA graphs of the decode batch sizes: vLLM's own estimate in its logs is 0.2 to 1 GiB, SGLang captures more sizes.
GRAPH_GIB = {"vllm": 1.0, "sglang": 2.0}
CONTEXT_GIB = 1.0
NCCL_GIB = 0.5
# Tokenizer, detokenizer and model process, pinned buffers; assumed.
PROCESS_HOST_GIB = 6.0


def weights_per_device(a: Architecture, b: Backend) -> tuple[float, float]:
    """(all but routed experts, routed experts) in parameters on the fullest device.

    Linear layers, experts and the vocabulary are split by tensor parallelism; keys and values cannot be split finer
    than their heads. A pipeline stage holds its layers, the first one the embedding too, the last one the output head.
    """
    stage = math.ceil(a.layers / b.pipeline) / a.layers
    ends = a.embedding + (a.output_head if b.pipeline == 1 else 0)
    split = (stage * a.layers_without_experts + ends) / b.tensor
    copies = b.tensor / kv_split(a, b.tensor)
    if a.latent is None and copies > 1:  # heads of keys and values that several devices hold
        kv = 2 * a.kv_heads * a.head_dim * a.hidden * a.layers * stage
        split += kv * (copies - 1) / b.tensor
    return split, stage * a.routed_experts / b.tensor


def kv_split(a: Architecture, tensor: int) -> int:
    """Over how many devices the KV cache of a token is split: 1 with latent attention, whose vector has no heads."""
    return 1 if a.latent is not None else min(tensor, a.kv_heads)


def kv_bytes_per_token(a: Architecture, b: Backend, s: Settings) -> float:
    """Bytes of KV cache per token and device; a sequence of `s.context` tokens where layers have windows."""
    each = KV_BYTES[s.kv_cache] * a.kv_elements(s.context) / kv_split(a, b.tensor)
    return each * math.ceil(a.layers / b.pipeline) / a.layers


def device_parts(a: Architecture, b: Backend, s: Settings) -> list[Part]:
    """Device memory of one rank of an instance."""
    dense, experts = weights_per_device(a, b)
    # 4-bit formats hold the experts alone (gpt-oss, arXiv 2508.10925): the rest stays in bfloat16.
    rest = 2.0 if s.weights == "mxfp4" else WEIGHT_BYTES[s.weights]
    over = f" / t{b.tensor}" + (f" / p{b.pipeline}" if b.pipeline > 1 else "")
    per_token = kv_bytes_per_token(a, b, s)
    tokens = s.context * s.concurrent
    kv_how = f"{s.concurrent} x {s.context:,} tokens x {per_token / 1024:.4g} KiB"
    local = s.prefill_tokens
    ffn = max(a.intermediate if a.dense_layers else 0, a.active_experts * a.expert_intermediate)
    prefill = gib(local, 2 * (4 * a.hidden + 3 * ffn / b.tensor))
    sampler = gib(SAMPLED * a.vocabulary, SAMPLER_BYTES)
    groups = (b.tensor > 1) + (b.pipeline > 1)
    return [
        Part("weights", gib(dense, rest) + gib(experts, WEIGHT_BYTES[s.weights]),
             f"{billions(a.parameters)} parameters{over} x {WEIGHT_BYTES[s.weights]:.3g} bytes", "its safetensors"),
        Part("KV cache", gib(tokens, per_token), kv_how, LATENT if a.latent is not None else PAGED),
        Part("workspace", max(prefill, sampler), f"sampler of {SAMPLED} sequences or a prefill of {local:,} tokens",
             VLLM_PROFILE),
        Part("CUDA graphs", GRAPH_GIB[b.engine], f"of {b.engine}'s decode batch sizes", "assumed; their start-up logs"),
        Part("CUDA and NCCL", CONTEXT_GIB + NCCL_GIB * groups, f"context, and {groups} communicators",
             "assumed; vllm pull request 10511"),
    ]  # fmt: skip


def host_parts(a: Architecture, s: Settings) -> list[Part]:
    """Host memory per device. Weights are read through the page cache, which the kernel gives back."""
    return [Part("process", PROCESS_HOST_GIB, "engine process, tokenizer, pinned buffers", "assumed")]
