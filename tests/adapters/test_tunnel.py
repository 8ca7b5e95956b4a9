"""The tunnel on a stand-in `ssh` that forwards by itself: kept, started again, adopted by the next controller."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_sky.adapters import processes
from areal_sky.adapters.tunnel import Target, Tunnel
from tests.adapters.test_skypilot_cloud import until

# Takes ssh's arguments, listens on the -L port and sends every caller on; prints nothing.
SSH = f"""#!{sys.executable}
import socket, sys, threading
local, port, _, remote = sys.argv[sys.argv.index("-L") + 1].split(":")
server = socket.create_server((local, int(port)))
while True:
    caller = server.accept()[0]
    try:
        caller.sendall(socket.create_connection(("127.0.0.1", int(remote))).recv(99))
    except OSError:
        pass
    caller.close()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    return tmp_path


@pytest.fixture
def gateway() -> Iterator[int]:
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                caller = server.accept()[0]
            except OSError:
                return
            caller.sendall(b"gateway")
            caller.close()

    threading.Thread(target=serve, daemon=True).start()
    yield int(server.getsockname()[1])
    server.close()


class Told:
    """What was announced last; `way` is where the head is."""

    def __init__(self, way: Target | None) -> None:
        self.way = way
        self.port: int | None = None

    def tunnel(self, folder: Path) -> Tunnel:
        return Tunnel(folder, lambda: self.way, lambda port: setattr(self, "port", port))


def answer(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=2) as s:
        return s.recv(99)


def pid_of(folder: Path) -> int:
    import json

    return int(json.loads((folder / "tunnel.json").read_text())["pid"])


def test_it_leads_to_the_head_and_ends_when_stopped(folder: Path, gateway: int) -> None:
    told = Told(None)
    tunnel = told.tunnel(folder)
    tunnel.start()
    assert told.port is None
    told.way = Target("h", "Host h\n", gateway)
    port = until(lambda: told.port)
    assert answer(port) == b"gateway"
    config = folder / "ssh_config"
    assert config.read_text() == "Host h\n" and config.stat().st_mode & 0o777 == 0o600
    pid = pid_of(folder)
    tunnel.stop()
    until(lambda: processes.identity(pid) is None)
    assert told.port is None and not (folder / "tunnel.json").exists()


def test_a_broken_one_is_started_again_on_the_same_port(folder: Path, gateway: int) -> None:
    told = Told(Target("h", "Host h\n", gateway))
    tunnel = told.tunnel(folder)
    tunnel.start()
    port, pid = until(lambda: told.port), pid_of(folder)
    os.kill(pid, signal.SIGKILL)
    until(lambda: (folder / "tunnel.json").exists() and pid_of(folder) != pid and told.port)
    assert told.port == port and answer(port) == b"gateway"
    tunnel.stop()


def test_a_head_that_moved_is_followed_and_one_that_is_gone_is_said(folder: Path, gateway: int) -> None:
    told = Told(Target("h", "Host h\n", gateway))
    tunnel = told.tunnel(folder)
    tunnel.start()
    until(lambda: told.port)
    pid = pid_of(folder)
    told.way = Target("h", "Host h\n  HostName other\n", gateway)
    until(lambda: (folder / "tunnel.json").exists() and pid_of(folder) != pid and told.port)
    told.way = None
    until(lambda: told.port is None and not (folder / "tunnel.json").exists())
    tunnel.stop()


def test_the_next_controller_keeps_the_one_that_is_there(folder: Path, gateway: int) -> None:
    way = Target("h", "Host h\n", gateway)
    first = Told(way)
    killed = first.tunnel(folder)
    killed.start()
    port, pid = until(lambda: first.port), pid_of(folder)
    killed._stop.set()
    second = Told(None)  # the head is not found again yet
    tunnel = second.tunnel(folder)
    tunnel.start()
    assert until(lambda: second.port) == port and answer(port) == b"gateway"
    second.way = way
    until(lambda: second.port == port)
    assert pid_of(folder) == pid
    tunnel.stop()
    until(lambda: processes.identity(pid) is None)
