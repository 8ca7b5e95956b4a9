"""Policies to simulate, by name: the spec's own, others of the project, and baselines of the literature.

A name may say several things at once, joined by `+`: an order of tasks, a scaling policy, a market, a fixed size.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from areal_sky.core.launch import draft, refuse
from areal_sky.core.model import LaunchPlan
from areal_sky.core.offers import Known
from areal_sky.core.order_policies import FifoOrder
from areal_sky.errors import InvalidInput
from areal_sky.run.plugins import order_policy, policy_names, scaling_policy, strategy_names
from areal_sky.run.simulation.baselines import Srtf
from areal_sky.run.simulation.engine import Choice
from areal_sky.run.simulation.simtask import Clairvoyance
from areal_sky.spec.cluster import ClusterSpec, Market

AS_IS = "spec"  # what the spec says, unchanged
MARKETS: Mapping[str, Market] = {"on_demand": "on_demand", "spot": "spot", "mixed": "mixed"}


def _fifo(choice: Choice) -> Choice:
    """First come, first served, strictly: nobody is preempted, none goes before the first in line."""
    return replace(choice, order=FifoOrder(), preemptible=False, patience_s=0.0)


def _fifo_easy(choice: Choice) -> Choice:
    """FIFO with EASY backfill, running times known beforehand: Lifka, JSSPP'95."""
    return replace(choice, order=FifoOrder(), preemptible=False, exact_estimates=True)


def _srtf(choice: Choice) -> Choice:
    """Clairvoyant shortest remaining time first, preemptive: Schrage and Miller, Operations Research 1966."""
    return replace(choice, order=Srtf(choice.known))


# Least attained service (Tiresias, NSDI'19) is the strategy `attained`.
BASELINES: Mapping[str, Callable[[Choice], Choice]] = {
    "fifo_strict": _fifo, "fifo_easy": _fifo_easy, "srtf": _srtf,
}  # fmt: skip


def policies() -> tuple[str, ...]:
    """Every part that a policy's name may have."""
    return tuple(dict.fromkeys((AS_IS, *strategy_names(), *policy_names(), *BASELINES, *MARKETS, "static")))


def choose(name: str, spec: ClusterSpec, known: Known, folder: Path | None = None) -> Choice:
    """The policy of that name over a spec. `folder` is where the spec lies. Raises InvalidInput, Refused.

    Parts: `spec`; a strategy of scheduling; a scaling policy; a baseline; `on_demand`, `spot`, `mixed` for every group;
    `static`: every group at its largest, for good. `fixed` is the scaling policy of that name.
    """
    wrap: list[Callable[[Choice], Choice]] = []
    for part in name.split("+"):
        if part == AS_IS:
            continue
        if part in BASELINES:
            wrap.append(BASELINES[part])
        elif part in MARKETS:
            spec = _in_market(spec, MARKETS[part])
        elif part == "static":
            spec = _static(spec)
        elif part in strategy_names():
            spec = spec.model_copy(update={"scheduling": spec.scheduling.model_copy(update={"strategy": part})})
        elif part in policy_names() or ":" in part:
            spec = spec.model_copy(update={"scaling": spec.scaling.model_copy(update={"policy": part, "options": {}})})
        else:
            near = difflib.get_close_matches(part, policies(), n=1)
            hint = f", did you mean `{near[0]}`?" if near else ""
            raise InvalidInput(f"there is no policy `{part[:40]}`{hint or '; known are ' + ', '.join(policies())}")
    planned = planned_for(spec, known)
    choice = Choice(
        name, spec, planned, scaling_policy(spec.scaling, folder), order_policy(spec.scheduling, folder), Clairvoyance()
    )
    for change in wrap:
        choice = change(choice)
    return choice


def planned_for(spec: ClusterSpec, known: Known) -> LaunchPlan:
    """The plan of a spec. Raises Refused with what speaks against it; what its models need of memory is not asked."""
    planned = draft(spec, known)
    refuse(planned)
    return planned


def _in_market(spec: ClusterSpec, market: Market) -> ClusterSpec:
    groups = tuple(g.model_copy(update={"market": market}) for g in spec.groups)
    return spec.model_copy(update={"groups": groups})


def _static(spec: ClusterSpec) -> ClusterSpec:
    groups = tuple(g.model_copy(update={"min_replicas": g.max_replicas}) for g in spec.groups)
    return spec.model_copy(
        update={"groups": groups, "scaling": spec.scaling.model_copy(update={"policy": "fixed", "options": {}})}
    )
