"""AReaL's backend strings, and the number of GPUs that they need."""

from __future__ import annotations

import pytest

from areal_sky.errors import InvalidInput
from areal_sky.spec.backends import ROLLOUT_ENGINES, TRAIN_ENGINES, Backend, parse_backend


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("fsdp:d8", Backend("fsdp", 8, 1)),
        ("megatron:d2p2t4e4", Backend("megatron", 16, 8, 4)),
        ("archon:d4c2", Backend("archon", 8, 2)),
        ("megatron:(attn:d4p2t2|ffn:d2p2e4)", Backend("megatron", 16, 4, 4)),
        ("megatron: (attn:d1p12t4 | ffn:d1p12e4)", Backend("megatron", 48, 48, 4)),
        ("megatron:attn:d2|ffn:e2", Backend("megatron", 2, 1, 2)),
    ],
)
def test_train_backends(text: str, backend: Backend) -> None:
    assert parse_backend(text, TRAIN_ENGINES) == backend


@pytest.mark.parametrize(("text", "gpus", "per"), [("sglang:d4t2", 8, 2), ("vllm:d8", 8, 1), ("vllm:d2t4p2", 16, 8)])
def test_rollout_backends(text: str, gpus: int, per: int) -> None:
    read = parse_backend(text, ROLLOUT_ENGINES)
    assert (read.gpus, read.gpus_per_replica) == (gpus, per)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("fsdp", "no parallelism"), ("fsdp:", "no parallelism"), ("fsdp:8", "no backend string"),
     ("fsdp:d0", "no backend"),
     ("fsdp:d8e2", "expert parallelism, which fsdp does not do"), ("fsdp:d8d2", "`d` twice"),
     ("fsdp:x2", "dimension `x`"),
     ("sglang:d8", "expected one of: fsdp"), ("megatron:d2p2t4e64", "a multiple of pipeline x experts = 128"),
     ("megatron:(attn:d2|ffn:e4)", "2 GPUs for attn and 4 for ffn"), ("megatron:(attn:p2|ffn:d2)", "the same pipeline"),
     ("fsdp:d8+sglang:d4", "several components"), ("megatron:(attn:e2|ffn:e2)", "dimension `e`"), ("", "no engine"),
     ("fsdp:d99999999", "more than six digits")],
)  # fmt: skip
def test_wrong_train_backends_say_why(text: str, reason: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_backend(text, TRAIN_ENGINES)
    assert reason in str(refused.value) and "expected" in str(refused.value)
