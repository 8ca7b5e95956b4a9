"""When SkyPilot's API server is started, over a stand-in for the SDK that listens."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from areal_sky.adapters.skypilot import apiserver
from areal_sky.adapters.skypilot.apiserver import FORBID, forbid_autostart, is_missing, start_if_gone
from areal_sky.errors import Unreachable

NO_SERVER = RuntimeError(f"No SkyPilot API server endpoint is configured ({FORBID}=1).")
# What stands in for `sky api start`: listens on the port for some seconds, in a process that outlives its parent.
START = """
import os, socket, time
assert "SKYPILOT_DISABLE_LOCAL_API_SERVER" not in os.environ
s = socket.create_server(("127.0.0.1", {port}))
if os.fork() == 0:
    for fd in (0, 1, 2): os.close(fd)
    time.sleep(10)
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop(FORBID, None)
    forbid_autostart()
    yield


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def test_a_gone_server_is_started(monkeypatch: pytest.MonkeyPatch, free_port: object) -> None:
    port = free_port()  # type: ignore[operator]
    monkeypatch.setattr(apiserver, "_START", START.format(port=port))
    start_if_gone(url(port))
    socket.create_connection(("127.0.0.1", port), 5).close()


def test_a_slow_server_is_not_taken_for_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apiserver, "_START", "raise SystemExit('started a second server')")
    with socket.create_server(("127.0.0.1", 0)) as s, pytest.raises(Unreachable, match="too busy to answer"):
        start_if_gone(url(s.getsockname()[1]))


def test_only_a_missing_server_is_meant() -> None:
    assert is_missing(NO_SERVER) and not is_missing(RuntimeError("something else"))


def test_a_user_who_forbids_a_local_server_gets_none(free_port: object) -> None:
    os.environ.clear()
    os.environ[FORBID] = "1"
    forbid_autostart()
    with pytest.raises(Unreachable, match="forbids starting one"):
        start_if_gone(url(free_port()))  # type: ignore[operator]


def test_one_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch, free_port: object) -> None:
    monkeypatch.setattr(apiserver, "_START", "raise SystemExit('no disk left')")
    with pytest.raises(Unreachable, match="did not start: no disk left"):
        start_if_gone(url(free_port()))  # type: ignore[operator]
