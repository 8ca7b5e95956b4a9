"""Memory of training, and of forward passes with the same engines (reference and reward models).

States follow ZeRO and Megatron's distributed optimizer; activations follow the counting of Korthikanti et al. 2022
(each tensor that the backward pass needs, two bytes an element), extended to gated feed-forward, grouped-query
attention and mixtures of experts. With flash attention nothing grows with the square of the sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from areal_sky.core.architecture import Architecture
from areal_sky.core.memory_terms import (
    ALLOCATOR,
    DIST_OPTIMIZER,
    FSDP2,
    KORTHIKANTI,
    ZERO,
    Part,
    billions,
    gib,
)
from areal_sky.spec.backends import Backend
from areal_sky.spec.memory import LOSS_BYTES, OPTIMIZERS, WEIGHT_BYTES, Settings

# CUDA context, cuBLAS and cuDNN workspaces: an idle training process on an H100 shows about this in nvidia-smi.
# NCCL: buffers of one communicator. Both assumed; vLLM's profile of Llama-3-8B (vllm pull request 10511) shows 1.8 GiB
# outside PyTorch on one GPU.
CONTEXT_GIB = 1.0
NCCL_GIB = 0.25
FRAGMENTATION = 0.05
# Python, PyTorch and CUDA libraries of one training process, pinned buffers included; assumed.
PROCESS_HOST_GIB = 6.0
# Bytes per logit of a forward pass alone: bfloat16, and fp32 in chunks.
LOGIT_FORWARD_BYTES = 3
LOSSES = {"chunked": "AReaL's gather_logprobs", "whole": "PyTorch's cross_entropy in fp32"}


@dataclass(frozen=True, slots=True)
class Share:
    """Parameters on the device that holds most: split like the attention, and experts."""

    dense: float
    experts: float

    @property
    def all(self) -> float:
        return self.dense + self.experts


def largest_share(a: Architecture, b: Backend) -> Share:
    """Of Megatron's pipeline stages the fullest: its layers, and the embedding or the output head.

    Split by tensor and pipeline; experts by pipeline, expert and expert-tensor parallelism. Source: the most loaded
    shard of megatron/training/theoretical_memory_usage.py.
    """
    stage = math.ceil(a.layers / b.pipeline) / a.layers
    ends = a.embedding + (a.output_head if b.pipeline == 1 else 0)
    dense = (stage * a.layers_without_experts + ends) / b.tensor
    return Share(dense, stage * a.routed_experts / (b.expert * b.expert_tensor))


def states(a: Architecture, b: Backend, s: Settings) -> list[Part]:
    """Weights, gradients and optimizer states of training."""
    if s.lora_rank:
        return _lora_states(a, b, s)
    weight, grad, optimizer = OPTIMIZERS[s.optimizer]
    kept = {"none": 1.0, "optimizer": 1.0, "all": 0.0}[s.offload]  # share of weights and gradients on the device
    moments = 0.0 if s.offload != "none" else 1.0
    if b.engine != "megatron":
        n = a.parameters / b.gpus
        how = f"{billions(a.parameters)} parameters / {b.gpus} shards"
        return [
            Part("weights", kept * gib(n, weight), f"{how} x {weight:g} bytes", ZERO),
            Part("gradients", kept * gib(n, grad), f"{how} x {grad:g} bytes", ZERO),
            Part("optimizer", moments * gib(n, optimizer), f"{how} x {optimizer:g} bytes", ZERO),
        ]
    share = largest_share(a, b)
    replicas, expert_replicas = _replicas(b)
    how = f"{billions(share.all)} parameters on the fullest stage"
    sharded = share.dense / replicas + share.experts / expert_replicas
    times = f"/ {replicas} replicas" + (f" ({expert_replicas} of experts)" if share.experts else "")
    return [
        Part("weights", gib(share.all, weight), f"{how} x {weight:g} bytes", DIST_OPTIMIZER),
        Part("gradients", gib(share.all, s.grad_bytes), f"{how} x {s.grad_bytes} bytes", DIST_OPTIMIZER),
        Part("optimizer", moments * gib(sharded, optimizer), f"x {optimizer:g} bytes {times}", DIST_OPTIMIZER),
    ]


def lora_parameters(a: Architecture, rank: int) -> int:
    """Parameters of adapters on every dense linear layer (LoRA, arXiv 2106.09685: rank x (in + out) each)."""
    h, q, kv = a.hidden, a.heads * max(a.head_dim, 1), a.kv_heads * max(a.head_dim, 1)
    if a.latent is not None:
        q = a.heads * (a.latent.nope_dim + a.latent.rope_dim)
        kv = a.latent.kv_rank + a.latent.rope_dim
    attention = 2 * (h + q) + 2 * (h + kv)
    dense = a.feed_forward_matrices * (h + a.intermediate)
    shared = a.feed_forward_matrices * (h + a.shared_experts * a.expert_intermediate) if a.shared_experts else 0
    return rank * (a.layers * attention + a.dense_layers * dense + a.moe_layers * shared)


def layer_bytes_per_token(a: Architecture, moe: bool, s: Settings, eager_norms: bool) -> float:
    """What one layer keeps per token for its backward pass, unsplit, in bytes.

    GPT (two matrices, dropout): 34 h, of which Korthikanti et al. derive each term; eager attention adds 5 a s, and
    10 a s in transformers, which keeps the scores twice, their softmax in fp32 and its copy.
    Gated layers by the same counting, without dropout: inputs of both norms (4 h; 12 h where the norm upcasts, as in
    transformers), inputs of the projections (4 h), queries and attention output (4 q), keys and values (4 kv), and of
    the feed-forward gate, up and product (6 f; 8 f where the activation is not fused).
    """
    h, f = a.hidden, a.intermediate
    q, kv = _attention_widths(a)
    scores = (10.0 if eager_norms else 5.0) * a.heads * s.context if s.attention == "eager" else 0.0
    if a.feed_forward_matrices == 2:
        return 34.0 * h + scores + (f - 4 * h) * 4
    each = 8 if eager_norms else 6
    base = (16 if eager_norms else 8) * h + 4 * q + 4 * kv + scores
    if not moe:
        return base + each * f
    # Per chosen expert: the dispatched copy and its result (4 h), and the expert's own feed-forward.
    routed = a.active_experts * (4 * h + each * a.expert_intermediate)
    return base + routed + each * a.shared_experts * a.expert_intermediate + 4 * a.experts


def activations(a: Architecture, b: Backend, s: Settings) -> list[Part]:
    """What forward passes leave for backward passes, and the loss, on the stage that needs most.

    The loss and the recomputed layers come after one another, so the larger counts.
    """
    tokens = s.micro_batch_tokens / (b.tensor * b.context)
    per_stage = math.ceil(a.layers / b.pipeline)
    each = {moe: layer_bytes_per_token(a, moe, s, eager_norms=b.engine != "megatron") for moe in _kinds(a)}
    mean = sum(n * each[moe] for moe, n in _kinds(a).items()) / a.layers
    full = s.recompute == "full"
    kept = gib(tokens * per_stage, 2 * a.hidden if full else mean)  # of one micro-batch
    # A layer recomputed whole, beside it the gradients of its output and of its widest tensors.
    again = gib(tokens, max(each.values()) + 4 * a.hidden + 4 * _widest(a)) if full else 0.0
    count = s.micro_batch_tokens / b.context * a.vocabulary / b.tensor
    each_loss = LOSS_BYTES[s.loss] - 2
    logits, loss = gib(count, 2), gib(count, each_loss)
    last_first = b.pipeline == 1 or kept + logits + max(loss, again) >= kept * b.pipeline + again
    in_flight = 1 if last_first else b.pipeline
    how = f"{tokens:,.0f} tokens a device x {per_stage} layers x {'2 h' if full else f'{mean / 1024:.0f} KiB'}"
    if b.pipeline > 1:
        how += ", last stage" if last_first else f" x {in_flight} micro-batches in flight, first stage"
    parts = [Part("activations", kept * in_flight, how, f"{KORTHIKANTI}, table 2 and section 4.2.3")]
    if last_first:
        words = f"{a.vocabulary:,} words / t{b.tensor}"
        parts.append(Part("logits", logits, f"2 bytes x {words}", LOSSES[s.loss]))
        if loss >= again:
            parts.append(Part("loss", loss, f"{each_loss} bytes x {words}", LOSSES[s.loss]))
    if again and not (last_first and loss >= again):
        how = f"{tokens:,.0f} tokens x {max(each.values()) / 1024:.0f} KiB, and its gradients"
        parts.append(Part("recomputed layer", again, how, KORTHIKANTI))
    return parts


def forward(a: Architecture, b: Backend, s: Settings) -> list[Part]:
    """Device memory of a model that only computes: reference log-probabilities, rewards."""
    weight = WEIGHT_BYTES[s.weights]
    if b.engine == "megatron":
        share = largest_share(a, b).all
        parts = [Part("weights", gib(share, weight), f"{billions(share)} on the fullest stage", DIST_OPTIMIZER)]
    else:
        each = 0.0 if s.offload == "all" else gib(a.parameters / b.gpus, weight)
        parts = [Part("weights", each, f"{billions(a.parameters)} / {b.gpus} shards x {weight:g} bytes", ZERO)]
    tokens = s.micro_batch_tokens / (b.tensor * b.context)
    live = 6 * a.hidden + 2 * _widest(a) * a.feed_forward_matrices
    parts.append(Part("working set", gib(tokens, live), f"{tokens:,.0f} tokens, one layer at a time", KORTHIKANTI))
    logits = gib(s.micro_batch_tokens / b.context * a.vocabulary / b.tensor, LOGIT_FORWARD_BYTES)
    parts.append(Part("logits", logits, f"{LOGIT_FORWARD_BYTES} bytes a logit", "AReaL's gather_logprobs, in chunks"))
    return parts


def gathered(a: Architecture, b: Backend, s: Settings, training: bool) -> list[Part]:
    """FSDP: the layers that are whole for a moment; nothing with Megatron."""
    if b.engine == "megatron" or b.gpus == 1:
        return []
    layer = (a.layers_without_experts + a.routed_experts) / a.layers / b.tensor
    ends = max(a.embedding, a.output_head) / b.tensor
    # In training also the whole gradient of one layer, in bfloat16 and, where that is reduced in fp32, as that.
    grad = (2 + (s.grad_bytes if s.grad_bytes > 2 else 0)) if training else 0
    each = 2 * 2 + grad
    how = f"2 layers of {billions(layer)}, {'one in gradients, ' if training else ''}and the output head"
    return [Part("gathered layers", gib(layer, each) + gib(ends, 2 + (s.grad_bytes if training else 0)), how, FSDP2)]


def overheads(b: Backend, parts: list[Part]) -> list[Part]:
    """What no formula of the model gives: the CUDA context, communicators, fragmentation."""
    groups = sum(n > 1 for n in (b.data, b.tensor, b.pipeline, b.context, b.expert))
    fixed = CONTEXT_GIB + NCCL_GIB * groups
    moving = sum(p.gib for p in parts if p.name not in ("weights", "gradients", "optimizer"))
    return [
        Part("CUDA and NCCL", fixed, f"context, and {groups} communicators", "assumed; vllm pull request 10511"),
        Part("fragmentation", FRAGMENTATION * moving, f"{FRAGMENTATION:.0%} of what comes and goes", ALLOCATOR),
    ]


def host(a: Architecture, b: Backend, s: Settings) -> list[Part]:
    """Host memory per device."""
    parts = [Part("process", PROCESS_HOST_GIB, "Python, PyTorch, pinned buffers", "assumed")]
    weight, grad, optimizer = OPTIMIZERS[s.optimizer]
    moved = {"none": 0.0, "optimizer": optimizer, "all": weight + grad + optimizer}[s.offload]
    if moved:
        n = lora_parameters(a, s.lora_rank) if s.lora_rank else a.parameters
        how = f"{moved:g} bytes a parameter"
        parts.append(Part("offloaded", gib(n / b.gpus, moved), how, "ZeRO-Offload, arXiv 2101.06840"))
    return parts


# ---------------------------------------------------------------- how


def _lora_states(a: Architecture, b: Backend, s: Settings) -> list[Part]:
    weight, grad, optimizer = OPTIMIZERS[s.optimizer]
    share = largest_share(a, b).all if b.engine == "megatron" else a.parameters / b.gpus
    trained = lora_parameters(a, s.lora_rank) / (b.tensor * b.pipeline if b.engine == "megatron" else b.gpus)
    frozen = 0.0 if s.offload == "all" else gib(share, WEIGHT_BYTES[s.weights])
    each = weight + grad + optimizer
    how = f"{billions(trained)} of rank {s.lora_rank} x {each:g} bytes"
    return [
        Part("weights", frozen, f"{billions(share)} frozen parameters a device", ZERO),
        Part("adapters", gib(trained, each), how, "LoRA, arXiv 2106.09685"),
    ]


def _replicas(b: Backend) -> tuple[int, int]:
    """Over how many devices the optimizer's states of dense parameters and of experts are spread."""
    dense = b.data * b.context
    return dense, max(1, b.gpus // (b.pipeline * b.expert * b.expert_tensor))


def _attention_widths(a: Architecture) -> tuple[int, int]:
    """Widths of queries, and of keys or values, as attention sees them."""
    if a.latent is None:
        return a.heads * a.head_dim, a.kv_heads * a.head_dim
    qk = a.heads * (a.latent.nope_dim + a.latent.rope_dim)
    return qk, (qk + a.heads * a.latent.v_dim) // 2  # expanded for training


def _kinds(a: Architecture) -> dict[bool, int]:
    """Layers by whether they are mixtures."""
    return {moe: n for moe, n in ((False, a.dense_layers), (True, a.moe_layers)) if n}


def _widest(a: Architecture) -> int:
    """Elements per token of the widest feed-forward tensor."""
    routed = a.active_experts * max(a.expert_intermediate, a.hidden) if a.is_moe else 0
    return max(a.intermediate if a.dense_layers else 0, routed)
