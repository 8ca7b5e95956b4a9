"""SkyApi over a stand-in for the SDK: what is passed on, what is read, and that only our errors come out."""

from __future__ import annotations

import sys
from types import SimpleNamespace as Thing
from typing import Any

import pytest

from areal_sky.adapters.skypilot import requests
from areal_sky.adapters.skypilot.requests import LAUNCH, Request, SkyApi
from areal_sky.errors import NotFound, QuotaExceeded, Refused, Unreachable


class ResourcesUnavailableError(Exception):
    """As SkyPilot's: known by its name."""

    failover_history = (Exception("VcpuLimitExceeded"),)


class ApiServerConnectionError(RuntimeError):
    pass


class Sdk:
    """Every call is kept; `results` are what `get` gives, or raises, by request id."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.results: dict[str, Any] = {}
        self.task: Any = None

    def get(self, request_id: str) -> Any:
        result = self.results.get(request_id)
        if isinstance(result, BaseException):
            raise result
        return result

    def launch(self, task: Any, cluster_name: str) -> str:
        self.calls.append(("launch", cluster_name))
        self.task = task
        return "id-1"

    def status(self, names: Any, refresh: str, all_users: bool) -> str:
        self.calls.append(("status", names, refresh, all_users))
        return "status"

    def queue(self, name: str, all_users: bool) -> str:
        return "queue"

    def api_status(self, **asked: Any) -> list[Any]:
        self.calls.append(("api_status", *sorted(asked)))
        return [Thing(request_id="id-1", name=LAUNCH, cluster_name="c-a-0", status="RUNNING", created_at=1.0)]


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> Sdk:
    made = Sdk()
    task = lambda config: Thing(config=config, update_secrets=lambda s: setattr(made, "secrets", s))  # noqa: E731
    sky = Thing(
        StatusRefreshMode=Thing(FORCE="force", NONE="none"),
        Task=Thing(from_yaml_config=task),
    )
    monkeypatch.setattr(requests, "_sky", lambda: (sky, made))
    return made


def test_secrets_travel_apart_from_the_task(sdk: Sdk) -> None:
    assert SkyApi().launch({"run": "x", "secrets": {"T": "hush"}}, "c-a-0") == "id-1"
    assert sdk.task.config == {"run": "x"} and sdk.secrets == {"T": "hush"}  # type: ignore[attr-defined]


def test_requests_in_flight_are_read_in_our_words(sdk: Sdk) -> None:
    assert SkyApi().active() == (Request("id-1", LAUNCH, "c-a-0", "RUNNING", 1.0),)
    assert SkyApi().active()[0].active
    assert SkyApi().lookup([]) == {} and SkyApi().lookup(["id-1"]).keys() == {"id-1"}


def test_records_are_read_in_our_words(sdk: Sdk) -> None:
    record = {
        "name": "c-a-0", "status": Thing(value="INIT"), "nodes": 2, "labels": {"k": "v"}, "user_name": "eve",
        "init_status_reason": "waiting", "init_kind": "launching", "handle": Thing(cached_internal_ips=["10.0.0.1"]),
    }  # fmt: skip
    sdk.results["status"] = [record, {**record, "name": "d", "handle": None, "labels": None, "init_kind": "unhealthy"}]
    found = SkyApi().clusters(["c-a-0", "d"], refresh=True)
    assert sdk.calls[-1] == ("status", ["c-a-0", "d"], "force", True)
    first = found["c-a-0"]
    assert (first.private_ips, first.note, first.unhealthy) == (("10.0.0.1",), "waiting", False)
    assert (found["d"].private_ips, dict(found["d"].labels), found["d"].unhealthy) == ((), {}, True)


def test_how_a_request_ended_is_asked_only_when_it_did_not_succeed(sdk: Sdk) -> None:
    sdk.results["id-1"] = ResourcesUnavailableError("none")
    assert SkyApi().outcome(Request("id-1", LAUNCH, "c", "SUCCEEDED")) is None
    error = SkyApi().outcome(Request("id-1", LAUNCH, "c", "FAILED"))
    assert isinstance(error, QuotaExceeded) and "VcpuLimitExceeded" in str(error)


@pytest.mark.parametrize(
    ("statuses", "failure"),
    [
        ((), None),
        (("RUNNING",), ""),
        (("FAILED_SETUP", "PENDING"), ""),
        (("RUNNING", "FAILED"), "its task ended as FAILED"),
    ],
)
def test_the_last_job_tells_whether_it_still_works(sdk: Sdk, statuses: tuple[str, ...], failure: str | None) -> None:
    sdk.results["queue"] = [{"job_id": n, "status": Thing(value=s)} for n, s in enumerate(statuses)]
    assert SkyApi().job_failure("c") == failure


@pytest.mark.parametrize(("error", "kind"), [(ApiServerConnectionError("x"), Unreachable), (SystemExit(1), Exception)])
def test_only_our_errors_come_out(sdk: Sdk, error: BaseException, kind: type[Exception]) -> None:
    sdk.results["status"] = error
    with pytest.raises(kind):
        SkyApi().clusters()


def test_without_skypilot_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sky", None)
    with pytest.raises(Refused, match=r"pip install 'areal-sky\[sky\]'"):
        SkyApi().clusters()


def test_a_cluster_without_an_address_has_no_ssh_config(sdk: Sdk, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sky")
    monkeypatch.setattr(sdk, "status", lambda *a, **k: "status")
    sdk.results["status"] = []
    with pytest.raises(NotFound):
        SkyApi().ssh_config("c")
