"""Processes of this machine, found by the mark in their environment and ended by pid (psutil is imported here only).

Every process of a node inherits `AREAL_SKY_NODE` from the node's first one, Ray's daemons, the tasks' own children and
what they detach included: so a pretend machine can be switched off whole, and nobody else's process is ever touched.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from areal_sky.core.nodeenv import NODE_MARK


def marked(prefix: str) -> dict[str, list[int]]:
    """Live pids by mark, of every process whose mark begins with `prefix`. Zombies do not count."""
    found: dict[str, list[int]] = {}
    needle = f"{NODE_MARK}={prefix}".encode()
    key = f"{NODE_MARK}=".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            environ = Path(entry.path, "environ").read_bytes()
        except OSError:
            continue
        if needle not in environ:
            continue
        mark = next((v for v in environ.split(b"\0") if v.startswith(needle)), None)
        if mark is not None:
            found.setdefault(mark[len(key) :].decode(errors="replace"), []).append(int(entry.name))
    return found


def kill(pids: Sequence[int], sig: signal.Signals = signal.SIGKILL) -> None:
    """Signals each pid; those that are gone are no error."""
    for pid in pids:
        try:
            os.kill(pid, sig)
        except (ProcessLookupError, PermissionError):
            continue


def kill_marked(mark: str, spare: Sequence[int] = ()) -> int:
    """SIGKILLs every process with exactly that mark, again until no new one shows up; returns how many there were."""
    killed: set[int] = set()
    for _ in range(20):
        pids = [p for p in marked(mark).get(mark, []) if p not in spare and p not in killed]
        if not pids:
            break
        kill(pids)
        killed.update(pids)
    return len(killed)


def spawn(argv: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path | None = None) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own, output appended to `log`: it outlives us."""
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return subprocess.Popen(
            list(argv),
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
        )
    finally:
        os.close(descriptor)


def identity(pid: int) -> float | None:
    """When that process started (a pid alone may be reused); None when it is gone or a zombie."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def port_answers(host: str, port: int, timeout_s: float = 0.2) -> bool:
    """Whether something accepts TCP connections there."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether we could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError:
            return False
    return True


def listening(host: str, port: int) -> socket.socket:
    """A socket that takes connections there. Raises OSError."""
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind((host, port))
    s.listen(2048)
    return s


def rss_mib(pid: int) -> float:
    """Resident memory of one process."""
    return psutil.Process(pid).memory_info().rss / 2**20


def settle() -> None:
    """For a process that has loaded what it needs, and makes many objects that die young: the collector leaves alone
    what is there, and looks at what comes after in tens of thousands, not in hundreds. Of a head with a thousand nodes
    that saves a fifth.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def stop_on_signals(stop: threading.Event) -> None:
    """SIGTERM and SIGINT end this process in good order."""
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda *_: stop.set())
