"""Scaling: frozen context -> decision with its reason. Built-in policies, and wrappers around any policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from areal_sky.core.model import GangDemand, GroupPlan
from areal_sky.core.view import ReplicaLoad


@dataclass(frozen=True, slots=True)
class ScalingContext:
    """All that a scaling policy may know about one elastic group.

    `desired` is what is wanted now; `ready` and `starting` count replicas. `loads` covers the ready ones.
    `demand` holds the waiting gangs that this group could run and that no other group was asked to, best first.
    """

    now_s: float
    group: GroupPlan
    desired: int
    ready: int
    starting: int
    loads: tuple[ReplicaLoad, ...]
    demand: tuple[GangDemand, ...]
    target_utilization: float
    cooldown_s: float
    idle_s: float
    last_grow_s: float | None
    last_shrink_s: float | None


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """`desired` replicas and why. `victims` are the replicas to drain first when shrinking, in that order."""

    group: str
    desired: int
    reason: str
    victims: tuple[str, ...] = ()


Policy = Callable[[ScalingContext], ScalingDecision]
