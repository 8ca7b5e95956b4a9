"""What is asked of the cluster and what it answers: a gang of like bundles, and where it runs or why it does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from areal_sky.core.model import Bundle
from areal_sky.units import format_gib

DeviceShare = tuple[int, float]  # (device index, share of it in 0..1)
Spread = Literal["pack", "spread"]


@dataclass(frozen=True, slots=True)
class Ask:
    """A gang: `count` like bundles, together or not at all. Empty fields mean: any will do.

    `group`: that node group; None: any but the head's. `accelerators`: nodes with one of these; where `ordered`, the
    first of them that fits is taken. `market`: only nodes of that market. `nodes`: only nodes of these names or ids.
    `strategy`: `pack` takes as few nodes as it can, `spread` as many.
    """

    bundle: Bundle
    count: int
    group: str | None = None
    accelerators: tuple[str, ...] = ()
    ordered: bool = False
    market: str | None = None
    nodes: tuple[str, ...] = ()
    strategy: Spread = "pack"


@dataclass(slots=True, unsafe_hash=True)
class Placement:
    """One node and its device shares per bundle, in rank order. Ranks on one node are neighbours.

    Never changed; not frozen, since that makes one for every decision three times as slow.
    """

    node_ids: tuple[str, ...]
    devices: tuple[tuple[DeviceShare, ...], ...]


@dataclass(frozen=True, slots=True)
class NoFit:
    """Why nothing fits now, one reason per group that was looked at."""

    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join(self.reasons)


def describe(ask: Ask) -> str:
    """`4 bundles of 2 GPUs, 1 CPU`."""
    return f"{ask.count} bundle{'s' if ask.count > 1 else ''} of {describe_bundle(ask.bundle)}"


def describe_bundle(bundle: Bundle) -> str:
    """`2 GPUs, 1 CPU, 8 GiB`."""
    parts: list[str] = []
    if bundle.gpus:
        parts.append(f"{bundle.gpus:g} GPU{'s' if bundle.gpus > 1 else ''}")
    if bundle.cpus:
        parts.append(f"{bundle.cpus:g} CPU{'s' if bundle.cpus != 1 else ''}")
    if bundle.memory_gib:
        parts.append(format_gib(bundle.memory_gib))
    return ", ".join(parts) or "nothing"


def accelerator_matches(ask: Ask, accelerator: str | None) -> bool:
    """Whether a node with that accelerator may take the gang."""
    wanted = {a.lower() for a in ask.accelerators}
    return not wanted or (accelerator or "").lower() in wanted
