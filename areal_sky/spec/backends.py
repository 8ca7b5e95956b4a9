"""AReaL's backend strings: which engine runs a model, and over how many GPUs.

The grammar is that of AReaL's areal/api/alloc_mode.py (ALLOCATION_GRAMMAR, ParallelStrategy, ModelAllocation), for one
component: `fsdp:d8`, `megatron:d2p2t4e4`, `megatron:(attn:d4p2t2|ffn:d2p2e4)`, `sglang:d4t2`. The numbers are degrees
of d(ata), t(ensor), p(ipeline), c(ontext) and e(xpert) parallelism.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from areal_sky.errors import InvalidInput
from areal_sky.spec.fields import did_you_mean

TRAIN_ENGINES = ("fsdp", "megatron", "archon")
ROLLOUT_ENGINES = ("sglang", "vllm")

_DIMENSION = re.compile(r"([a-z])([1-9][0-9]*)", re.ASCII)
_DIMENSIONS = re.compile(r"(?:[a-z][1-9][0-9]*)+", re.ASCII)
_HYBRID = re.compile(r"\(?attn:([a-z0-9]+)\|ffn:([a-z0-9]+)\)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Backend:
    """`gpus` is the world size. `gpus_per_replica` is the smallest part that works alone (tensor x pipeline)."""

    engine: str
    gpus: int
    gpus_per_replica: int
    expert_parallel: int = 1


def parse_backend(text: str, engines: tuple[str, ...]) -> Backend:
    """Reads a backend string whose engine must be one of `engines`. Raises InvalidInput."""
    squeezed = "".join(text.split())
    engine, colon, strategy = squeezed.partition(":")
    example = "sglang:d4t2" if "sglang" in engines else "fsdp:d8 or megatron:d2p2t4e4"
    if "+" in squeezed:
        raise InvalidInput(
            f"`{text[:60]}` has several components, expected one, such as {example}: "
            "`train` and `rollout` are given apart"
        )
    if engine not in engines:
        raise InvalidInput(
            f"`{text[:60]}` has no engine that fits, expected one of: {', '.join(engines)}, as in "
            f"{example}{did_you_mean(engine, engines)}"
        )
    if not colon or not strategy:
        raise InvalidInput(f"`{text[:60]}` has no parallelism, expected {example}")
    hybrid = _HYBRID.fullmatch(strategy)
    if hybrid and engine in TRAIN_ENGINES:
        return _hybrid(text, engine, hybrid[1], hybrid[2])
    sizes = _sizes(text, strategy, "dtpce" if engine in TRAIN_ENGINES else "dtp", example)
    return _backend(text, engine, sizes)


def _hybrid(text: str, engine: str, attention: str, ffn: str) -> Backend:
    example = "megatron:(attn:d4p2t2|ffn:d2p2e4)"
    attn, experts = _sizes(text, attention, "dtpc", example), _sizes(text, ffn, "dtpe", example)
    if attn.get("p", 1) != experts.get("p", 1):
        raise InvalidInput(
            f"`{text[:60]}` has p{attn.get('p', 1)} in attn and p{experts.get('p', 1)} in ffn, "
            "expected the same pipeline in both"
        )
    if math.prod(attn.values()) != math.prod(experts.values()):
        raise InvalidInput(
            f"`{text[:60]}` needs {math.prod(attn.values())} GPUs for attn and "
            f"{math.prod(experts.values())} for ffn, expected the same number"
        )
    return _backend(text, engine, attn | {"e": experts.get("e", 1)}, expert_tensor=experts.get("t", 1))


def _backend(text: str, engine: str, sizes: dict[str, int], expert_tensor: int = 1) -> Backend:
    gpus = math.prod(size for dimension, size in sizes.items() if dimension != "e")
    experts = sizes.get("e", 1)
    if experts > 1 and engine == "fsdp":
        raise InvalidInput(f"`{text[:60]}` has expert parallelism, which fsdp does not do, expected megatron or archon")
    if experts > 1 and gpus % (sizes.get("p", 1) * expert_tensor * experts):
        raise InvalidInput(
            f"`{text[:60]}` has {gpus} GPUs, expected a multiple of pipeline x experts = "
            f"{sizes.get('p', 1) * expert_tensor * experts}"
        )
    return Backend(engine, gpus, sizes.get("t", 1) * sizes.get("p", 1) * sizes.get("c", 1), experts)


def _sizes(text: str, strategy: str, allowed: str, example: str) -> dict[str, int]:
    letters = ", ".join(allowed)
    if not _DIMENSIONS.fullmatch(strategy):
        raise InvalidInput(
            f"`{text[:60]}` is no backend string, expected {example}: letters out of {letters}, "
            "each with a number above 0"
        )
    sizes: dict[str, int] = {}
    for letter, number in _DIMENSION.findall(strategy):
        if letter not in allowed:
            raise InvalidInput(f"`{text[:60]}` has dimension `{letter}`, expected one of: {letters}")
        if letter in sizes:
            raise InvalidInput(f"`{text[:60]}` has dimension `{letter}` twice, expected it once")
        if len(number) > 6:
            raise InvalidInput(f"`{text[:60]}` has a degree of more than six digits, expected {example}")
        sizes[letter] = int(number)
    return sizes
