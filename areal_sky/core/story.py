"""Events in words: one sentence each, so that `why`, `events` and progress lines all say the same."""

from __future__ import annotations

from collections.abc import Iterable

from areal_sky.core import events as ev
from areal_sky.units import format_duration, format_usd


def sentence(event: ev.Event) -> str:
    """What happened, in one sentence without a final dot."""
    match event:
        case ev.ClusterCreated(cluster=cluster):
            return f"cluster {cluster} wanted"
        case ev.ControllerStarted(pid=pid):
            return f"controller started (pid {pid})"
        case ev.GroupDesired(group=group, desired=desired, reason=reason, by=by):
            return f"{group}: {desired} wanted by {by}: {reason}"
        case ev.ScalingHeld(group=group, reason=reason):
            return f"{group}: left as it is: {reason}"
        case ev.LaunchIntended() as e:
            price = "price unknown" if e.price_usd_per_hour is None else f"{format_usd(e.price_usd_per_hour)}/h"
            each = f"{e.nodes} nodes, each {price}" if e.nodes > 1 else price
            return f"{e.replica}: will be launched ({e.market}, {each}): {e.reason}"
        case ev.LaunchAccepted(replica=replica, adopted=adopted):
            return f"{replica}: found running, adopted" if adopted else f"{replica}: launch accepted"
        case ev.ReplicaNoted(replica=replica, note=note):
            return f"{replica}: {note}"
        case ev.CloudSilent(reason=reason):
            return f"the cloud does not answer, nothing is done to machines until it does: {reason}"
        case ev.CloudAnswers():
            return "the cloud answers again"
        case ev.ReplicaProvisioned(replica=replica):
            return f"{replica}: machines are up"
        case ev.ReplicaReady(replica=replica):
            return f"{replica}: ready"
        case ev.LaunchFailed(replica=replica, reason=reason):
            return f"{replica}: launch failed: {reason}"
        case ev.DrainStarted(replica=replica, reason=reason):
            return f"{replica}: draining: {reason}"
        case ev.ReplicaLost(replica=replica, reason=reason):
            return f"{replica}: lost: {reason}"
        case ev.TerminateIntended(replica=replica, reason=reason):
            return f"{replica}: will be ended: {reason}"
        case ev.ReplicaGone(replica=replica):
            return f"{replica}: gone, confirmed"
        case ev.DownRequested(reason=reason, drain_s=drain_s):
            return f"cluster goes down: {reason}; running tasks get {format_duration(drain_s)}"
        case ev.ClusterDown():
            return "cluster is down: every replica and the head are confirmed gone"
        case _:
            return type(event).__name__


def story(records: Iterable[ev.Record], subject: str) -> list[tuple[float, str]]:
    """(time, sentence) of every event about that group or replica, in order; empty when there is none.

    A replica's story includes what was decided about its group while it lived.
    """
    records = list(records)
    group = next(
        (r.event.group for r in records if isinstance(r.event, ev.LaunchIntended) and r.event.replica == subject), None
    )
    lines: list[tuple[float, str]] = []
    alive = False
    for r in records:
        about = r.event.subjects()
        if isinstance(r.event, ev.LaunchIntended) and r.event.replica == subject:
            alive = True
        decided = alive and group in about and isinstance(r.event, ev.GroupDesired)
        if subject in about or decided:
            lines.append((r.t_s, sentence(r.event)))
        if isinstance(r.event, ev.ReplicaGone) and r.event.replica == subject:
            alive = False
    return lines
