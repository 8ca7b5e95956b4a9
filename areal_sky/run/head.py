"""`areal-sky head`: starts the cluster's Ray head and keeps it, and runs the services that people and nodes talk to.

`kill -9` of this process loses nothing: Ray and the tasks' runners live in sessions of their own, the task journal
is on disk, and the next start adopts all of it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from areal_sky.adapters import processes
from areal_sky.core.model import HEAD_GROUP
from areal_sky.core.nodeenv import NODE_MARK, HeadEnv
from areal_sky.errors import ArealSkyError, Refused
from areal_sky.run import raydaemon
from areal_sky.run.giveback import give_back

log = logging.getLogger(__name__)
TICK_S = 0.1


class Head:
    """The head's parts and their life: Ray first, then the task service's loop. The gateway is served around it."""

    def __init__(self, environ: Mapping[str, str]):
        """Raises InvalidInput for a damaged environment."""
        self.env = HeadEnv.from_env(environ)
        self.tokens: dict[str, str] = json.loads(environ.get("AREAL_SKY_TOKENS") or "{}")
        self.state_dir = Path(self.env.state_dir).expanduser()
        self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._environ = environ
        self._daemon: raydaemon.RayDaemon | None = None
        self._controller_seen_s = time.time()
        self._busy_s = time.time()
        self.ray_tmp = raydaemon.ray_tmp(environ, self.state_dir)
        self.head_ip = "127.0.0.1" if self.env.shape is not None else _own_address()

    @property
    def ray_address(self) -> str:
        return f"{self.head_ip}:{self.env.ray_port}"

    def start_ray(self) -> None:
        """Starts or adopts Ray's head. Raises Refused when its port is taken by something else."""
        mark = self._environ.get(NODE_MARK) or f"{self.env.cluster}::{self.env.replica}/0"
        env = raydaemon.ray_env(self._environ, self.tokens.get("ray", ""), pretend=self.env.shape is not None)
        # The store of Ray's control plane on disk: a restarted head keeps its actors and placement groups.
        gcs = self.state_dir / "gcs"
        gcs.mkdir(mode=0o700, exist_ok=True)
        env |= {NODE_MARK: mark, "RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(gcs)}
        if raydaemon.recorded(self.state_dir, mark) is None:
            self._check_port(self.env.ray_port, "Ray")
        self._check_port(self.env.gateway_port, "the gateway")
        arguments = [
            "--head",
            f"--node-ip-address={self.head_ip}",
            f"--port={self.env.ray_port}",
            "--include-dashboard=false",
            raydaemon.labels_argument(self.env.cluster, HEAD_GROUP, self.env.replica, 0, None),
            *raydaemon.shape_arguments(self.env.shape, self._environ),
        ]
        arguments.append(f"--temp-dir={self.ray_tmp}")
        # A head that died leaves this file, and Ray then refuses to start another here.
        (self.ray_tmp / "ray_current_cluster").unlink(missing_ok=True)
        self._daemon, adopted = raydaemon.start_or_adopt(self.state_dir, arguments, env)
        log.info("%s Ray head pid %s on %s", "adopted" if adopted else "started", self._daemon.pid, self.ray_address)

    def announce(self) -> None:
        """Tells where the gateway listens."""
        url = f"http://127.0.0.1:{self.env.gateway_port}"
        text = json.dumps(
            {
                "gateway_url": url,
                "gateway_port": self.env.gateway_port,
                "ray_port": self.env.ray_port,
                "ray_address": self.ray_address,
            }
        )
        temporary = self.state_dir / f".address.{os.getpid()}"
        temporary.write_text(text)
        temporary.replace(self.state_dir / "address.json")

    @property
    def bind_hosts(self) -> tuple[str, ...]:
        """Where the gateway listens: loopback, and the private address that the cluster's nodes know."""
        return tuple(dict.fromkeys(("127.0.0.1", self.head_ip)))

    def controller_seen(self) -> None:
        """The controller renewed the head's lease."""
        self._controller_seen_s = time.time()

    def loop(self, connect: Callable[[], Any], stop: threading.Event) -> int:
        """Ticks the task service until `stop`, the end of Ray, or the end of the lease; returns the exit code.

        `connect` makes the task service once Ray answers.
        """
        service = None
        while not _pause(stop, service):
            raydaemon.reap()
            if self._daemon is not None and not self._daemon.alive():
                log.error("Ray's head has ended (see %s)", self.state_dir / "ray.log")
                return 1
            try:
                if service is None:
                    if self._raylet_is_up():
                        service = connect()
                    continue
                now_s = time.time()
                service.tick(now_s)
                if self._forgotten(service, now_s):
                    log.error("no controller and no work for too long: ending this cluster")
                    self.end()
                    return 0
            except ArealSkyError as e:
                log.warning("tick: %s", e)
                stop.wait(0.5)
            except Exception:
                log.exception("tick failed; trying again")
                stop.wait(1.0)
        return 0

    def end(self) -> None:
        """Ends Ray and everything on this node, and gives the machine back where SkyPilot would not."""
        if self._daemon is not None:
            self._daemon.end()
        give_back(self._environ)

    @staticmethod
    def _check_port(port: int, what: str) -> None:
        # Ours may linger for a moment after a kill.
        until_s = time.monotonic() + 3.0
        while not processes.port_is_free(port, "0.0.0.0"):
            if time.monotonic() > until_s:
                raise Refused(f"port {port} for {what} is taken on the head: end what listens there")
            time.sleep(0.1)

    def _raylet_is_up(self) -> bool:
        if not any(self.ray_tmp.glob("session_*/sockets/raylet")):
            return False  # connecting earlier would tie us to some other node's raylet on this machine
        return processes.port_answers(self.head_ip, self.env.ray_port)

    def _forgotten(self, service: Any, now_s: float) -> bool:
        if service.busy():
            self._busy_s = now_s
        silent_s = now_s - self._controller_seen_s
        return silent_s > self.env.lease_s and now_s - self._busy_s > self.env.idle_shutdown_s


def _pause(stop: threading.Event, service: Any) -> bool:
    """Until the next tick is due, or somebody asks for something; True when it is time to stop."""
    if service is None:
        return stop.wait(0.05)
    service.news.wait(TICK_S)
    return stop.is_set()


def _own_address() -> str:
    ips = os.environ.get("SKYPILOT_NODE_IPS", "").split()
    return ips[0] if ips else "127.0.0.1"
