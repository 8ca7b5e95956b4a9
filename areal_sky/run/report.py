"""What a cluster looks like now, and why: state, live view and prices put together as plain JSON values."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from areal_sky.core.alerts import from_json
from areal_sky.core.cost import bill
from areal_sky.core.model import HEAD_GROUP, ClusterState, LaunchPlan, Replica
from areal_sky.core.story import sentence, story
from areal_sky.core.view import HeadView
from areal_sky.errors import ArealSkyError, NotFound
from areal_sky.home import ClusterHome
from areal_sky.run import supervise
from areal_sky.run.alertstore import sentence as sentence_of

ALERTS = 200  # that are over, looked through for a replica's story


def status(cluster: ClusterHome) -> dict[str, Any]:
    """Keys: cluster, state, controller, cloud, head, groups, replicas, tasks, cost. Raises NotFound, StateError."""
    now_s = time.time()
    state = cluster.state()
    _, launch = supervise.load_plan(cluster)
    view, problem = _view(cluster, state)
    costs = bill(state, launch, now_s)
    return {
        "cluster": cluster.name,
        "state": phase(state),
        "controller": "running" if supervise.controller_runs(cluster) else "not running",
        "cloud": {"problem": state.cloud_problem},
        "head": _head(cluster) | {"problem": problem},
        "groups": [_group(name, state, launch) for name in state.groups],
        "replicas": [_replica(r, view, now_s) for r in sorted(state.replicas.values(), key=_head_first)],
        "tasks": {"running": view.running_tasks, "waiting": view.waiting_tasks} if view else None,
        "cost": {
            "usd": round(costs.usd, 4),
            "usd_per_hour_now": round(costs.usd_per_hour_now, 4),
            "complete": costs.complete,
        },
    }


def phase(state: ClusterState) -> str:
    """The cluster in one word: DOWN, GOING_DOWN, STARTING, READY or CHANGING."""
    if state.down_s is not None:
        return "DOWN"
    if state.down_requested_s is not None:
        return "GOING_DOWN"
    ready = all(
        sum(r.state == "READY" for r in state.replicas.values() if r.group == g.name) >= g.desired
        for g in state.groups.values()
    )
    if ready:
        return "READY"
    return "CHANGING" if any(r.ready_s for r in state.replicas.values()) else "STARTING"


def why(cluster: ClusterHome, subject: str) -> list[tuple[float, str]]:
    """The story of a task, replica, group or of the cluster itself. Raises NotFound, Unreachable."""
    records = cluster.records()
    if subject == cluster.name:
        return [(r.t_s, sentence(r.event)) for r in records]
    if lines := story(records, subject):
        return sorted([*lines, *_alerts(cluster, subject)])
    try:
        return [(float(x["t_s"]), str(x["text"])) for x in cluster.gateway("read").story(subject)]
    except NotFound:
        state = cluster.state()
        known = ", ".join([*state.groups, *state.replicas])
        raise NotFound(f"nothing known about {subject!r}: name a task (`areal-sky queue`) or one of {known}") from None


def _alerts(cluster: ClusterHome, replica: str) -> list[tuple[float, str]]:
    """The latest alerts about the replica's nodes; nothing of them where the head does not answer."""
    try:
        with cluster.gateway("read") as gateway:
            known = gateway.alerts(ALERTS)
    except ArealSkyError:
        return []
    mine = [from_json(a) for a in (*known["active"], *known["over"]) if a["where"]["replica"] == replica]
    lines = [(a.raised_s, sentence_of("raised", a) + "".join(f"; {words}" for words in a.done)) for a in mine]
    return lines + [(a.resolved_s, sentence_of("resolved", a)) for a in mine if a.resolved_s is not None]


def _view(cluster: ClusterHome, state: ClusterState) -> tuple[HeadView | None, str]:
    if state.down_s is not None:
        return None, ""
    try:
        return cluster.gateway("read").view(), ""
    except ArealSkyError as e:
        return None, str(e)


def _head(cluster: ClusterHome) -> dict[str, Any]:
    try:
        return dict(cluster.address())
    except ArealSkyError:
        return {}


def _group(name: str, state: ClusterState, launch: LaunchPlan) -> dict[str, Any]:
    wanted = state.groups[name]
    plan = launch.group(name)
    mine = [r for r in state.replicas.values() if r.group == name]
    return {
        "group": name,
        "desired": wanted.desired,
        "ready": sum(r.state == "READY" for r in mine),
        "live": len(mine),
        "min": plan.min_replicas if plan else None,
        "max": plan.max_replicas if plan else None,
        "nodes_per_replica": plan.nodes_per_replica if plan else None,
        "shape": asdict(plan.shape) if plan else None,
        "reason": wanted.reason,
        "by": wanted.by,
        "failures": wanted.failures,
        "given_up": wanted.last_fault if wanted.given_up else None,
    }


def _replica(r: Replica, view: HeadView | None, now_s: float) -> dict[str, Any]:
    load = view.load(r.name) if view else None
    return {
        "replica": r.name,
        "group": r.group,
        "state": r.state.value,
        "for_s": round(now_s - r.since_s, 1),
        "nodes": r.nodes,
        "market": r.market,
        "usd_per_hour": None if r.price_usd_per_hour is None else r.price_usd_per_hour * r.nodes,
        "running_tasks": load.running_tasks if load else None,
        "gpu_utilization": load.utilization_mean if load else None,
        "telemetry": load.validity.value if load else "unknown",
        "reason": r.reason,
        "note": r.note,
    }


def _head_first(r: Replica) -> tuple[bool, str, int]:
    return r.group != HEAD_GROUP, r.group, r.slot
