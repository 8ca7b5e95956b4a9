"""A comparison: one scenario, to be run under any policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_sky.adapters.catalog import shipped_offers
from areal_sky.core.offers import Known
from areal_sky.errors import InvalidInput
from areal_sky.run.offers import from_dict
from areal_sky.run.simulation import history, workloads
from areal_sky.run.simulation.engine import Scenario, Simulation
from areal_sky.run.simulation.policies import AS_IS, choose, planned_for
from areal_sky.run.simulation.result import SimResult
from areal_sky.run.simulation.world import DAY_S, WORLDS
from areal_sky.run.supervise import SpecSource
from areal_sky.spec.cluster import ClusterSpec
from areal_sky.spec.fields import did_you_mean
from areal_sky.specfile import read_spec

__all__ = ["AS_IS", "Study", "of_cluster", "of_spec"]


@dataclass(frozen=True, slots=True)
class Study:
    """`known`: the offers; `folder`: where the spec lies; `truth`: what became of it in reality, if that is known."""

    spec: ClusterSpec
    known: Known
    scenario: Scenario
    folder: Path
    truth: tuple[SimResult, ...] = ()

    def run(self, policy: str) -> SimResult:
        """Raises InvalidInput: no such policy."""
        return Simulation(self.scenario, choose(policy, self.spec, self.known, self.folder)).run()


def of_spec(
    file: str,
    workload: Path | None,
    spot: Sequence[Path],
    world: str,
    days: float | None,
    seed: int,
    now_s: float,
) -> Study:
    """A spec with the work of a file, or made-up work. Prices are those of the shipped table.

    Raises SpecError, InvalidInput, Refused.
    """
    if world not in WORLDS:
        near = did_you_mean(world, WORLDS)
        raise InvalidInput(f"--world: there is none `{world[:40]}`, expected {', '.join(WORLDS)}{near}")
    spec = read_spec(file, now_s)
    known = Known(shipped_offers())
    plan = planned_for(spec, known)
    traces = workloads.read_spot_traces(spot)
    if days is None and traces and workload is None:
        days = min(t.length_s for t in traces) / DAY_S
    if workload is not None:
        work = workloads.read_workload(workload, plan, days, seed)
    else:
        work = workloads.made_up(spec, plan, days or 1.0, seed)
    scenario = Scenario(work.name, work.tasks, work.runs, WORLDS[world], traces, work.days or days or 1.0, seed)
    return Study(spec, known, scenario, Path(file).absolute().parent)


def of_cluster(name: str, seed: int) -> Study:
    """What a cluster of ours has recorded. Raises NotFound, StateError, InvalidInput."""
    cluster = history.find(name)
    cluster.records()
    source = SpecSource.saved(cluster)
    spec = source.spec()
    known = from_dict(source.known) if source.known else Known(shipped_offers())
    scenario, truth = history.recorded(cluster, planned_for(spec, known), seed)
    return Study(spec, known, scenario, Path(source.path).parent, (truth,))
