"""A lasting way to the head: `ssh -N -L` from a port of this machine's loopback to the gateway on the head's.

One per cluster, kept by its controller: started when the head is up, again when it breaks, on the same local port. An
ssh of a controller that was killed goes on serving; the next controller finds it by its recorded pid and keeps it.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_sky.adapters import processes

log = logging.getLogger(__name__)
LOCAL_PORTS = range(32000, 32700)  # above the ports of local clusters, below Linux's ephemeral ones
UP_S = 60.0  # a tunnel that does not listen by then is started again
RETRY_S = 1.0
PROBLEM = "tunnel.problem"  # a file that says why there is no way to the head now

SSH_OPTIONS = (
    "BatchMode=yes", "ExitOnForwardFailure=yes", "ServerAliveInterval=5", "ServerAliveCountMax=3",
    "ConnectTimeout=20", "LogLevel=ERROR", "ControlMaster=no", "ControlPath=none",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """Where a tunnel leads: a host of `ssh_config`, and a port of that host's loopback."""

    host: str
    ssh_config: str
    port: int


@dataclass(frozen=True, slots=True)
class _Ssh:
    """A running ssh and what it was started for."""

    pid: int
    started_s: float
    port: int
    target: Target

    def alive(self) -> bool:
        return processes.identity(self.pid) == self.started_s


class Tunnel:
    """Keeps a tunnel to wherever `locate` says the head is; `announce` gets the local port, or None when it is down."""

    def __init__(self, folder: Path, locate: Callable[[], Target | None], announce: Callable[[int | None], None]):
        self._folder = folder
        self._locate = locate
        self._announce = announce
        self._record = folder / "tunnel.json"
        self._problem = folder / PROBLEM
        self._log = folder / "tunnel.log"
        self._ssh: _Ssh | None = None
        self._up = False
        self._opened_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tunnel", daemon=True)

    def start(self) -> None:
        self._ssh = self._recorded()
        if self._ssh is None:
            self._announce(None)  # whatever was said before a crash leads nowhere
        self._opened_s = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Ends ssh and waits for the thread, 5 s at most."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        self._close()

    def _run(self) -> None:
        known = False  # until the head's place is known again, a recorded ssh is the best guess
        while not self._stop.wait(0.1 if self._ssh is not None and not self._up else 0.5):
            try:
                target = self._locate()
                known = known or target is not None
                if known or self._ssh is not None:
                    self._keep(target if known or self._ssh is None else self._ssh.target)
            except OSError as e:
                log.warning("tunnel: %s", e)
                self._stop.wait(RETRY_S)

    def _keep(self, target: Target | None) -> None:
        ssh = self._ssh
        if ssh is not None and (ssh.target != target or not ssh.alive()):
            if ssh.target == target:
                self._say_why(ssh.target.host)
                self._stop.wait(RETRY_S)
            self._close()
        if target is None:
            return
        if self._ssh is None:
            self._open(target, ssh.port if ssh is not None else 0)
        elif not self._up and processes.port_answers("127.0.0.1", self._ssh.port):
            self._up = True
            log.info("%s: gateway at 127.0.0.1:%s", target.host, self._ssh.port)
            self._problem.unlink(missing_ok=True)
            self._announce(self._ssh.port)
        elif not self._up and time.monotonic() - self._opened_s > UP_S:
            self._close()

    def _open(self, target: Target, port: int) -> None:
        config = self._folder / "ssh_config"
        config.unlink(missing_ok=True)
        with os.fdopen(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(target.ssh_config)
        if not (port and processes.port_is_free(port)):
            port = next(p for p in random.sample(LOCAL_PORTS, len(LOCAL_PORTS)) if processes.port_is_free(p))
        options = [x for option in SSH_OPTIONS for x in ("-o", option)]
        forward = f"127.0.0.1:{port}:127.0.0.1:{target.port}"
        argv = ["ssh", "-F", str(config), *options, "-N", "-L", forward, target.host]
        process = processes.spawn(argv, dict(os.environ), self._log, cwd=Path("/"))
        threading.Thread(target=process.wait, daemon=True).start()  # so that it never stays as a zombie
        self._ssh = _Ssh(process.pid, processes.identity(process.pid) or 0.0, port, target)
        self._opened_s = time.monotonic()
        self._record.write_text(json.dumps(asdict(self._ssh)))

    def _say_why(self, host: str) -> None:
        """What ssh said last, for whoever asks why the head cannot be reached."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        why = next((x.strip() for x in reversed(lines) if x.strip()), "it said nothing")[:200]
        log.warning("ssh to %s has ended: %s; starting it again", host, why)
        self._problem.write_text(f"ssh to {host} ends: {why}")
        self._log.unlink(missing_ok=True)  # so that it holds one attempt, however many there are

    def _close(self) -> None:
        if self._ssh is not None and self._ssh.alive():
            processes.kill([self._ssh.pid], signal.SIGTERM)
        if self._up:
            self._announce(None)
        self._ssh, self._up = None, False
        self._record.unlink(missing_ok=True)

    def _recorded(self) -> _Ssh | None:
        try:
            found = json.loads(self._record.read_text())
            ssh = _Ssh(**(found | {"target": Target(**found["target"])}))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return ssh if ssh.alive() else None
