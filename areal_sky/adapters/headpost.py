"""A node's posts to its head over one kept connection: a socket and httptools, since httpx would be a third of what
the agent costs, http.client a twentieth.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

import httptools

from areal_sky.adapters.gateway_client import CONNECT_S, answer_error
from areal_sky.errors import Unauthorized, Unreachable

ANSWER_S = 10.0
MOST_AT_ONCE = 2**16
_to_json = json.JSONEncoder(separators=(",", ":")).encode


class HeadPost:
    """`heartbeat` may be called by one thread at a time. Raises Unauthorized for a token that no header can carry."""

    def __init__(self, host: str, port: int, token: str):
        if not token.isascii() or not token.isprintable() or not token.strip():
            raise Unauthorized(f"the token for the head at http://{host}:{port} is missing or damaged")
        self._address = (host, port)
        self._url = f"http://{host}:{port}"
        self._headers = (
            f"POST /v1/nodes/heartbeat HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {token}\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()
        self._socket: socket.socket | None = None

    def heartbeat(self, heartbeat: Mapping[str, Any]) -> dict[str, Any]:
        """The head's answer. Raises Unreachable, or what the head says."""
        content = _to_json(heartbeat).encode("ascii")
        request = b"%b%d\r\n\r\n%b" % (self._headers, len(content), content)
        kept = self._socket is not None
        try:
            status, answer = self._post(request)
        except OSError:
            self.close()
            if not kept:
                raise self._unreachable() from None
            try:  # the head closes a connection that was idle: that says nothing of the head
                status, answer = self._post(request)
            except OSError:
                self.close()
                raise self._unreachable() from None
        if status >= 300:
            raise answer_error(status, answer, self._url)
        try:
            return dict(json.loads(answer))
        except (ValueError, TypeError):
            raise Unreachable(f"what answers at {self._url} is not an areal_sky head") from None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _post(self, request: bytes) -> tuple[int, bytes]:
        """The answer's status and content. Raises OSError."""
        if self._socket is None:
            self._socket = socket.create_connection(self._address, CONNECT_S)
            self._socket.settimeout(ANSWER_S)
        self._socket.sendall(request)
        answer = _Answer()
        parser = httptools.HttpResponseParser(answer)
        while not answer.complete:
            received = self._socket.recv(MOST_AT_ONCE)
            if not received:
                raise ConnectionError("the connection has ended")
            try:
                parser.feed_data(received)
            except httptools.HttpParserError as e:
                raise ConnectionError(f"this is no answer: {e}") from None
        if not parser.should_keep_alive():
            self.close()
        return parser.get_status_code(), bytes(answer.content)

    def _unreachable(self) -> Unreachable:
        return Unreachable(f"no head answers at {self._url}")


class _Answer:
    """What the parser tells."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.complete = False

    def on_body(self, part: bytes) -> None:
        self.content += part

    def on_message_complete(self) -> None:
        self.complete = True
