"""How often a node reads its GPUs: a pure choice, made anew for each window."""

from __future__ import annotations

from dataclasses import dataclass

CRITICAL_KINDS = frozenset({"train"})  # a stall of these wastes the whole gang, so they are watched closely
MAX_BEAT_S = 5.0  # a window is stale after 10 s, so the head is told at least twice as often
POSTS_PER_S = 200  # what one head should have to take; a post costs it about half a millisecond


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """`kinds` of the tasks that run on the node, `marked` ones that asked to be watched closely (their ids).

    `ordered` is the head's wish while it looks into something: "fast", "slow" or None.
    """

    kinds: tuple[str, ...]
    marked: tuple[str, ...]
    ordered: str | None
    critical_interval_s: float
    normal_interval_s: float


@dataclass(frozen=True, slots=True)
class SamplingDecision:
    interval_s: float
    reason: str


def choose_sampling(context: SamplingContext) -> SamplingDecision:
    """The head's wish first, then a critical task, else the usual rate."""
    fast, slow = context.critical_interval_s, context.normal_interval_s
    if context.ordered in ("fast", "slow"):
        return SamplingDecision(fast if context.ordered == "fast" else slow, "the head asked for it")
    if critical := sorted(CRITICAL_KINDS.intersection(context.kinds)):
        return SamplingDecision(fast, f"a {critical[0]} task runs here")
    if context.marked:
        return SamplingDecision(fast, f"task {context.marked[0]} asked for it")
    return SamplingDecision(slow, "no critical task runs here")


def beat_every_s(nodes: int) -> float:
    """How often each of so many nodes should post: each second, until that would be too much for the head."""
    return min(MAX_BEAT_S, max(1.0, nodes / POSTS_PER_S))
