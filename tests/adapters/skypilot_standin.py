"""A stand-in for SkyPilot's API server behind `SkyApi`: requests that tests finish, records that tests change."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from areal_sky.adapters.skypilot.requests import DOWN, LAUNCH, Request, SkyCluster
from areal_sky.errors import ArealSkyError, NotFound, Unreachable


class StandIn:
    """Same methods as `SkyApi`. `calls` keeps what was asked for; `gone` is a server that does not answer."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls: list[tuple[str, str]] = []
        self.tasks: dict[str, Mapping[str, Any]] = {}
        self.requests: dict[str, Request] = {}
        self.records: dict[str, SkyCluster] = {}
        self.errors: dict[str, ArealSkyError] = {}
        self.jobs: dict[str, str | ArealSkyError | None] = {}
        self.refuse: ArealSkyError | None = None
        self.gone = False

    # ------------------------------------------------------------ what tests do

    def finish(self, name: str, error: ArealSkyError | None = None, kind: str = LAUNCH) -> None:
        """Ends the request in flight of that cluster. A launch that succeeds leaves it UP, an end removes it."""
        request = next(r for r in self.requests.values() if r.cluster == name and r.name == kind and r.active)
        with self.lock:
            self.requests[request.id] = replace(request, status="FAILED" if error else "SUCCEEDED")
            if error is not None:
                self.errors[request.id] = error
            elif kind == LAUNCH:
                self.records[name] = replace(self.records[name], status="UP", private_ips=("10.0.0.1",), note="")
            else:
                self.records.pop(name, None)

    def forget_requests(self) -> None:
        """What a restart of a local API server does."""
        with self.lock:
            self.requests.clear()

    def count(self, call: str) -> int:
        return sum(c == call for c, _ in self.calls)

    # ------------------------------------------------------------ SkyApi

    def launch(self, task: Mapping[str, Any], name: str) -> str:
        self._ask("launch", name)
        if self.refuse is not None:
            raise self.refuse
        with self.lock:
            self.tasks[name] = task
            labels = task["resources"]["labels"]
            nodes = int(task.get("num_nodes", 1))
            self.records[name] = SkyCluster(name, "INIT", nodes, labels=labels, note="provisioning")
            return self._new(LAUNCH, name)

    def down(self, name: str) -> str:
        self._ask("down", name)
        return self._new(DOWN, name)

    def cancel(self, request_id: str) -> None:
        self._ask("cancel", request_id)
        with self.lock:
            self.requests[request_id] = replace(self.requests[request_id], status="CANCELLED")

    def active(self) -> tuple[Request, ...]:
        if self.gone:
            return ()  # as the SDK has it
        with self.lock:
            return tuple(r for r in self.requests.values() if r.active)

    def lookup(self, ids: Collection[str]) -> dict[str, Request]:
        with self.lock:
            return {} if self.gone else {i: self.requests[i] for i in ids if i in self.requests}

    def outcome(self, request: Request) -> ArealSkyError | None:
        if request.status == "CANCELLED":
            return ArealSkyError("cancelled")
        return self.errors.get(request.id)

    def clusters(self, names: Sequence[str] | None = None, *, refresh: bool = False) -> dict[str, SkyCluster]:
        self._ask("refresh" if refresh else "clusters", ",".join(names or ()))
        with self.lock:
            return {n: c for n, c in self.records.items() if names is None or n in names}

    def job_failure(self, name: str) -> str | None:
        self._ask("jobs", name)
        job = self.jobs.get(name, "")
        if isinstance(job, ArealSkyError):
            raise job
        return job

    def ssh_config(self, name: str) -> str:
        if name not in self.records:
            raise NotFound(name)
        return f"Host {name}\n"

    def _ask(self, call: str, name: str) -> None:
        if self.gone:
            raise Unreachable("no API server")
        self.calls.append((call, name))

    def _new(self, kind: str, name: str) -> str:
        request = Request(f"r{len(self.requests)}-{len(self.calls)}", kind, name, "RUNNING")
        self.requests[request.id] = request
        return request.id
