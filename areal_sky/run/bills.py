"""Bills from the state folder: of a cluster that is up, that is down, or whose name was used again since."""

from __future__ import annotations

import time

from areal_sky.core.cost import Bill, Breakdown, bill
from areal_sky.core.model import LaunchPlan
from areal_sky.errors import ArealSkyError
from areal_sky.home import ClusterHome, choose_cluster, clusters, past_clusters
from areal_sky.run import supervise
from areal_sky.run.usage import latest_usage


def read_bill(cluster: ClusterHome, by: Breakdown, now_s: float) -> Bill:
    """The cluster's bill so far. Raises NotFound, StateError."""
    return bill(cluster.state(), _plan(cluster), now_s, latest_usage(cluster), by)


def billed_clusters(name: str | None, every: bool) -> list[ClusterHome]:
    """The named cluster, or the only one that is up or that there is; with `every` all of that name, past ones too.

    Raises NotFound, InvalidInput.
    """
    if every:
        return [c for c in (*past_clusters(), *clusters()) if name in (None, c.name)]
    known = clusters()
    if name is None and len(known) == 1:
        return known
    return [choose_cluster(name)]


def title(cluster: ClusterHome) -> str:
    """The cluster's name; a past one's with the time of its end."""
    state = cluster.state()
    if cluster.dir == ClusterHome(cluster.name).dir or state.down_s is None:
        return cluster.name
    return f"{cluster.name} (until {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(state.down_s))})"


def _plan(cluster: ClusterHome) -> LaunchPlan | None:
    # Prices are in the events; the plan only helps with what an older record lacks, and must not stop a bill.
    try:
        return supervise.load_plan(cluster)[1]
    except ArealSkyError:
        return None
