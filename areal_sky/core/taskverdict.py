"""What becomes of a running task whose ranks have ended, whose nodes have died, or whose time is over."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from areal_sky.core.failures import POISON_RUNS, backoff_s, is_poison, larger
from areal_sky.core.taskevents import Ended, Requeued, Stopping
from areal_sky.core.tasklife import RankEnd, TaskRecord, failed_on, first_failure
from areal_sky.core.taskmodel import TaskState
from areal_sky.units import format_duration

# A node's death is noticed by Ray up to about 9 s after its processes vanish (a hung node, tuned health checks).
SETTLE_S = 10.0
# How long after SIGKILL a rank may stay silent before its runner is taken for gone.
SILENT_S = 30.0
# Ray takes a moment to give back what a gang had; until then its room looks like somebody else's.
GIVEN_BACK_S = 3.0
_SIGTERM_OR_KILL = frozenset({-9, -15, 137, 143})


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to decide yet."""


Verdict = Wait | Stopping | Requeued | Ended


def verdict(
    record: TaskRecord,
    dead_nodes: Collection[str],
    now_s: float,
    grace_s: float,
    larger_accelerators: tuple[str, ...] = (),
) -> Verdict:
    """What becomes of a started task whose ranks have ended or whose nodes have died.

    The loss of a node is nobody's failure: the task is requeued and no retry is counted. A failure that may be the
    echo of a dying node (a killed process, a vanished runner) is judged only after SETTLE_S.
    `larger_accelerators`: those of the cluster with more memory than the one that it runs on.
    """
    world = record.world
    ends = {e.rank: e for e in record.exits}
    dead = {r for r in (*world, *record.leaving) if record.places[r].node_id in dead_nodes}
    finished = {r for r in world if r in ends and ends[r].code == 0}
    lost = sorted(dead & set(world) - finished)
    first_bad = first_failure(record)
    if record.stop is None:
        if len(finished) == len(world):
            return Ended(TaskState.SUCCEEDED)
        if lost:
            return Stopping("lost", f"node {record.places[lost[0]]} died under rank {lost[0]}")
        if first_bad is not None:
            return Stopping("failed", _why_failed(first_bad))
        return Wait()

    silent = [r for r in (*world, *record.leaving) if r not in ends and r not in dead]
    given_up = record.stop_s is not None and now_s > record.stop_s + grace_s + SILENT_S
    if silent and not given_up:
        return Wait()
    match record.stop:
        case "cancel":
            return Ended(TaskState.CANCELLED, record.stop_reason)
        case "expired":
            return Ended(TaskState.FAILED, record.stop_reason)
        case "evict" | "lost":
            return Requeued(record.stop_reason, counted=False)
        case "regrow":
            return Requeued(record.stop_reason, counted=False, not_before_s=now_s + GIVEN_BACK_S)
        case "preempt":
            lost_s = record.unsaved_s(now_s)
            return Requeued(f"{record.stop_reason}; {format_duration(int(lost_s), 2)} of work lost", counted=False)
        case _:
            pass
    if lost:
        return Requeued(f"node {record.places[lost[0]]} died under rank {lost[0]}", counted=False)
    if record.stop == "timeout":
        return _try_again(record, now_s, None, larger_accelerators)
    echo = any(ends[r].code is None for r in world if r in ends) or (first_bad and first_bad.code in _SIGTERM_OR_KILL)
    if echo and first_bad and now_s < first_bad.t_s + SETTLE_S:
        return Wait()
    return _try_again(record, now_s, first_bad, larger_accelerators)


def shrunk(record: TaskRecord, dead_nodes: Collection[str], now_s: float, grace_s: float) -> tuple[int, ...]:
    """The leaving ranks that are gone: ended, lost with their nodes, or silent for too long after the kill."""
    if not record.leaving or record.stop is not None:
        return ()
    ended = {e.rank for e in record.exits}
    given_up = record.leaving_s is not None and now_s > record.leaving_s + grace_s + SILENT_S
    return tuple(r for r in record.leaving if given_up or r in ended or record.places[r].node_id in dead_nodes)


def overdue(record: TaskRecord, ran_s: float, total_s: float) -> Stopping | Ended | None:
    """What follows where this run (`ran_s` so far) or the task since its first start (`total_s`) takes too long.

    None while it has time. Seconds.
    """
    spec = record.spec
    if spec.total_timeout_s is not None and total_s > spec.total_timeout_s:
        reason = f"not done {format_duration(spec.total_timeout_s)} after its first start (total_timeout)"
        if record.stop in ("cancel", "expired"):
            return None
        return Stopping("expired", reason) if record.holds else Ended(TaskState.FAILED, reason)
    if spec.timeout_s is not None and record.stop is None and ran_s > spec.timeout_s:
        return Stopping("timeout", f"ran longer than {format_duration(spec.timeout_s)} (timeout)")
    return None


def _try_again(
    record: TaskRecord, now_s: float, first_bad: RankEnd | None, larger_accelerators: tuple[str, ...]
) -> Requeued | Ended:
    """After a failure of its own: the next run with what this one taught, or the end."""
    reason, most = record.stop_reason, record.spec.max_retries
    oom = first_bad.oom if first_bad else ""
    if oom:
        reason += f"; out of {'GPU' if oom == 'gpu' else 'host'} memory"
    latest = failed_on(record) if first_bad else None
    if latest is not None and is_poison((*record.failures, latest)):
        return Ended(TaskState.FAILED, f"{reason}; {POISON_RUNS} runs on different nodes failed alike: not run again")
    if record.retries >= most:
        return Ended(TaskState.FAILED, reason)
    n = record.retries + 1
    bundle = larger(record.bundle, oom)
    accelerators = larger_accelerators if oom == "gpu" and bundle is None else ()
    wait_s = backoff_s(record.spec.backoff_s, n)
    return Requeued(f"{reason}; retry {n} of {most}", True, now_s + wait_s, bundle, accelerators)


def _why_failed(e: RankEnd) -> str:
    if e.code is None:
        return f"rank {e.rank} was lost: {e.lost or 'its runner died'}"
    if e.code < 0:
        how = f"was killed by signal {-e.code}"
    elif e.code == 127:
        how = "ended with exit code 127 (command not found)"
    else:
        how = f"ended with exit code {e.code}"
    words = e.tail or e.lost
    return f"rank {e.rank} {how}" + (f": {words}" if words else "")
