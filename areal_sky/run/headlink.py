"""The controller's line to the head: a thread that keeps the latest view, so that `tick()` never waits for it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from areal_sky.adapters.gateway_client import GatewayClient
from areal_sky.core.view import HeadView
from areal_sky.errors import ArealSkyError

log = logging.getLogger(__name__)
STALE_S = 5.0


class HeadLink:
    """Polls the head's view, renews its lease, and passes on drains. `ports.HeadPort` over HTTP."""

    def __init__(
        self,
        connect: Callable[[], GatewayClient],
        now: Callable[[], float],
        interval_s: float = 0.25,
        on_view: Callable[[GatewayClient, float], None] | None = None,
    ):
        """`connect` raises Unreachable while the head has not told where it listens.

        `on_view` gets the client and the time after every view, in this link's thread.
        """
        self._connect = connect
        self._now = now
        self._interval_s = interval_s
        self._on_view = on_view
        self._client: GatewayClient | None = None
        self._seen: tuple[float, HeadView] | None = None
        self._drains: queue.SimpleQueue[tuple[str, str, float]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headlink", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def view(self) -> HeadView | None:
        """The latest view, or None when the head has not answered for 5 s."""
        if self._seen is None or self._now() - self._seen[0] > STALE_S:
            return None
        return self._seen[1]

    def drain(self, replica: str, reason: str, deadline_s: float) -> None:
        """Passes on a drain as soon as the head answers. Repeating it is harmless."""
        self._drains.put((replica, reason, deadline_s))

    def _run(self) -> None:
        beat_s = 0.0
        while not self._stop.wait(self._interval_s):
            try:
                client = self._client = self._client or self._connect()
                self._seen = (self._now(), client.view())
                if self._on_view is not None:
                    self._on_view(client, self._now())
                while not self._drains.empty():
                    client.drain(*self._drains.get())
                if self._now() - beat_s > 5.0:
                    client.controller_heartbeat()
                    beat_s = self._now()
            except ArealSkyError as e:
                log.debug("head: %s", e)
                self._client = None
            except Exception:
                log.exception("head link failed; trying again")
                self._client = None
