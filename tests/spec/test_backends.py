"""AReaL's backend strings, and the number of GPUs that they need."""

from __future__ import annotations

import pytest

from areal_sky.errors import InvalidInput
from areal_sky.spec.backends import ROLLOUT_ENGINES, TRAIN_ENGINES, Backend, parse_backend, world_size


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("fsdp:d8", Backend("fsdp", 8)),
        ("megatron:d2p2t4e4", Backend("megatron", 2, 4, 2, expert=4)),
        ("archon:d4c2", Backend("archon", 4, context=2)),
        ("megatron:(attn:d4p2t2|ffn:d2p2e4)", Backend("megatron", 4, 2, 2, expert=4)),
        ("megatron: (attn:d1p12t4 | ffn:d1p12e4)", Backend("megatron", 1, 4, 12, expert=4)),
        ("megatron:attn:d2|ffn:e2", Backend("megatron", 2, expert=2)),
    ],
)
def test_train_backends(text: str, backend: Backend) -> None:
    read = parse_backend(text, TRAIN_ENGINES)
    assert read == backend
    assert parse_backend(str(read), TRAIN_ENGINES) == read


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("sglang:d4t2+megatron:d2p2t4", 24),
        ("sglang:d4t2 + fsdp:d8", 16),
        ("vllm:d8|fsdp:d8", 8),  # on the same GPUs, one after the other
        ("vllm:d4|fsdp:d8", 8),
        ("sglang:d4t2+eval", 8),
        ("sglang:d2p2t2+megatron:(attn:d4p2t2|ffn:d2p2e4)", 24),
        ("megatron:attn:d2|ffn:e2+vllm:d1", 3),
        ("fsdp:d8", 8),
    ],
)
def test_the_world_size_of_a_run_is_the_sum_over_its_backends(text: str, gpus: int) -> None:
    assert world_size(text) == gpus


@pytest.mark.parametrize("text", ["", "cpu", "cpu+eval", "sglang:d4+x:d2", "sglang:d4++fsdp:d2"])
def test_an_allocation_without_backends_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="expected"):
        world_size(text)


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
