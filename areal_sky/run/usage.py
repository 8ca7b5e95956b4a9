"""Who held what, kept beside the cluster's events: the bill by task outlives the head that knew it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from areal_sky.adapters.gateway_client import GatewayClient
from areal_sky.core.usage import Usage, merge, usage_from_json, usage_to_json
from areal_sky.errors import ArealSkyError, StateError
from areal_sky.home import ClusterHome, write_private

log = logging.getLogger(__name__)
EVERY_S = 2.0
REWRITE_S = 15.0  # the file is written at once when holds change, else this often


class UsageKeeper:
    """Asks the head every 2 s and keeps the answers in `usage.json`. For one thread of the controller."""

    def __init__(self, cluster: ClusterHome):
        self._path = usage_file(cluster)
        self._usage = read_usage(cluster)
        self._written = self._usage
        self._asked_s = 0.0

    def beat(self, client: GatewayClient, now_s: float) -> None:
        """Call it often. A head that does not answer, or a full disk, loses nothing: the next beat asks again."""
        if 0 <= now_s - self._asked_s < EVERY_S:
            return
        self._asked_s = now_s
        try:
            self._usage = merge(self._usage, client.usage(self._usage.t_s))
            if self._usage.holds != self._written.holds or self._usage.t_s - self._written.t_s > REWRITE_S:
                write_private(self._path, json.dumps(usage_to_json(self._usage)))
                self._written = self._usage
        except ArealSkyError as e:
            log.debug("usage: %s", e)
        except OSError as e:
            log.warning("cannot write %s: %s", self._path, e)


def usage_file(cluster: ClusterHome) -> Path:
    return cluster.dir / "usage.json"


def read_usage(cluster: ClusterHome) -> Usage:
    """What was kept; empty when there is nothing, or nothing that can be read (which is logged, and said by `cost`)."""
    try:
        return usage_from_json(json.loads(usage_file(cluster).read_text()))
    except FileNotFoundError:
        return Usage()
    except (OSError, ValueError, ArealSkyError) as e:
        log.warning("cannot read %s: %s", usage_file(cluster), e)
        return Usage()


def latest_usage(cluster: ClusterHome) -> Usage:
    """What was kept and what the head adds to it now, if it answers."""
    kept = read_usage(cluster)
    try:
        if cluster.state().down_s is not None:
            return kept
        with cluster.gateway("read") as client:
            return merge(kept, client.usage(kept.t_s))
    except StateError:
        raise
    except ArealSkyError:
        return kept
