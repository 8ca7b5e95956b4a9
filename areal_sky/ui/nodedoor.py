"""The short way for heartbeats: they are most of a large cluster's requests, and FastAPI's own path costs four times
as much as all that is done with one. What does not carry the nodes' token goes the usual way, and is refused there.

Where many nodes send them, heartbeats are taken some at a time: one by one, each would find the processor's caches
cold, and cost three times as much. Bad news does not wait.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import pydantic_core

from areal_sky.core.telemetry import Validity
from areal_sky.errors import ArealSkyError, InvalidInput

log = logging.getLogger(__name__)

HEARTBEAT = "/v1/nodes/heartbeat"
GATHER_S = 0.1  # of a second or more between the heartbeats of a node
BAD_NEWS = tuple(f'"{v.value}"'.encode() for v in (Validity.LOST, Validity.STALE))
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class NodeDoor:
    """ASGI middleware. `take` is given the parsed body and must be quick, since it runs in the event loop.

    `refuse` gives status and body for what `take` raises; a body of more than `limit` bytes is 413.
    """

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        token: str,
        take: Callable[[dict[str, Any]], dict[str, Any]],
        refuse: Callable[[ArealSkyError], tuple[int, dict[str, str]]],
        limit: int,
    ):
        self._app, self._take, self._refuse, self._limit = app, take, refuse, limit
        self._bearer = f"Bearer {token}".encode() if token else b""
        self._turn: asyncio.Event | None = None  # of those that have come and wait
        self._came_s = -GATHER_S  # when the latest came, by the loop's clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != HEARTBEAT or scope["method"] != "POST" or not self._known(scope):
            await self._app(scope, receive, send)
            return
        data, more = b"", True
        while more and len(data) <= self._limit:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            data += message.get("body", b"")
            more = message.get("more_body", False)
        if not any(words in data for words in BAD_NEWS):
            await self._gathered()
        status, answer = self._answer(data)
        content = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _gathered(self) -> None:
        """Waits for the others that come within GATHER_S, where they come as often as that."""
        loop = asyncio.get_running_loop()
        before_s, self._came_s = self._came_s, loop.time()
        if self._turn is None:
            if self._came_s - before_s >= GATHER_S:
                return
            self._turn = asyncio.Event()
            loop.call_later(GATHER_S, self._begin)
        await self._turn.wait()

    def _begin(self) -> None:
        if self._turn is not None:
            self._turn.set()
        self._turn = None

    def _known(self, scope: Scope) -> bool:
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        return bool(self._bearer) and hmac.compare_digest(self._bearer, given)

    def _answer(self, data: bytes) -> tuple[int, dict[str, Any]]:
        if len(data) > self._limit:
            return 413, {"error": "InvalidInput", "message": f"the body is larger than {self._limit // 2**20} MiB"}
        try:
            try:
                raw = pydantic_core.from_json(data)  # three times as fast as json.loads
            except ValueError:
                raise InvalidInput("the body is not JSON") from None
            if not isinstance(raw, dict):
                raise InvalidInput("the body must be a JSON object")
            return 200, self._take(raw)
        except ArealSkyError as e:
            return self._refuse(e)
        except Exception as e:
            log.error("POST %s failed", HEARTBEAT, exc_info=e)
            return 500, {"error": "ArealSkyError", "message": "the head failed to answer this; its log says why"}
