"""Starts one command, waits for it, and leaves nothing of it behind. Runs as a script of its own: stdlib only.

The runner that starts a warden may be killed with its Ray node at any moment. The warden lives in a session of its
own and holds the other end of a pipe, so it sees the runner go and ends the command's whole process tree, also what
the command put into the background or into other sessions (it is their reaper).

stdin: one line of JSON {"argv": [...], "running": PATH or null, "about": {...}}, then nothing, or `stop GRACE_S`;
its end means that the runner is gone: kill at once. Status pipe (its fd is the one argument): `pid N`, then
`exit CODE` (negative: by that signal).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_STATUS_FD = int(sys.argv[1]) if len(sys.argv) > 1 else 1


def main() -> int:
    control = sys.stdin.buffer
    order = json.loads(control.readline())
    with contextlib.suppress(OSError, AttributeError):  # not Linux: only the command's own group can be ended
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for harmless in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(harmless, lambda *_: None)  # the runner decides, by the pipe
    os.set_inheritable(_STATUS_FD, False)
    child = subprocess.Popen(order["argv"], stdin=subprocess.DEVNULL, start_new_session=True)
    _tell(f"pid {child.pid}")
    running = Path(order["running"]) if order.get("running") else None
    if running is not None:
        _write(running, {**order["about"], "pid": child.pid})
    kill_at_s: float | None = None
    listening = True
    while child.poll() is None:
        timeout_s = None if kill_at_s is None else max(0.0, kill_at_s - time.monotonic())
        sources = [wake_read, control.fileno()] if listening else [wake_read]
        ready, _, _ = select.select(sources, [], [], timeout_s)
        if wake_read in ready:
            os.read(wake_read, 4096)
            _reap_others(child.pid)
        if control.fileno() in ready:
            words = os.read(control.fileno(), 4096).split()
            if not words:
                listening, kill_at_s = False, time.monotonic()
            elif kill_at_s is None:
                kill_at_s = time.monotonic() + float(words[1])
                _signal_group(child.pid, signal.SIGTERM)
        if kill_at_s is not None and time.monotonic() >= kill_at_s:
            _kill_tree()
            kill_at_s = time.monotonic() + 0.2  # again, for what was being forked
    _kill_tree()
    if running is not None:
        running.unlink(missing_ok=True)
    _tell(f"exit {child.returncode}")
    return 0


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(_STATUS_FD, (text + "\n").encode())


def _write(path: Path, value: object) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(value))
        temporary.replace(path)
    except OSError as e:
        print(f"areal_sky: cannot write {path}: {e}", file=sys.stderr)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, number)


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_bytes().rsplit(b")", 1)[1].split()[:2]
        except OSError:
            continue
        if state != b"Z":
            children.setdefault(int(parent), []).append(int(entry.name))
    found, queue = [], [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _kill_tree() -> None:
    """SIGKILL to everything below, until nothing is; at most a second, as what hangs in the kernel never ends."""
    until_s = time.monotonic() + 1.0
    while (left := _descendants()) and time.monotonic() < until_s:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _reap_others(child_pid: int) -> None:
    """Orphans of the command come to us: collect those that ended, but leave the command itself to Popen."""
    while True:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if info is None or info.si_pid == child_pid:
            return
        os.waitpid(info.si_pid, os.WNOHANG)


if __name__ == "__main__":
    sys.exit(main())
