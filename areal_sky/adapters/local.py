"""The embedded default: a cluster's machines as process trees of this one (`infra: local`).

A node is a shell loop around `areal-sky node` (or `head`) with a raylet below it, all carrying the node's mark in
their environment. Launching is a spawn, a power cut is SIGKILL to everything with the mark, and what exists is read
from /proc, never from a file: so a crash of the controller at any point leaves nothing that cannot be found again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from areal_sky.adapters import processes
from areal_sky.adapters.ports import LaunchRequest
from areal_sky.core.launch import head_env, node_env
from areal_sky.core.model import HEAD_GROUP, LaunchPlan, Machine, MachineState
from areal_sky.core.nodeenv import EXIT_NEVER, NODE_MARK
from areal_sky.core.tasksources import MASK
from areal_sky.errors import NoCapacity, StateError
from areal_sky.spec.cluster import ClusterSpec

# Outside Ray's worker ports (10002-19999) and Linux's ephemeral ones (32768 and up).
PORT_RANGE = range(20000, 32000)
# Restarts the process until it ends on purpose (0) or says that it can never work (78).
KEEP_RUNNING = f'while :; do "$@"; rc=$?; case $rc in 0|{EXIT_NEVER}) exit $rc;; esac; sleep 0.5; done'


class LocalCloud:
    """`ports.Cloud` on this machine. One instance serves one cluster."""

    def __init__(self, spec: ClusterSpec, plan: LaunchPlan, cluster_dir: Path, tokens: Mapping[str, str]):
        self._spec = spec
        self._plan = plan
        self._dir = cluster_dir
        self._tokens = tokens
        self._children: list[subprocess.Popen[bytes]] = []

    def launch(self, request: LaunchRequest) -> str:
        """See `ports.Cloud`. Nodes of the replica that already run are left alone."""
        alive = self._alive().get(request.replica, set())
        try:
            for index in range(request.plan.nodes_per_replica):
                if index not in alive:
                    self._spawn(request, index)
        except OSError as e:
            raise NoCapacity(f"cannot start {request.replica} here: {e.strerror or e}") from None
        return f"local-{request.replica}"

    def machines(self) -> tuple[Machine, ...]:
        """See `ports.Cloud`."""
        self._children = [c for c in self._children if c.poll() is None]
        alive = self._alive()
        expected = self._expected()
        found: list[Machine] = []
        for replica in sorted(alive.keys() | expected.keys()):
            up = len(alive.get(replica, ()))
            nodes = expected.get(replica, up)
            error = self._failure(replica)
            if up == 0 and not error:
                continue
            if up < nodes and not error:
                error = f"{nodes - up} of its {nodes} nodes ended"
            state = MachineState.FAILED if error else MachineState.UP
            found.append(Machine(replica, state, up, error))
        return tuple(found)

    def terminate(self, replica: str) -> None:
        """See `ports.Cloud`. A power cut: draining came before."""
        for mark in processes.marked(f"{self._mark_prefix()}{replica}/"):
            processes.kill_marked(mark)
        for folder in self._folders(replica):
            for name in ("failed", "launch.json"):
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(self._ray_tmp(folder), ignore_errors=True)

    def doubt(self, replica: str) -> None:
        """See `ports.Cloud`. Every look here is a new one."""

    def pids(self, replica: str | None = None) -> list[int]:
        """Every live process of one replica, or of the whole cluster."""
        prefix = self._mark_prefix() + (f"{replica}/" if replica else "")
        return sorted(pid for pids in processes.marked(prefix).values() for pid in pids)

    def _spawn(self, request: LaunchRequest, index: int) -> None:
        folder = self._folder(request.replica, index)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "failed").unlink(missing_ok=True)
        (folder / "launch.json").write_text(json.dumps({"nodes": request.plan.nodes_per_replica}))
        role = "head" if request.plan.name == HEAD_GROUP else "node"
        argv = [sys.executable, "-m", "areal_sky.ui.cli.main", role]
        self._children.append(
            processes.spawn(
                ["/bin/sh", "-c", KEEP_RUNNING, f"areal-sky-{role}", *argv],
                self._env(request, index, folder),
                folder / f"{role}.log",
                cwd=folder,
            )
        )

    def _env(self, request: LaunchRequest, index: int, folder: Path) -> dict[str, str]:
        ours = ("AREAL_SKY_", "RAY_", "SKYPILOT_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        for block in ("envs", "secrets"):
            env |= {k: str(v) for k, v in (self._spec.task.get(block) or {}).items() if v not in (None, MASK)}
        ports = self._ports()
        if request.plan.name == HEAD_GROUP:
            head = head_env(
                self._spec,
                self._plan,
                state_dir=str(self._dir / "head"),
                ray_port=ports["ray"],
                gateway_port=ports["gateway"],
            )
            env |= head.to_env() | {"AREAL_SKY_TOKENS": json.dumps(dict(self._tokens))}
        else:
            node = node_env(
                self._spec,
                self._plan,
                request.plan.name,
                request.replica,
                index,
                head_ip="127.0.0.1",
                ray_port=ports["ray"],
                gateway_port=ports["gateway"],
                state_dir=str(folder),
            )
            env |= node.to_env()
            env |= {
                "AREAL_SKY_NODE_TOKEN": self._tokens["node"],
                "AREAL_SKY_RAY_TOKEN": self._tokens["ray"],
                "AREAL_SKY_NODE_DIR": str(folder),
            }
        env[NODE_MARK] = f"{self._mark_prefix()}{request.replica}/{index}"
        env["AREAL_SKY_RAY_TMP"] = str(self._ray_tmp(folder))
        return env

    def _ray_tmp(self, folder: Path) -> Path:
        # One per node: raylets that share one and start together take the same socket names (Ray 2.60).
        # Short, since Ray adds 70 characters for sockets and those paths may have 107 in all.
        digest = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
        return Path("/tmp", f"areal-sky-{digest}")

    def _ports(self) -> dict[str, int]:
        """The head's two ports: picked free once, then kept, since nodes are told them before the head is up."""
        file = self._dir / "ports.json"
        try:
            ports: dict[str, int] = json.loads(file.read_text())
            # Kept while anything of the cluster lives; before the first node, somebody may have taken them.
            if self._alive() or all(processes.port_is_free(p, "0.0.0.0") for p in ports.values()):
                return ports
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as e:
            raise StateError(f"cannot read {file}: {e}") from None
        start = int(hashlib.sha256(str(self._dir).encode()).hexdigest(), 16) % len(PORT_RANGE)
        order = (*PORT_RANGE[start:], *PORT_RANGE[:start])
        free = (p for p in order if processes.port_is_free(p, "0.0.0.0"))
        ports = {"ray": next(free), "gateway": next(free)}
        file.write_text(json.dumps(ports))
        return ports

    def _alive(self) -> dict[str, set[int]]:
        prefix = self._mark_prefix()
        alive: dict[str, set[int]] = {}
        for mark in processes.marked(prefix):
            replica, _, index = mark[len(prefix) :].rpartition("/")
            alive.setdefault(replica, set()).add(int(index))
        return alive

    def _expected(self) -> dict[str, int]:
        expected: dict[str, int] = {}
        for file in self._dir.glob("nodes/*/launch.json"):
            try:
                expected[file.parent.name.rpartition(".")[0]] = int(json.loads(file.read_text())["nodes"])
            except (OSError, ValueError, KeyError):
                continue
        return expected

    def _failure(self, replica: str) -> str:
        for folder in self._folders(replica):
            try:
                return (folder / "failed").read_text().strip()
            except OSError:
                continue
        return ""

    def _folder(self, replica: str, index: int) -> Path:
        return self._dir / "nodes" / f"{replica}.{index}"

    def _folders(self, replica: str) -> list[Path]:
        return sorted(self._dir.glob(f"nodes/{replica}.*"))

    def _mark_prefix(self) -> str:
        return f"{self._dir}::"
