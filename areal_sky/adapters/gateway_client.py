"""The head's HTTP gateway, one method per route. The only place that imports httpx.

Every method raises errors of `areal_sky.errors`: Unreachable when nothing answers in time, Unauthorized for a wrong
token, else what the head says (InvalidInput, Refused, NotFound, ...). Thread-safe; close it when done.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from areal_sky import errors
from areal_sky.core.model import Bundle, GangDemand, NodeShape, NodeView
from areal_sky.core.taskmodel import TaskSpec
from areal_sky.core.taskspec import task_spec_to_json
from areal_sky.core.telemetry import Validity
from areal_sky.core.usage import Usage, usage_from_json
from areal_sky.core.view import HeadView, ReplicaLoad
from areal_sky.errors import ArealSkyError, Unauthorized, Unreachable

CONNECT_S = 2.0
ANSWER_S = 10.0
BATCH_S = 120.0  # a hundred thousand tasks take a while


class GatewayClient:
    def __init__(self, url: str, token: str, *, answer_s: float = ANSWER_S):
        """`answer_s`: how long one answer may take. Nothing is sent before the first call. Raises Unauthorized."""
        import httpx

        if not token.isascii() or not token.isprintable() or not token.strip():
            # httpx would refuse it too, and print it
            raise Unauthorized(f"the token for the head at {url} is missing or damaged")
        self.url = url.rstrip("/")
        self._httpx = httpx
        # Loopback or the cluster's own network: never through the proxy of somebody's environment.
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(answer_s, connect=CONNECT_S),
            trust_env=False,
            verify=False,  # there is no TLS: reading all the world's certificates would take 60 ms of processor time
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> GatewayClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- tasks

    def healthz(self) -> dict[str, Any]:
        return self._call("GET", "/healthz")

    def submit(self, spec: TaskSpec) -> dict[str, Any]:
        """{"task_id", "status": "SCHEDULED" | "QUEUED", "reason", "warnings"}; of an array also "task_ids"."""
        return self._call("POST", "/v1/tasks", task_spec_to_json(spec))

    def submit_many(self, specs: Sequence[TaskSpec]) -> dict[str, Any]:
        """All of them or none: {"tasks": [an answer for each], "warnings": [...]}."""
        body = {"tasks": [task_spec_to_json(spec) for spec in specs]}
        return self._call("POST", "/v1/tasks/batch", body, answer_s=BATCH_S)

    def tasks(
        self,
        state: str | None = None,
        labels: Mapping[str, str] | None = None,
        limit: int | None = None,
        explain: bool = False,
    ) -> list[dict[str, Any]]:
        """Tasks in queue order: running, waiting (next first), then ended (latest first). See core/taskview.py.

        `explain`: waiting tasks tell the "terms" of their place in the order.
        """
        params: dict[str, Any] = {"label": [f"{k}={v}" for k, v in (labels or {}).items()]}
        wanted = {"state": state, "limit": limit, "explain": 1 if explain else None}
        params |= {k: v for k, v in wanted.items() if v is not None}
        return self._call("GET", "/v1/tasks", params=params)["tasks"]

    def task(self, task_id: str) -> dict[str, Any]:
        return self._call("GET", f"/v1/tasks/{_part(task_id)}")

    def story(self, task_id: str) -> list[dict[str, Any]]:
        """Lines {"t_s", "text"}, oldest first."""
        return self._call("GET", f"/v1/tasks/{_part(task_id)}/story")["lines"]

    def cancel(self, task_id: str) -> dict[str, Any]:
        """Asks for it; the task as it is now."""
        return self._call("POST", f"/v1/tasks/{_part(task_id)}/cancel")

    def logs(self, task_id: str, *, stream: str = "out", rank: int = 0, offset: int = 0,
             attempt: int | None = None) -> dict[str, Any]:  # fmt: skip
        """{"text", "next_offset", "ended", "attempt"}. Offsets are bytes; a negative one counts from the end."""
        params: dict[str, Any] = {"stream": stream, "rank": rank, "offset": offset}
        if attempt is not None:
            params["attempt"] = attempt
        return self._call("GET", f"/v1/tasks/{_part(task_id)}/logs", params=params)

    def track_metrics(self, task_id: str, metrics: Mapping[str, float], rank: int | None = None) -> None:
        """`rank`: whose values these are, where they are of one rank of a gang."""
        whose = {} if rank is None else {"rank": rank}
        self._call("POST", f"/v1/tasks/{_part(task_id)}/metrics", {"metrics": dict(metrics), **whose})

    def metrics(self, task_id: str, limit: int = 1000) -> list[dict[str, Any]]:
        """What the task has reported, oldest of the latest first: {"t_s", "attempt", "metrics"}; None: no number."""
        return self._call("GET", f"/v1/tasks/{_part(task_id)}/metrics", params={"limit": limit})["reports"]

    def checkpointed(self, task_id: str) -> None:
        """Its work up to now is safe."""
        self._call("POST", f"/v1/tasks/{_part(task_id)}/checkpoint")

    def enter_phase(self, task_id: str, phase: str, low: bool) -> None:
        """The task is in this phase from now on; `low`: it leaves its GPUs idle meanwhile."""
        self._call("POST", f"/v1/tasks/{_part(task_id)}/phase", {"phase": phase, "low": low})

    def push_log(self, task_id: str, attempt: int, rank: int, stream: str, offset: int, text: str) -> int:
        """A chunk of a rank's output; returns the offset that the head wants next.

        `text` is decoded with surrogateescape, so that any bytes arrive as they were.
        """
        body = {"task_id": task_id, "attempt": attempt, "rank": rank, "stream": stream}
        return int(self._call("POST", "/v1/runner/logs", body | {"offset": offset, "text": text})["next_offset"])

    # -- alerts

    def alerts(self, limit: int = 20) -> dict[str, Any]:
        """{"active": [...], "over": [the latest `limit`]}, latest first. See core/alerts.py."""
        return self._call("GET", "/v1/alerts", params={"limit": limit})

    def trigger_alert(self, message: str, metrics: Mapping[str, float], task_id: str | None = None) -> dict[str, Any]:
        """Raises an alert; {"alert_id", "new"}, where new says that it was not active already."""
        return self._call("POST", "/v1/alerts", {"message": message, "metrics": dict(metrics), "task_id": task_id})

    def uncordon(self, replica: str, index: int) -> dict[str, Any]:
        """The node takes work again."""
        return self._call("POST", f"/v1/nodes/{_part(replica)}/{index}/uncordon")

    # -- cluster

    def view(self) -> HeadView:
        return head_view_from_json(self._call("GET", "/v1/view"))

    def usage(self, since_s: float = 0.0) -> Usage:
        """Who held which part of which node, of all holds that were open at or after `since_s` (Unix time)."""
        return usage_from_json(self._call("GET", "/v1/usage", params={"since_s": since_s}))

    def gpus(self, seconds: float = 60, points: int = 0) -> dict[str, Any]:
        """Every GPU of every node; `history` is by the second, or in so many `points` over a longer time."""
        return self._call("GET", "/v1/gpus", params={"seconds": seconds} | ({"points": points} if points else {}))

    def drain(self, replica: str, reason: str, deadline_s: float) -> dict[str, Any]:
        """No new work on the replica; what runs there at `deadline_s` (Unix time) is moved."""
        return self._call("POST", f"/v1/replicas/{_part(replica)}/drain", {"reason": reason, "deadline_s": deadline_s})

    def evict(self, replica: str, reason: str) -> dict[str, Any]:
        """Move what runs on the replica now; it takes no new work."""
        return self._call("POST", f"/v1/replicas/{_part(replica)}/evict", {"reason": reason})

    def controller_heartbeat(self, lease_s: float = 0.0) -> dict[str, Any]:
        return self._call("POST", "/v1/controller/heartbeat", {"lease_s": lease_s})

    # -- how

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        answer_s: float | None = None,
    ) -> Any:
        # Plain json.dumps escapes lone surrogates, which httpx's own encoder cannot send.
        content = None if body is None else json.dumps(body).encode("ascii")
        headers = {} if content is None else {"Content-Type": "application/json"}
        with self._translated():
            limits = {} if answer_s is None else {"timeout": answer_s}
            reply = self._http.request(method, path, content=content, params=params, headers=headers, **limits)
        if reply.status_code < 300:
            try:
                return reply.json()
            except ValueError:
                raise Unreachable(f"what answers at {self.url} is not an areal_sky head") from None
        raise answer_error(reply.status_code, reply.content, self.url)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except self._httpx.TimeoutException:
            raise Unreachable(f"the head at {self.url} does not answer in time") from None
        except (self._httpx.HTTPError, self._httpx.InvalidURL, OSError) as e:
            raise Unreachable(f"no head answers at {self.url}: {e or type(e).__name__}") from None


def head_view_from_json(raw: Mapping[str, Any]) -> HeadView:
    """Raises Unreachable when it is not what this version expects."""
    try:
        return HeadView(
            t_s=raw["t_s"],
            nodes=tuple(NodeView(**{**n, "shape": NodeShape(**n["shape"])}) for n in raw["nodes"]),
            loads=tuple(ReplicaLoad(**{**x, "validity": Validity(x["validity"])}) for x in raw["loads"]),
            demand=tuple(
                GangDemand(**{**d, "bundle": Bundle(**d["bundle"]), "accelerators": tuple(d["accelerators"])})
                for d in raw["demand"]
            ),
            running_tasks=raw["running_tasks"],
            waiting_tasks=raw["waiting_tasks"],
        )
    except (KeyError, TypeError, ValueError) as e:
        raise Unreachable(f"the head speaks another version: {e}") from None


def _part(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="") or "-"


def answer_error(status: int, content: bytes, url: str) -> ArealSkyError:
    """What the head said went wrong, as the error that it is here."""
    try:
        raw = json.loads(content)
        name, message = str(raw["error"]), str(raw["message"])
    except (ValueError, KeyError, TypeError):
        return Unreachable(f"the head at {url} answered with HTTP {status}")
    if status in (401, 403):
        return Unauthorized(message)
    known = getattr(errors, name, None)
    if isinstance(known, type) and issubclass(known, ArealSkyError) and known is not errors.SpecError:
        return cast("ArealSkyError", known(message))
    return ArealSkyError(message)
