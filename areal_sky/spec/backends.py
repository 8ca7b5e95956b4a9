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
ENGINES = TRAIN_ENGINES + ROLLOUT_ENGINES

_DIMENSION = re.compile(r"([a-z])([1-9][0-9]*)", re.ASCII)
_DIMENSIONS = re.compile(r"(?:[a-z][1-9][0-9]*)+", re.ASCII)
_HYBRID = re.compile(r"\(?attn:([a-z0-9]+)\|ffn:([a-z0-9]+)\)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Backend:
    """An engine and its degrees of parallelism.

    `expert_tensor` splits each expert of a mixture; it is 1 unless an `ffn:` part says more (AReaL's default).
    """

    engine: str
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @property
    def gpus(self) -> int:
        """The world size."""
        return self.data * self.gpus_per_replica

    @property
    def gpus_per_replica(self) -> int:
        """The smallest part that works alone: tensor x pipeline x context."""
        return self.tensor * self.pipeline * self.context

    @property
    def trains(self) -> bool:
        return self.engine in TRAIN_ENGINES

    def __str__(self) -> str:
        """The string that reads back as this backend, without the degrees that are 1."""
        attn = {"d": self.data, "p": self.pipeline, "t": self.tensor, "c": self.context}
        if self.expert_tensor > 1:
            rest = self.gpus // (self.pipeline * self.expert_tensor * self.expert)
            ffn = {"d": rest, "p": self.pipeline, "t": self.expert_tensor, "e": self.expert}
            return f"{self.engine}:(attn:{_degrees(attn)}|ffn:{_degrees(ffn)})"
        return f"{self.engine}:{_degrees(attn | {'e': self.expert})}"


def world_size(allocation: str) -> int:
    """The GPUs that a whole AReaL run takes: the sum over its backends.

    `allocation` is AReaL's allocation mode: backends joined by `+` (apart, on GPUs of their own) or `|` (on the same
    GPUs, one after the other); `cpu` and `eval` take none. Raises InvalidInput.
    """
    return sum(max((b.gpus for b in together), default=0) for together in components(allocation))


def components(allocation: str) -> tuple[tuple[Backend, ...], ...]:
    """The backends of an allocation mode, those that share GPUs grouped together. Raises InvalidInput."""
    groups: list[tuple[Backend, ...]] = []
    for part in _split(allocation, "+"):
        words: list[str] = []
        for word in map(str.strip, _split(part, "|")):
            if word.startswith("ffn:") and words:  # `attn:..|ffn:..` without its parentheses is one backend
                words[-1] += f"|{word}"
            else:
                words.append(word)
        groups.append(tuple(parse_backend(w, ENGINES) for w in words if w.lower() not in ("cpu", "eval")))
    if not any(groups):
        raise InvalidInput(f"`{allocation[:60]}` names no backend, expected such as sglang:d4t2+fsdp:d8")
    return tuple(g for g in groups if g)


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
    experts = sizes.get("e", 1)
    backend = Backend(
        engine, sizes.get("d", 1), sizes.get("t", 1), sizes.get("p", 1), sizes.get("c", 1), experts, expert_tensor
    )
    if experts > 1 and engine == "fsdp":
        raise InvalidInput(f"`{text[:60]}` has expert parallelism, which fsdp does not do, expected megatron or archon")
    if experts > 1 and backend.gpus % (backend.pipeline * expert_tensor * experts):
        raise InvalidInput(
            f"`{text[:60]}` has {backend.gpus} GPUs, expected a multiple of pipeline x experts = "
            f"{backend.pipeline * expert_tensor * experts}"
        )
    return backend


def _degrees(sizes: dict[str, int]) -> str:
    return "".join(f"{letter}{n}" for letter, n in sizes.items() if n > 1 or letter == "d")


def _split(text: str, mark: str) -> list[str]:
    """Splits at `mark` outside parentheses."""
    parts, depth = [""], 0
    for c in text:
        depth += (c == "(") - (c == ")")
        if c == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts


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
