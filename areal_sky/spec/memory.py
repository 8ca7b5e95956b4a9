"""What a memory estimate assumes of a model's runs: the `memory:` block of a model, and the tables behind its words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from areal_sky.errors import InvalidInput

# Bytes per parameter of weights, gradients and optimizer states (fp32 master weights and two moments).
# adam: mixed precision with a master copy, 16 in all (ZeRO, arXiv 1910.02054). adam_bf16: all of it in bfloat16, as
# torch.optim.AdamW does for bfloat16 parameters. adam_8bit: moments in 8 bits beside the master copy
# (arXiv 2110.02861). sgd: the master copy alone.
OPTIMIZERS: dict[str, tuple[float, float, float]] = {
    "adam": (2, 2, 12),
    "adam_bf16": (2, 2, 4),
    "adam_8bit": (2, 2, 6),
    "sgd": (2, 2, 4),
}
# Bytes per logit in training. chunked: bfloat16, its gradient, and the fp32 log-softmax of chunks that the backward
# pass needs (AReaL's gather_logprobs). whole: bfloat16, the same in fp32, its log-softmax and its gradient, as
# cross_entropy(logits.float()) keeps them.
LOSS_BYTES: dict[str, int] = {"chunked": 8, "whole": 14}
WEIGHT_BYTES: dict[str, float] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "mxfp4": 4.25 / 8}
KV_BYTES: dict[str, float] = {"bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class Settings:
    """What an estimate assumes beside the model and its parallelism; the defaults are AReaL's or its engines'.

    Training: `optimizer` one of OPTIMIZERS; `micro_batch_tokens` packed tokens of one micro-batch of a data-parallel
    rank (AReaL's `mb_spec.max_tokens_per_mb`); `recompute` full (AReaL's `gradient_checkpointing`) or none;
    `attention` flash, or eager, which keeps the scores; `loss` chunked or whole; `offload` to host memory none,
    optimizer or all; `lora_rank` 0 trains every parameter; `grad_bytes` of the gradients that are reduced (4: in
    fp32).
    Rollout: `context` tokens of the longest sequence, `concurrent` such sequences per instance at once, `weights` and
    `kv_cache` are types.
    """

    optimizer: str = "adam"
    micro_batch_tokens: int = 16384
    recompute: str = "full"
    attention: str = "flash"
    loss: str = "chunked"
    offload: str = "none"
    lora_rank: int = 0
    grad_bytes: int = 4
    context: int = 32768
    concurrent: int = 8
    weights: str = "bf16"
    kv_cache: str = "bf16"
    prefill_tokens: int = 8192

    def __post_init__(self) -> None:
        """Raises InvalidInput that lists every mistake."""
        wrong = [
            f"{key}: {str(getattr(self, key))[:40]!r} is none of {', '.join(known)}"
            for key, known in CHOICES.items()
            if getattr(self, key) not in known
        ]
        for key, (low, high) in RANGES.items():
            value: object = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                wrong.append(f"{key}: {str(value)[:40]} is no whole number from {low} to {high:,}")
        if wrong:
            raise InvalidInput("; ".join(wrong))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Settings from plain values, the defaults for those not given. Raises InvalidInput."""
        unknown = [k for k in values if k not in _NAMES]
        if unknown:
            raise InvalidInput(f"unknown: {', '.join(map(str, unknown))[:80]}; known are {', '.join(_NAMES)}")
        return cls(**values)

    def leanest(self) -> Settings:
        """The least that this could be made to take without another parallelism: what lies below is impossible.

        Bfloat16 optimizer states, short micro-batches, everything recomputed, one sequence in the KV cache.
        """
        return replace(
            self,
            optimizer="adam_bf16" if self.optimizer == "adam" else self.optimizer,
            micro_batch_tokens=min(self.micro_batch_tokens, 2048),
            recompute="full",
            attention="flash",
            loss="chunked",
            grad_bytes=2,
            context=min(self.context, 4096),
            concurrent=1,
            prefill_tokens=min(self.prefill_tokens, 2048),
        )


CHOICES: dict[str, tuple[str, ...]] = {
    "optimizer": tuple(OPTIMIZERS),
    "recompute": ("full", "none"),
    "attention": ("flash", "eager"),
    "loss": tuple(LOSS_BYTES),
    "offload": ("none", "optimizer", "all"),
    "weights": tuple(WEIGHT_BYTES),
    "kv_cache": tuple(KV_BYTES),
}
RANGES: dict[str, tuple[int, int]] = {
    "micro_batch_tokens": (1, 10_000_000),
    "lora_rank": (0, 4096),
    "grad_bytes": (2, 4),
    "context": (1, 10_000_000),
    "concurrent": (1, 100_000),
    "prefill_tokens": (1, 1_000_000),
}
_NAMES = tuple(f.name for f in fields(Settings))
