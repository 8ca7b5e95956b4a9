"""The values of memory estimates: their parts, the estimate itself, the sources that they name.

All sizes are GiB (2**30 bytes) per device unless they say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = 2**30

Stage = Literal["train", "rollout", "inference"]
STAGES: tuple[Stage, ...] = ("train", "rollout", "inference")

# Sources that several parts name.
ZERO = "ZeRO, arXiv 1910.02054, section 3.1"
KORTHIKANTI = "Korthikanti et al. 2022, arXiv 2205.05198"
DIST_OPTIMIZER = "Megatron Core's guide to its distributed optimizer: 6 + 12/d bytes"
FSDP2 = "PyTorch fully_shard: a unit's parameters are gathered for its turn, the next one's ahead"
ALLOCATOR = "PyTorch's caching allocator rounds and splits blocks; assumed"

@dataclass(frozen=True, slots=True)
class Part:
    """One line of a breakdown: how much, worked out how, by whose formula."""

    name: str
    gib: float
    how: str
    source: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one device of an allocation takes at its peak.

    `parts` are device memory, `host` host memory per device, `host_once` host memory that one process takes on top
    while it gathers or loads the whole model. `correction` is what observed peaks have taught: a factor on the total.
    """

    model: str
    stage: Stage
    backend: str
    gpus: int
    parts: tuple[Part, ...]
    host: tuple[Part, ...] = ()
    host_once_gib: float = 0.0
    correction: float = 1.0

    @property
    def device_gib(self) -> float:
        return self.correction * sum(p.gib for p in self.parts)

    @property
    def host_gib(self) -> float:
        return sum(p.gib for p in self.host)

    def part(self, name: str) -> float:
        """GiB of the part of that name, 0 where there is none."""
        return sum(p.gib for p in self.parts if p.name == name)


@dataclass(frozen=True, slots=True)
class ModelNeed:
    """What one stage of a model takes per device: as assumed, and at the very least. JSON-able, for the head.

    `gpus` is the world size, `gpus_per_replica` the smallest part of it that works alone.
    """

    model: str
    stage: Stage
    backend: str
    gpus: int
    gpus_per_replica: int
    device_gib: float
    least_gib: float
    host_gib: float
    host_once_gib: float = 0.0  # of one process more, while it gathers the whole model


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What a plan's models need of its GPUs, in numbers and sentences. `lines`: what fits."""

    needs: tuple[ModelNeed, ...] = ()
    lines: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()

    def add(
        self,
        needs: tuple[ModelNeed, ...] = (),
        lines: tuple[str, ...] = (),
        warnings: tuple[str, ...] = (),
        refusals: tuple[str, ...] = (),
    ) -> MemoryReport:
        return MemoryReport(
            self.needs + needs, self.lines + lines, self.warnings + warnings, self.refusals + refusals
        )


def gib(count: float, bytes_each: float = 1.0) -> float:
    return count * bytes_each / GIB


def billions(count: float) -> str:
    return f"{count / 1e9:.3g}B" if count >= 1e8 else f"{count / 1e6:.3g}M"
