"""SkyPilot's SDK, in our own values and errors: submit, look up, list. The only file that calls it for clusters.

Every call blocks for one round trip to the API server (10 to 300 ms, `refresh` 3 s and more), so none belongs in the
controller's loop. `sky.get` is called on finished requests only. A local API server that is gone is started again, as
for every `sky` command (see `apiserver`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from areal_sky.adapters.skypilot import apiserver
from areal_sky.adapters.skypilot.errors import translate
from areal_sky.errors import ArealSkyError, NotFound, Refused

P = ParamSpec("P")
T = TypeVar("T")

LAUNCH, DOWN = "sky.launch", "sky.down"
ACTIVE = frozenset({"PENDING", "WAITING", "RUNNING"})
_FIELDS = ["request_id", "name", "status", "cluster_name", "created_at"]


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the API server. `name` is SkyPilot's, e.g. `sky.launch`."""

    id: str
    name: str
    cluster: str
    status: str
    created_s: float = 0.0

    @property
    def active(self) -> bool:
        return self.status in ACTIVE


@dataclass(frozen=True, slots=True)
class SkyCluster:
    """A cluster in SkyPilot's records. `status` is UP, INIT, STOPPED, ...; `note` what it does or what is wrong.

    `private_ips` are known once all its nodes are up. `place` is (cloud, region, zone), as far as known.
    """

    name: str
    status: str
    nodes: int
    private_ips: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    note: str = ""
    unhealthy: bool = False
    user: str = ""


def _translated(call: Callable[P, T]) -> Callable[P, T]:
    """Errors of ours only; click's and the SDK's `SystemExit` included, which would silently end a thread.

    Called once more after a local API server that was gone has been started.
    """

    @functools.wraps(call)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            try:
                return call(*args, **kwargs)
            except Exception as e:
                if not apiserver.is_missing(e):
                    raise
                apiserver.start_if_gone(_server_url())
                return call(*args, **kwargs)
        except ArealSkyError:
            raise
        except (Exception, SystemExit) as e:
            raise translate(e) from None

    return wrapper


class SkyApi:
    """The SDK of this process. Cheap to make: `sky` is imported at the first call (1.5 s)."""

    @_translated
    def launch(self, task: Mapping[str, Any], name: str) -> str:
        """Submits a launch and returns the request's id. Never call it for a name that exists: it would run again."""
        sky, sdk = _sky()
        config = {k: v for k, v in task.items() if k != "secrets"}
        secrets = {k: str(v) for k, v in dict(task.get("secrets") or {}).items()}
        parsed = sky.Task.from_yaml_config(config)
        parsed.update_secrets(secrets)
        return str(sdk.launch(parsed, cluster_name=name))

    @_translated
    def down(self, name: str) -> str:
        """Submits the end of a cluster, which also cancels what is in flight for it. Raises NotFound later, not now."""
        return str(_sky()[1].down(name))

    @_translated
    def cancel(self, request_id: str) -> None:
        """Ends a request in flight and waits until the server has done so. An unknown or finished one is no error."""
        _, sdk = _sky()
        sdk.get(sdk.api_cancel(request_id, silent=True))

    @_translated
    def active(self) -> tuple[Request, ...]:
        """All requests in flight, whoever made them. Empty too while a local API server does not run."""
        return tuple(map(_request, _sky()[1].api_status(fields=_FIELDS)))

    @_translated
    def lookup(self, ids: Collection[str]) -> dict[str, Request]:
        """Those of the requests that the server knows, finished ones included."""
        if not ids:
            return {}
        found = _sky()[1].api_status(request_ids=sorted(ids))
        return {r.id: r for r in map(_request, found)}

    @_translated
    def outcome(self, request: Request) -> ArealSkyError | None:
        """How a finished request ended: None when it succeeded."""
        if request.status == "SUCCEEDED":
            return None
        try:
            _sky()[1].get(request.id)
        except (Exception, SystemExit) as e:
            return translate(e)
        return None

    @_translated
    def clusters(self, names: Sequence[str] | None = None, *, refresh: bool = False) -> dict[str, SkyCluster]:
        """Clusters by name, those of other users included; all, or those of `names` that exist.

        `refresh` asks the clouds (seconds), otherwise the server answers from its records.
        """
        sky, sdk = _sky()
        mode = sky.StatusRefreshMode.FORCE if refresh else sky.StatusRefreshMode.NONE
        records = sdk.get(sdk.status(None if names is None else list(names), refresh=mode, all_users=True))
        return {c.name: c for c in map(_cluster, records)}

    @_translated
    def job_failure(self, name: str) -> str | None:
        """Why the cluster's task will not run on: "" while it runs or waits, None when there is no task at all."""
        jobs = _sky()[1].get(_sky()[1].queue(name, all_users=True))
        if not jobs:
            return None
        last = max(jobs, key=lambda j: j["job_id"])
        status = last["status"].value
        return "" if status in ("INIT", "PENDING", "SETTING_UP", "RUNNING") else f"its task ended as {status}"

    @_translated
    def ssh_config(self, name: str) -> str:
        """OpenSSH's configuration for that cluster's nodes, home folders written out. Raises NotFound.

        SkyPilot's command line writes it as part of `sky launch` and `sky status`; the SDK alone does not.
        """
        _, sdk = _sky()
        from sky.client.cli import command

        records = sdk.get(sdk.status([name], all_users=True, _include_credentials=True))
        handle = records[0]["handle"] if records else None
        if handle is None or not handle.cached_external_ips or not records[0]["credentials"]:
            raise NotFound(f"SkyPilot knows no way to {name} yet")
        command._write_ssh_config_for_cluster(handle, records[0]["credentials"], command._get_ws_proxy_command())
        file = Path(command.cluster_utils.SSHConfigHelper.ssh_cluster_path.format(name)).expanduser()
        # OpenSSH reads `~` from the password database, SkyPilot from $HOME.
        return file.read_text().replace(" ~/", f" {Path.home()}/")


_import_lock = threading.Lock()


def _sky() -> tuple[Any, Any]:
    """The packages `sky` and `sky.client.sdk`. Raises Refused when SkyPilot is not installed."""
    with _import_lock:  # two threads that import it at once meet half-made modules
        apiserver.forbid_autostart()
        try:
            import sky
            from sky.client import sdk
        except ImportError as e:
            raise Refused(f"SkyPilot cannot be imported ({e}): pip install 'areal-sky[sky]'") from None
        return sky, sdk


def _server_url() -> str:
    from sky.server import common

    return str(common.get_server_url())


def _request(payload: Any) -> Request:
    return Request(payload.request_id, payload.name, payload.cluster_name or "", payload.status, payload.created_at)


def _cluster(record: Any) -> SkyCluster:
    ips = getattr(record["handle"], "cached_internal_ips", None) if record["handle"] is not None else None
    return SkyCluster(
        name=record["name"],
        status=record["status"].value,
        nodes=int(record["nodes"] or 1),
        private_ips=tuple(ips or ()),
        labels=dict(record["labels"] or {}),
        note=record["init_status_reason"] or "",
        unhealthy=record["init_kind"] == "unhealthy",
        user=record["user_name"] or "",
    )
