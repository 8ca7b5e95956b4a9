"""GET /metrics of one node, for a Prometheus that runs on the node: what the head's page says of it, head or no head.

Off unless AREAL_SKY_METRICS_PORT is set on the node. It listens on loopback and asks for the node token.
"""

from __future__ import annotations

import hmac
import logging
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_sky.run.agent import Agent

log = logging.getLogger(__name__)
PORT = "AREAL_SKY_METRICS_PORT"


def serve_metrics(agent: Agent, token: str) -> ThreadingHTTPServer | None:
    """Serves the page from a thread of its own, where the port is set.

    A port that is none, or is taken, is no reason for a node to end: it is logged, and there is no page.
    """
    text = os.environ.get(PORT, "")
    if not text:
        return None
    from areal_sky.ui.exposition import EXPOSITION_TYPE, node_exposition  # only nodes with a page pay for it

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given = self.headers.get("Authorization", "").encode("latin-1", "replace")
            if not token or not hmac.compare_digest(given, f"Bearer {token}".encode()):
                self._answer(401, "the node token is needed\n")
            elif self.path != "/metrics":
                self._answer(404, "there is /metrics alone\n")
            else:
                now_s = time.time()
                self._answer(200, node_exposition(agent.known(now_s), now_s))

        def _answer(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", EXPOSITION_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """No line per scrape."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", int(text)), Handler)
    except (OSError, OverflowError, ValueError) as e:
        log.warning("no /metrics, %s is %.40r: %s", PORT, text, e)
        return None
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
