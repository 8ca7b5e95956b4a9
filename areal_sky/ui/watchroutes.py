"""Routes of the head's watch: alerts, and /metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse

from areal_sky.errors import InvalidInput
from areal_sky.run.tasks import TaskService
from areal_sky.run.watch import Watch
from areal_sky.ui.bodies import Body, a_field, whole
from areal_sky.ui.exposition import EXPOSITION_TYPE, exposition

MAX_LISTED = 2000
MAX_METRICS = 100


def add_watch_routes(
    app: FastAPI, cluster: str, service: TaskService, hub: Any, watch: Watch | None, now: Callable[[], float], *,
    read: Any, submit_or_node: Any, operate: Any,
) -> None:  # fmt: skip
    """`read`, `submit_or_node` and `operate` are the dependencies that ask for these rights."""

    @app.get("/metrics", dependencies=[read])
    def metrics() -> Any:
        return PlainTextResponse(exposition(cluster, service, hub, watch, now()), media_type=EXPOSITION_TYPE)

    if watch is None:
        return

    @app.get("/v1/alerts", dependencies=[read])
    def alerts(request: Request) -> Any:
        return watch.listed(max(0, min(whole(request.query_params, "limit", 20) or 0, MAX_LISTED)))

    @app.post("/v1/alerts", dependencies=[submit_or_node])
    def trigger(raw: Body) -> Any:
        metrics = raw.get("metrics") or {}
        if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
            raise InvalidInput(f"metrics: expected an object of at most {MAX_METRICS} numbers")
        values = {str(k)[:64]: _value(v, str(k)[:40]) for k, v in metrics.items()}
        task_id = raw.get("task_id")
        return watch.trigger(a_field(raw, "message", str), values, task_id if isinstance(task_id, str) else "")

    @app.post("/v1/nodes/{replica}/{index}/uncordon", dependencies=[operate])
    def uncordon(replica: str, index: int) -> Any:
        return {"done": watch.uncordon(replica, index)}


def _value(value: Any, key: str) -> float:
    """A number, NaN and infinities included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(f"metrics.{key}: expected a number")
    return float(value)
