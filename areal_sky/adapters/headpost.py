"""A node's posts to its head over one kept connection. No HTTP library: to take the answer's headers apart, and to send
ours in pieces, would be a twentieth of what the agent costs.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from typing import Any

from areal_sky.adapters.gateway_client import CONNECT_S, answer_error
from areal_sky.errors import Unauthorized, Unreachable

ANSWER_S = 10.0
MAX_HEADERS = 2**16
_LINE = rb"[^\r\n]+\r\n"
# The head says how long each of its answers is.
_HEADERS = re.compile(
    rb"HTTP/1\.[01] (\d{3})\b[^\r\n]*\r\n(?:%b)*?content-length:[ \t]*(\d+)[ \t]*\r\n(?:%b)*\r\n" % (_LINE, _LINE), re.I
)
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
        answer = _more(self._socket)
        while (headers := _HEADERS.match(answer)) is None:
            if len(answer) > MAX_HEADERS:
                raise OSError("this is no answer to a heartbeat")
            answer += _more(self._socket)
        content = answer[headers.end() :]
        while len(content) < int(headers[2]):
            content += _more(self._socket)
        return int(headers[1]), content

    def _unreachable(self) -> Unreachable:
        return Unreachable(f"no head answers at {self._url}")


def _more(connection: socket.socket) -> bytes:
    received = connection.recv(MAX_HEADERS)
    if not received:
        raise ConnectionError("the connection has ended")
    return received
