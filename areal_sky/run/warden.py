"""Starts one command, waits for it, and leaves nothing of it behind. Runs as a script of its own: stdlib only.

The runner that starts a warden may be killed with its Ray node at any moment. The warden lives in a session of its
own and holds the other end of a pipe, so it sees the runner go and ends the command's whole process tree, also what
the command put into the background or into other sessions (it is their reaper).

Arguments: the fd of the status pipe, the file that tells of the command while it runs (or nothing), what it tells (a
JSON object, to which the pid is added), and the command's words. stdin: `stop GRACE_S`, or nothing; its end means that
the runner is gone: kill at once. Status pipe: `pid N`, then `exit CODE` (negative: by that signal).

Every task waits for this to start, so it imports no more than it needs, and before the command nothing.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

_PR_SET_CHILD_SUBREAPER = 36
_STATUS_FD = int(sys.argv[1]) if len(sys.argv) > 1 else 1


def main(running: str, about: str, argv: list[str]) -> int:
    control = sys.stdin.fileno()
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for harmless in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(harmless, lambda *_: None)  # the runner decides, by the pipe
    os.set_inheritable(_STATUS_FD, False)
    pid = _start(argv)
    _tell(f"pid {pid}")
    _adopt_orphans()
    if running:
        _write(running, f'{about[:-1]}, "pid": {pid}}}')
    code: int | None = None
    kill_at_s: float | None = None
    listening = True
    while code is None:
        timeout_s = None if kill_at_s is None else max(0.0, kill_at_s - time.monotonic())
        sources = [wake_read, control] if listening else [wake_read]
        ready, _, _ = select.select(sources, [], [], timeout_s)
        if wake_read in ready:
            os.read(wake_read, 4096)
            code = _reap(pid)
        if control in ready:
            words = os.read(control, 4096).split()
            if not words:
                listening, kill_at_s = False, time.monotonic()
            elif kill_at_s is None:
                kill_at_s = time.monotonic() + float(words[1])
                _signal_group(pid, signal.SIGTERM)
        if code is None and kill_at_s is not None and time.monotonic() >= kill_at_s:
            _kill_tree()
            kill_at_s = time.monotonic() + 0.2  # again, for what was being forked
    _kill_tree()
    if running and os.path.exists(running):  # noqa: PTH110 - pathlib takes as long to load as all the rest
        os.unlink(running)  # noqa: PTH108
    _tell(f"exit {code}")
    return 0


def _start(argv: list[str]) -> int:
    """The command in a session of its own, with nothing to read and the signals as a shell would leave them."""
    quiet = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    usual = [signal.SIGPIPE, signal.SIGXFSZ]  # Python ignores these
    return os.posix_spawn(argv[0], argv, os.environ, file_actions=quiet, setsid=True, setsigdef=usual)


def _adopt_orphans() -> None:
    """What the command leaves behind comes to us. Not on Linux: then only the command's own group can be ended."""
    import ctypes

    try:  # noqa: SIM105
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        pass


def _tell(text: str) -> None:
    try:  # noqa: SIM105
        os.write(_STATUS_FD, (text + "\n").encode())
    except OSError:
        pass  # nobody listens any more


def _write(path: str, text: str) -> None:
    try:
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)  # noqa: PTH103, PTH120
        temporary = f"{path}.{os.getpid()}"
        with open(temporary, "w") as file:  # noqa: PTH123
            file.write(text)
        os.replace(temporary, path)  # noqa: PTH105
    except OSError as e:
        print(f"areal_sky: cannot write {path}: {e}", file=sys.stderr)


def _signal_group(pid: int, number: int) -> None:
    try:  # noqa: SIM105
        os.killpg(pid, number)
    except OSError:
        pass


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                state, parent = file.read().rsplit(b")", 1)[1].split()[:2]
        except OSError:
            continue
        if state != b"Z":
            children.setdefault(int(parent), []).append(int(name))
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
            try:  # noqa: SIM105
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        time.sleep(0.01)


def _reap(command: int) -> int | None:
    """Collects all that has ended, the command's orphans included; how the command has ended, if it has."""
    code: int | None = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == command:
            code = os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[2], sys.argv[3], sys.argv[4:]))
