"""The head's HTTP gateway: tasks, views, telemetry. JSON in and out; every route but /healthz needs a token.

Rights: operate covers submit covers read; `node` is for the nodes' own routes. Errors are {"error", "message"} with
422 InvalidInput, 401/403 Unauthorized, 404 NotFound, 409 Refused, 413 too large, 503 for state that cannot be written.
"""

from __future__ import annotations

import hmac
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

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
from areal_sky.ui.exposition import EXPOSITION_TYPE, exposition

log = logging.getLogger(__name__)
_STATUS: dict[type[ArealSkyError], int] = {
    InvalidInput: 422, NotFound: 404, Refused: 409, AlreadyExists: 409, StateError: 503, Unreachable: 503,
}  # fmt: skip
_COVERS = {"read": ("read", "submit", "operate"), "submit": ("submit", "operate"), "operate": ("operate",)}
MAX_BODY_BYTES = 2 * 2**20
MAX_SUBMIT_BYTES = MAX_PAYLOAD_BYTES + MAX_BODY_BYTES
MAX_BATCH_BYTES = 128 * 2**20  # 100,000 tasks of a kilobyte each
MAX_TOLD = 50
MAX_REPORTS = 10_000

Controller = Callable[[float], None]


class _TooLarge(InvalidInput):
    """The body is larger than its route takes."""


def _json_body(limit: int) -> Callable[[Request], Awaitable[dict[str, Any]]]:
    # Parsed by hand: FastAPI's own way would refuse lone surrogates, which carry the bytes of logs that are no UTF-8.
    async def parse(request: Request) -> dict[str, Any]:
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > limit:
                raise _TooLarge(f"the body is larger than {limit // 2**20} MiB")
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            raise InvalidInput("the body is not JSON") from None
        if not isinstance(value, dict):
            raise InvalidInput("the body must be a JSON object")
        return value

    return parse


Body = Annotated[dict[str, Any], Depends(_json_body(MAX_BODY_BYTES))]
BatchBody = Annotated[dict[str, Any], Depends(_json_body(MAX_BATCH_BYTES))]
SubmitBody = Annotated[dict[str, Any], Depends(_json_body(MAX_SUBMIT_BYTES))]


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
        return {"tasks": service.list(state, labels, _whole(request.query_params, "limit", None), explain)}

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
        attempt = _whole(q, "attempt", None)
        return service.logs(
            task_id,
            stream=q.get("stream", "out"),
            rank=_whole(q, "rank", 0) or 0,
            offset=_whole(q, "offset", 0) or 0,
            attempt=attempt,
        )

    @app.post("/v1/tasks/{task_id}/metrics", dependencies=[submit_or_node])
    def metrics(task_id: str, raw: Body) -> Any:
        values = raw.get("metrics")
        if not isinstance(values, dict):
            raise InvalidInput("metrics: expected an object of numbers")
        service.track_metrics(task_id, values, None if raw.get("rank") is None else _field(raw, "rank", int))
        return {"ok": True}

    @app.get("/v1/tasks/{task_id}/metrics", dependencies=[read])
    def reports(task_id: str, request: Request) -> Any:
        limit = _whole(request.query_params, "limit", 1000) or 1000
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
        service.enter_phase(task_id, _field(raw, "phase", str), low)
        return {"ok": True}

    @app.post("/v1/runner/logs", dependencies=[node])
    def runner_logs(raw: Body) -> Any:
        text = _field(raw, "text", str)
        next_offset = service.push_log(
            _field(raw, "task_id", str),
            _field(raw, "attempt", int),
            _field(raw, "rank", int),
            _field(raw, "stream", str),
            _field(raw, "offset", int),
            text.encode("utf-8", "surrogateescape"),
        )
        return {"next_offset": next_offset}

    @app.get("/v1/view", dependencies=[read])
    def view() -> Any:
        return asdict(service.view())

    @app.get("/v1/usage", dependencies=[read])
    def usage(request: Request) -> Any:
        return usage_to_json(service.usage(_number(request.query_params.get("since_s", "0"), "since_s")))

    @app.get("/v1/gpus", dependencies=[read])
    def gpus(request: Request) -> Any:
        seconds = _number(request.query_params.get("seconds", "60"), "seconds")
        return hub.gpus(seconds, now()) if hub is not None else {"t_s": now(), "seconds": seconds, "nodes": []}

    @app.post("/v1/replicas/{replica}/drain", dependencies=[operate])
    def drain(replica: str, raw: Body) -> Any:
        deadline_s = _number(raw.get("deadline_s"), "deadline_s")
        return {"nodes": service.drain_replica(replica, str(raw.get("reason", ""))[:500], deadline_s)}

    @app.post("/v1/replicas/{replica}/evict", dependencies=[operate])
    def evict(replica: str, raw: Body) -> Any:
        return {"nodes": service.evict_replica(replica, str(raw.get("reason", ""))[:500])}

    @app.post("/v1/nodes/heartbeat", dependencies=[node])
    def node_heartbeat(raw: Body) -> Any:
        if raw.get("cluster") not in (None, cluster):
            raise Refused(f"this is the head of cluster {cluster}, not of {str(raw.get('cluster'))[:40]}")
        now_s = now()
        told = (hub.ingest(raw, now_s) or {}) if hub is not None else {}
        sampling = watch.heard(raw, now_s) if watch is not None and hub is not None else None
        return {"lease_s": service.head_env.lease_s, "t_s": now_s, "sampling": sampling, **told}

    if watch is not None:
        watch_routes(app, watch, read, submit_or_node, operate)

    @app.get("/metrics", dependencies=[read])
    def metrics_page() -> Any:
        return PlainTextResponse(exposition(cluster, service, hub, watch, now()), media_type=EXPOSITION_TYPE)

    @app.post("/v1/controller/heartbeat", dependencies=[operate])
    def controller_heartbeat(raw: Body) -> Any:
        if on_controller is not None:
            on_controller(_number(raw.get("lease_s", 0), "lease_s"))
        return {"ok": True}

    @app.exception_handler(ArealSkyError)
    def told(_: Request, e: ArealSkyError) -> JSONResponse:
        if isinstance(e, _TooLarge):
            return _error(413, "InvalidInput", str(e))
        return _error(_STATUS.get(type(e), 500), type(e).__name__, str(e))

    @app.exception_handler(HTTPException)
    def refused(_: Request, e: HTTPException) -> JSONResponse:
        name = Unauthorized.__name__ if e.status_code in (401, 403) else NotFound.__name__
        headers = {"WWW-Authenticate": "Bearer"} if e.status_code == 401 else None
        return _error(e.status_code, name, str(e.detail), headers)

    @app.exception_handler(Exception)
    def broken(request: Request, e: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=e)
        return _error(500, ArealSkyError.__name__, "the head failed to answer this; its log says why")

    return app


def watch_routes(app: FastAPI, watch: Watch, read: Any, submit_or_node: Any, operate: Any) -> None:
    """Alerts: what is wrong, and programs' own."""

    @app.get("/v1/alerts", dependencies=[read])
    def alerts(request: Request) -> Any:
        return watch.listed(max(0, min(_whole(request.query_params, "limit", 20) or 0, MAX_REPORTS)))

    @app.post("/v1/alerts", dependencies=[submit_or_node])
    def trigger(raw: Body) -> Any:
        metrics = raw.get("metrics") or {}
        if not isinstance(metrics, dict):
            raise InvalidInput("metrics: expected an object of numbers")
        values = {str(k)[:64]: _value(v, f"metrics.{str(k)[:40]}") for k, v in list(metrics.items())[:100]}
        task_id = raw.get("task_id")
        return watch.trigger(_field(raw, "message", str), values, task_id if isinstance(task_id, str) else "")

    @app.post("/v1/nodes/{replica}/{index}/uncordon", dependencies=[operate])
    def uncordon(replica: str, index: int) -> Any:
        return {"done": watch.uncordon(replica, index)}


def _value(value: Any, key: str) -> float:
    """A number, NaN and infinities included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(f"{key}: expected a number")
    return float(value)


def _error(status: int, name: str, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": name, "message": message}, status, headers=dict(headers or {}))


def _field(raw: Mapping[str, Any], key: str, kind: type) -> Any:
    value = raw.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidInput(f"{key}: expected {'a text' if kind is str else 'a whole number'}")
    return value


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


def _whole(values: Mapping[str, str], key: str, default: int | None) -> int | None:
    text = values.get(key)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(f"{key}: expected a whole number") from None


def _number(value: Any, key: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidInput(f"{key}: expected a number")
    return number
