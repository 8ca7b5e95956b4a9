"""A cluster on SkyPilot, as its controller needs it: the cloud, every machine's task, and the way to the head."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_sky.adapters.ports import LaunchRequest
from areal_sky.adapters.skypilot.cloud import SkyCloud
from areal_sky.adapters.skypilot.filled import filled
from areal_sky.adapters.skypilot.requests import SkyApi
from areal_sky.adapters.tunnel import Target, Tunnel
from areal_sky.core.model import HEAD_GROUP, ClusterState, LaunchPlan
from areal_sky.core.nodeenv import DEFAULT_GATEWAY_PORT, DEFAULT_RAY_PORT
from areal_sky.core.orphans import OWNER_LABEL
from areal_sky.core.tasksources import MASK, secret_envs
from areal_sky.core.taskyaml import task_dicts
from areal_sky.errors import ArealSkyError, StateError
from areal_sky.home import ClusterHome, write_private
from areal_sky.run import shipping
from areal_sky.spec.cluster import ClusterSpec
from areal_sky.spec.infra import owns_machines

# Outside Ray's worker ports (10002-19999) and Linux's ephemeral ones (32768 and up).
SHARED_HOST_PORTS = range(20000, 31998)


class SkySide:
    """Start it before the controller's loop, stop it after."""

    def __init__(self, cluster: ClusterHome, spec: ClusterSpec, launch: LaunchPlan, folder: Path, state: ClusterState):
        """`folder` is where relative paths of the spec count from. Raises StateError."""
        self._cluster = cluster
        self._ports = HeadPorts(cluster, spec)
        self._tokens = cluster.tokens()
        self._user_secrets = _user_secrets(spec)
        self._tasks = task_dicts(spec, launch, str(shipping.wheel()), str(folder))
        self._owner = owner(cluster)
        launched = {r.name: r.request_id for r in state.replicas.values() if r.request_id is not None}
        self.cloud = SkyCloud(
            cluster.name, self._owner, self._task, launched,
            groups=(HEAD_GROUP, *(g.name for g in launch.groups)), hide=self._hidden,
        )  # fmt: skip
        self._tunnel = Tunnel(cluster.head_dir, self._target, self._announce)

    def start(self) -> None:
        self.cloud.start()
        self._tunnel.start()

    def stop(self) -> None:
        """The machines live on."""
        self._tunnel.stop()
        self.cloud.stop()

    def _task(self, request: LaunchRequest, head_ip: str) -> Mapping[str, Any]:
        is_head = request.plan.name == HEAD_GROUP
        ports = self._ports.pick() if is_head else self._ports.current()
        envs = {"AREAL_SKY_RAY_PORT": str(ports["ray"]), "AREAL_SKY_GATEWAY_PORT": str(ports["gateway"])}
        if not is_head:
            envs |= {"AREAL_SKY_HEAD_IP": head_ip, "AREAL_SKY_REPLICA": request.replica}
        ours = {
            "AREAL_SKY_TOKENS": json.dumps(self._tokens),
            "AREAL_SKY_NODE_TOKEN": self._tokens["node"],
            "AREAL_SKY_RAY_TOKEN": self._tokens["ray"],
        }
        task = self._tasks[request.plan.name]
        return filled(task, request, owner=self._owner, envs=envs, secrets={**self._user_secrets, **ours})

    def _hidden(self, text: str) -> str:
        for value in (*self._tokens.values(), *self._user_secrets.values()):
            if len(value) > 3:
                text = text.replace(value, "***")
        return text

    def _target(self) -> Target | None:
        seat = self.cloud.head_seat()
        return None if seat is None else Target(seat.host, seat.ssh_config, int(self._ports.current()["gateway"]))

    def _announce(self, port: int | None) -> None:
        file = self._cluster.head_dir / "address.json"
        seat = self.cloud.head_seat()
        if port is None:
            file.unlink(missing_ok=True)
            return
        if seat is None:
            return  # found again before the head is: what the file says still holds
        ray_port = self._ports.current()["ray"]
        address = {
            "gateway_url": f"http://127.0.0.1:{port}",
            "gateway_port": port,
            "ray_port": ray_port,
            "ray_address": f"{seat.private_ip}:{ray_port}",
        }
        write_private(file, json.dumps(address))


class HeadPorts:
    """The head's two ports. Where hosts are shared (Slurm, SSH) every cluster has its own, and each new head others:
    `areal-sky head` ends at once when one is taken, and the next try is elsewhere."""

    def __init__(self, cluster: ClusterHome, spec: ClusterSpec):
        self._file = cluster.dir / "ports.json"
        envs: Mapping[str, Any] = spec.task.get("envs") or {}
        self._fixed = {
            "ray": int(envs.get("AREAL_SKY_RAY_PORT") or DEFAULT_RAY_PORT),
            "gateway": int(envs.get("AREAL_SKY_GATEWAY_PORT") or DEFAULT_GATEWAY_PORT),
        }
        chosen = "AREAL_SKY_RAY_PORT" in envs or "AREAL_SKY_GATEWAY_PORT" in envs
        self._shared = not chosen and owns_machines(spec.infra)
        self._seed = owner(cluster)

    def current(self) -> dict[str, int]:
        """What the present head was given. Raises StateError."""
        if not self._shared:
            return self._fixed
        try:
            return json.loads(self._file.read_text())
        except FileNotFoundError:
            return self.pick()
        except (OSError, ValueError) as e:
            raise StateError(f"cannot read {self._file}: {e}") from None

    def pick(self) -> dict[str, int]:
        """Ports for a new head, kept for its nodes."""
        if not self._shared:
            return self._fixed
        tries = int(self.current().get("tries", 0)) + 1 if self._file.exists() else 0
        digest = hashlib.sha256(f"{self._seed} {tries}".encode()).digest()
        first = SHARED_HOST_PORTS[int.from_bytes(digest[:8]) % len(SHARED_HOST_PORTS)]
        ports = {"ray": first, "gateway": first + 1, "tries": tries}
        write_private(self._file, json.dumps(ports))
        return ports


def owner(cluster: ClusterHome) -> str:
    """Marks this cluster's machines in their labels: another cluster of its name has other tokens, so another mark."""
    return hashlib.sha256(f"areal-sky owner {cluster.tokens()['node']}".encode()).hexdigest()[:16]


def still_listed(cluster: ClusterHome) -> list[str]:
    """SkyPilot clusters with this cluster's mark, in words; or why that cannot be known. Imports SkyPilot."""
    try:
        found = SkyApi().clusters()
    except ArealSkyError as e:
        return [f"not verified, SkyPilot does not say what exists: {e}"]
    mark = owner(cluster)
    return [f"SkyPilot cluster {c.name} ({c.status})" for c in found.values() if c.labels.get(OWNER_LABEL) == mark]


def _user_secrets(spec: ClusterSpec) -> dict[str, str]:
    """Values of the spec's `secrets` and of `envs` that hold one; those it leaves empty come from the environment."""
    given = spec.task.get("secrets") or {}
    named: Mapping[str, Any] = given if isinstance(given, Mapping) else dict.fromkeys(given)
    values = {**secret_envs(spec), **{str(k): v for k, v in named.items()}}
    found = {k: os.environ.get(k) if v in (None, MASK) else v for k, v in values.items()}
    return {k: str(v) for k, v in found.items() if v}
