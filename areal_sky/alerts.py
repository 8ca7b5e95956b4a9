"""Alerts, for programs: raise one, and read what is wrong."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from areal_sky.errors import Unreachable
from areal_sky.task import connector

if TYPE_CHECKING:
    from areal_sky.adapters.gateway_client import GatewayClient
    from areal_sky.cluster import Cluster

log = logging.getLogger(__name__)


class AlertManager:
    """Of a cluster: named, attached, or None for the only one that is up (inside a task: its own)."""

    def __init__(self, cluster: str | Cluster | None = None):
        self._connect: Callable[[], GatewayClient] = connector(cluster)

    def trigger_alert(self, message: str, metrics: Mapping[str, float] | None = None) -> bool:
        """Raises an alert of the running task, or outside of one of the cluster; who is notified is told once.

        The same message within a minute is the same alert: put what changes into `metrics`. False when the head does
        not answer: a training run shall not die of its alerts. Raises InvalidInput for an empty message, or for what
        is no number (NaN is one here).
        """
        try:
            with self._connect() as gateway:
                gateway.trigger_alert(message, metrics or {}, os.environ.get("AREAL_SKY_TASK_ID"))
        except Unreachable as e:
            log.warning("the alert %r is lost: %s", message, e)
            return False
        return True

    def active(self) -> list[dict[str, Any]]:
        """What is wrong now, latest first: "alert_id", "kind", "place", "what", "evidence", "since_s", "done", ...

        Raises Unreachable, Unauthorized.
        """
        with self._connect() as gateway:
            return gateway.alerts()["active"]
