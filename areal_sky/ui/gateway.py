"""The head's HTTP gateway: tasks, views, telemetry. JSON in and out; every route but /healthz needs a token.

Rights: operate covers submit covers read; `node` is for the nodes' own routes. Errors are {"error", "message"} with
422 InvalidInput, 401/403 Unauthorized, 404 NotFound, 409 Refused, 413 too large, 503 for state that cannot be written.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from areal_sky.core.heartbeat import read_heartbeat
from areal_sky.core.taskmodel import TaskSpec
from areal_sky.core.taskspec import MAX_PAYLOAD_BYTES, task_spec_from_json
from areal_sky.core.tokens import task_token
from areal_sky.core.usage import usage_to_json
from areal_sky.errors import (
    AlreadyExists,
    ArealSkyError,
    InvalidInput,
    NotFound,
    Refused,
    StateError,
    Unauthorized,
    Unreachable,
)
from areal_sky.run.tasks import TaskService
from areal_sky.run.watch import Watch
from areal_sky.ui.bodies import MAX_BODY_BYTES, Body, TooLarge, a_field, a_number, json_body, whole
from areal_sky.ui.nodedoor import NodeDoor
from areal_sky.ui.watchroutes import add_watch_routes

log = logging.getLogger(__name__)
_STATUS: dict[type[ArealSkyError], int] = {
    InvalidInput: 422, NotFound: 404, Refused: 409, AlreadyExists: 409, StateError: 503, Unreachable: 503,
}  # fmt: skip
_COVERS = {"read": ("read", "submit", "operate"), "submit": ("submit", "operate"), "operate": ("operate",)}
MAX_SUBMIT_BYTES = MAX_PAYLOAD_BYTES + MAX_BODY_BYTES
MAX_BATCH_BYTES = 128 * 2**20  # 100,000 tasks of a kilobyte each
MAX_TOLD = 50
MAX_REPORTS = 10_000
MAX_HISTORY_S, MAX_POINTS = 7 * 86400.0, 1000

Controller = Callable[[float], None]


BatchBody = Annotated[dict[str, Any], Depends(json_body(MAX_BATCH_BYTES))]
SubmitBody = Annotated[dict[str, Any], Depends(json_body(MAX_SUBMIT_BYTES))]


def create_app(
    service: TaskService,
    hub: Any,
    tokens: Mapping[str, str],
    cluster: str,
    on_controller: Controller | None = None,
    now: Callable[[], float] = time.time,
    watch: Watch | None = None,
) -> FastAPI:
    """The ASGI application. `tokens` maps rights to tokens; `hub` is the TelemetryHub or None, `watch` finds anomalies.

    `on_controller` is called with the lease that a controller's heartbeat asks for.
    """
    app = FastAPI(title="areal_sky", docs_url=None, redoc_url=None, openapi_url=None)
    known = [(right, token.encode()) for right, token in tokens.items() if token and right != "ray"]
    known.append(("submit", task_token(tokens.get("node", "")).encode()))

    def right(*allowed: str) -> Any:
        def check(request: Request) -> str:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            # Every token is compared, so the time taken tells nothing.
            matches = [r for r, t in known if t and hmac.compare_digest(t, given.strip().encode())]
            if scheme.lower() != "bearer" or not matches:
                raise HTTPException(401, "a token is missing or unknown")
            if not set(matches) & set(allowed):
                raise HTTPException(403, f"this token has the right to {matches[0]}, not to {allowed[0]}")
            return matches[0]

        return Depends(check)

    read, submit, operate = (right(*_COVERS[r]) for r in ("read", "submit", "operate"))
    node = right("node")
    submit_or_node = right("submit", "operate", "node")

    @app.get("/healthz")
    def healthz() -> Any:
        return {"ok": True, "cluster": cluster}

    @app.post("/v1/tasks", dependencies=[submit])
    def submit_task(raw: SubmitBody) -> Any:
        return service.submit(task_spec_from_json(raw))

    @app.post("/v1/tasks/batch", dependencies=[submit])
    def submit_many(raw: BatchBody) -> Any:
        tasks = raw.get("tasks")
        if not isinstance(tasks, list) or not tasks:
            raise InvalidInput("tasks: expected a list of tasks")
        return service.submit_many(_specs(tasks))

    @app.get("/v1/tasks", dependencies=[read])
    def list_tasks(request: Request, state: str | None = None) -> Any:
        labels = dict(_label(text) for text in request.query_params.getlist("label"))
        explain = request.query_params.get("explain") == "1"
        return {"tasks": service.list(state, labels, whole(request.query_params, "limit", None), explain)}

    @app.get("/v1/tasks/{task_id}", dependencies=[read])
    def get_task(task_id: str) -> Any:
        return service.get(task_id)

    @app.get("/v1/tasks/{task_id}/story", dependencies=[read])
    def story(task_id: str) -> Any:
        return {"lines": service.story(task_id)}

    @app.post("/v1/tasks/{task_id}/cancel", dependencies=[submit])
    def cancel(task_id: str) -> Any:
        return service.cancel(task_id)

    @app.get("/v1/tasks/{task_id}/logs", dependencies=[read])
    def logs(task_id: str, request: Request) -> Any:
        q = request.query_params
        attempt = whole(q, "attempt", None)
        return service.logs(
            task_id,
            stream=q.get("stream", "out"),
            rank=whole(q, "rank", 0) or 0,
            offset=whole(q, "offset", 0) or 0,
            attempt=attempt,
        )

    @app.post("/v1/tasks/{task_id}/metrics", dependencies=[submit_or_node])
    def metrics(task_id: str, raw: Body) -> Any:
        values = raw.get("metrics")
        if not isinstance(values, dict):
            raise InvalidInput("metrics: expected an object of numbers")
        service.track_metrics(task_id, values, None if raw.get("rank") is None else a_field(raw, "rank", int))
        return {"ok": True}

    @app.get("/v1/tasks/{task_id}/metrics", dependencies=[read])
    def reports(task_id: str, request: Request) -> Any:
        limit = whole(request.query_params, "limit", 1000) or 1000
        return {"reports": service.metrics(task_id, max(1, min(limit, MAX_REPORTS)))}

    @app.post("/v1/tasks/{task_id}/checkpoint", dependencies=[submit_or_node])
    def checkpoint(task_id: str) -> Any:
        service.checkpointed(task_id)
        return {"ok": True}

    @app.post("/v1/tasks/{task_id}/phase", dependencies=[submit_or_node])
    def phase(task_id: str, raw: Body) -> Any:
        low = raw.get("low", False)
        if not isinstance(low, bool):
            raise InvalidInput("low: expected true or false")
        service.enter_phase(task_id, a_field(raw, "phase", str), low)
        return {"ok": True}

    @app.post("/v1/runner/logs", dependencies=[node])
    def runner_logs(raw: Body) -> Any:
        text = a_field(raw, "text", str)
        next_offset = service.push_log(
            a_field(raw, "task_id", str),
            a_field(raw, "attempt", int),
            a_field(raw, "rank", int),
            a_field(raw, "stream", str),
            a_field(raw, "offset", int),
            text.encode("utf-8", "surrogateescape"),
        )
        return {"next_offset": next_offset}

    @app.get("/v1/view", dependencies=[read])
    def view() -> Any:
        return asdict(service.view())

    @app.get("/v1/usage", dependencies=[read])
    def usage(request: Request) -> Any:
        return usage_to_json(service.usage(a_number(request.query_params.get("since_s", "0"), "since_s")))

    @app.get("/v1/gpus", dependencies=[read])
    def gpus(request: Request) -> Any:
        seconds = a_number(request.query_params.get("seconds", "60"), "seconds")
        if hub is None:
            return {"t_s": now(), "seconds": seconds, "nodes": []}
        points = whole(request.query_params, "points", None)
        if points is None:
            return hub.gpus(min(max(0.0, seconds), MAX_HISTORY_S), now())
        return hub.gpus(min(max(1.0, seconds), MAX_HISTORY_S), now(), max(1, min(points, MAX_POINTS)))

    @app.post("/v1/replicas/{replica}/drain", dependencies=[operate])
    def drain(replica: str, raw: Body) -> Any:
        deadline_s = a_number(raw.get("deadline_s"), "deadline_s")
        return {"nodes": service.drain_replica(replica, str(raw.get("reason", ""))[:500], deadline_s)}

    @app.post("/v1/replicas/{replica}/evict", dependencies=[operate])
    def evict(replica: str, raw: Body) -> Any:
        return {"nodes": service.evict_replica(replica, str(raw.get("reason", ""))[:500])}

    @app.post("/v1/nodes/heartbeat", dependencies=[node])
    def node_heartbeat(raw: Body) -> dict[str, Any]:
        if raw.get("cluster") not in (None, cluster):
            raise Refused(f"this is the head of cluster {cluster}, not of {str(raw.get('cluster'))[:40]}")
        now_s = now()
        answer = {"lease_s": service.head_env.lease_s, "t_s": now_s}
        if hub is None:
            return answer
        beat = read_heartbeat(raw, now_s)
        answer |= hub.ingest(beat, now_s)
        if watch is not None and (sampling := watch.heard(beat, now_s)) is not None:
            answer["sampling"] = sampling
        return answer

    add_watch_routes(app, cluster, service, hub, watch, now, read=read, submit_or_node=submit_or_node, operate=operate)

    @app.post("/v1/controller/heartbeat", dependencies=[operate])
    def controller_heartbeat(raw: Body) -> Any:
        if on_controller is not None:
            on_controller(a_number(raw.get("lease_s", 0), "lease_s"))
        return {"ok": True}

    @app.exception_handler(ArealSkyError)
    def told(_: Request, e: ArealSkyError) -> JSONResponse:
        status, body = _refusal(e)
        return _error(status, body["error"], body["message"])

    @app.exception_handler(HTTPException)
    def refused(_: Request, e: HTTPException) -> JSONResponse:
        name = Unauthorized.__name__ if e.status_code in (401, 403) else NotFound.__name__
        headers = {"WWW-Authenticate": "Bearer"} if e.status_code == 401 else None
        return _error(e.status_code, name, str(e.detail), headers)

    @app.exception_handler(Exception)
    def broken(request: Request, e: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=e)
        return _error(500, ArealSkyError.__name__, "the head failed to answer this; its log says why")

    app.add_middleware(
        NodeDoor, token=tokens.get("node", ""), take=node_heartbeat, refuse=_refusal, limit=MAX_BODY_BYTES
    )
    return app


def _refusal(e: ArealSkyError) -> tuple[int, dict[str, str]]:
    if isinstance(e, TooLarge):
        return 413, {"error": "InvalidInput", "message": str(e)}
    return _STATUS.get(type(e), 500), {"error": type(e).__name__, "message": str(e)}


def _error(status: int, name: str, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": name, "message": message}, status, headers=dict(headers or {}))


def _specs(raws: list[Any]) -> list[TaskSpec]:
    """Every mistake of every task, each with the task's place in the list."""
    specs: list[TaskSpec] = []
    wrong: list[str] = []
    for i, raw in enumerate(raws):
        try:
            specs.append(task_spec_from_json(raw))
        except InvalidInput as e:
            wrong += [f"tasks[{i}].{line}" for line in str(e).splitlines()]
    if wrong:
        more = f"\n... and {len(wrong) - MAX_TOLD} mistakes more" if len(wrong) > MAX_TOLD else ""
        raise InvalidInput("\n".join(wrong[:MAX_TOLD]) + more)
    return specs


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InvalidInput(f"label {text[:40]!r}: expected KEY=VALUE")
    return key, value
