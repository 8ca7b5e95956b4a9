"""A node's posts to its head over one kept connection: http.client, since httpx alone would be a third of the agent."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any

from areal_sky.adapters.gateway_client import CONNECT_S, answer_error
from areal_sky.errors import Unauthorized, Unreachable

ANSWER_S = 10.0


class HeadPost:
    """`heartbeat` may be called by one thread at a time. Raises Unauthorized for a token that no header can carry."""

    def __init__(self, host: str, port: int, token: str):
        if not token.isascii() or not token.isprintable() or not token.strip():
            raise Unauthorized(f"the token for the head at http://{host}:{port} is missing or damaged")
        self._url = f"http://{host}:{port}"
        self._http = http.client.HTTPConnection(host, port, timeout=CONNECT_S)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def heartbeat(self, heartbeat: Mapping[str, Any]) -> dict[str, Any]:
        """The head's answer. Raises Unreachable, or what the head says."""
        content = json.dumps(heartbeat, separators=(",", ":")).encode("ascii")
        kept = self._http.sock is not None
        try:
            status, answer = self._post(content)
        except (http.client.HTTPException, OSError):
            self._http.close()
            if not kept:
                raise self._unreachable() from None
            try:  # the head closes a connection that was idle: that says nothing of the head
                status, answer = self._post(content)
            except (http.client.HTTPException, OSError):
                self._http.close()
                raise self._unreachable() from None
        if status >= 300:
            raise answer_error(status, answer, self._url)
        try:
            return dict(json.loads(answer))
        except (ValueError, TypeError):
            raise Unreachable(f"what answers at {self._url} is not an areal_sky head") from None

    def close(self) -> None:
        self._http.close()

    def _post(self, content: bytes) -> tuple[int, bytes]:
        if self._http.sock is None:
            self._http.connect()
            self._http.sock.settimeout(ANSWER_S)
        self._http.request("POST", "/v1/nodes/heartbeat", content, self._headers)
        reply = self._http.getresponse()
        return reply.status, reply.read()

    def _unreachable(self) -> Unreachable:
        return Unreachable(f"no head answers at {self._url}")
