"""A task as JSON: what GET /v1/tasks answers. Times in Unix seconds, durations in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from areal_sky.core.taskevents import where
from areal_sky.core.tasklife import TaskRecord


def view(record: TaskRecord, *, weight: float, score: float | None, reason: str, metrics: Mapping[str, float],
         now_s: float, borrowers: Sequence[str] = ()) -> dict[str, Any]:  # fmt: skip
    """All that is told of a task. `late`: its deadline has passed without its end. `borrowers`: run on its GPUs."""
    spec = record.spec
    until_s = record.ended_s if record.ended_s is not None else now_s
    waited_to_s = record.first_started_s if record.first_started_s is not None else until_s
    return {
        "task_id": record.task_id, "number": record.number, "name": spec.name, "kind": spec.kind,
        "model": spec.model, "model_type": spec.model_type, "state": record.state.value, "reason": reason,
        "priority": spec.priority, "weight": weight, "score": score, "group": spec.group,
        "accelerators": list(record.accelerators), "bundles": spec.bundles, "min_bundles": spec.fewest_bundles,
        "bundle": asdict(record.bundle), "command": spec.command or "(Python callable)",
        "labels": dict(spec.labels), "array_index": spec.array_index, "after": list(spec.after),
        "preemptible": spec.may_be_preempted, "estimate_s": spec.estimate_s, "deadline_s": spec.deadline_s,
        "late": spec.deadline_s is not None and until_s > spec.deadline_s,
        "attempt": record.attempt, "retries": record.retries, "max_retries": spec.max_retries,
        "not_before_s": record.not_before_s or None, "timeout_s": spec.timeout_s,
        "total_timeout_s": spec.total_timeout_s, "preempted": record.preempted, "lost_s": record.lost_s,
        "checkpoint_s": record.checkpoint_s, "phase": record.phase, "phase_low": record.phase_low,
        "borrowers": list(borrowers),
        "submitted_s": record.submitted_s, "started_s": record.started_s, "ended_s": record.ended_s,
        "waiting_s": max(0.0, waited_to_s - record.submitted_s),
        "running_s": None if record.started_s is None else max(0.0, until_s - record.started_s),
        "places": [{"node_id": p.node_id, "replica": p.replica, "index": p.index} for p in record.held],
        "where": where(record.held), "gone_ranks": list(record.gone), "backends": spec.backends,
        "claim": where(record.claim),
        "exit_codes": {str(e.rank): e.code for e in sorted(record.exits, key=lambda e: e.rank)},
        "metrics": dict(metrics),
    }  # fmt: skip
