"""One rank of a gang, as the Ray actor that keeps it. Imports no Ray: the adapter makes an actor of the class.

The command runs under a warden (see warden.py) in a fresh directory; its output goes to files of this node and from
there to the head, in order and at most every PUSH_S. The exit is told only after the last output was taken.
A line `AREAL_SKY_METRIC loss=0.5 step=3` on stdout is recorded as the task's metrics.

On the node: `$AREAL_SKY_NODE_DIR/work/<task>/<attempt>.<rank>/` (working directory, kept),
`.../logs/<task>/<attempt>.<rank>.{out,err}`, and while it runs `.../running/<task>.<rank>.json`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from areal_sky.adapters.hostmemory import OOM_KILLED, oom_kills
from areal_sky.core.tokens import SECRET_KEYS, task_token
from areal_sky.run.shipper import LogShipper

if TYPE_CHECKING:
    from areal_sky.adapters.ports import RankStart

PUSH_S = 0.3  # at most this often per rank
LOOK_S = 0.05
LAST_PUSH_S = 60.0  # how long the last output waits for a head that does not answer


@dataclass(frozen=True)
class RankOrder:
    """What to run. `gpus` is what the bundle asks for; `envs` come from the task and the scheduler."""

    task_id: str
    attempt: int
    rank: int
    world_size: int
    kind: str
    command: str
    payload: str | None
    gpus: float
    envs: Mapping[str, str]
    lent: tuple[str, ...] = ()  # ids of GPUs that Ray counts as another task's


class Runner:
    """The actor. Its methods are coroutines, so it answers while the command runs."""

    def __init__(self, order: RankOrder):
        self._order = order
        self._process: RankProcess | None = None
        self._port: int | None = None
        self._stopped = False

    async def free_port(self) -> int:
        """A TCP port that was free on this node when first asked (rank 0's becomes MASTER_PORT); then always that."""
        if self._port is None:
            with socket.socket() as s:
                s.bind(("", 0))
                self._port = int(s.getsockname()[1])
        return self._port

    async def start(self, master_addr: str, master_port: int) -> tuple[int, list[str]]:
        """Starts the command once; returns its pid (0 when it does not run) and the ids of its GPUs."""
        if self._process is None:
            self._process = RankProcess(self._order, master_addr, master_port)
            if self._stopped:
                self._process.stop(0)
        pid = await asyncio.to_thread(self._process.start)
        return pid, [d for d in self._process.visible.split(",") if d]

    async def wait_exit(self) -> tuple[int | None, str]:
        """(exit code, "") once the command has ended and its output was taken; -N when signal N ended it.

        (None, why) when the command could not be started at all; (-9, why) where the kernel ended it for its memory.
        """
        while self._process is None or not self._process.done.is_set():
            await asyncio.sleep(0.02)
        return self._process.code, self._process.trouble

    async def stop(self, grace_s: float) -> None:
        """SIGTERM to the command's process group, SIGKILL to its whole tree after `grace_s`.

        May overtake `start`, which waits for rank 0's port: then the command does not start at all.
        """
        self._stopped = True
        if self._process is not None:
            await asyncio.to_thread(self._process.stop, grace_s)


class RankProcess:
    """The command of one rank, its files, and the thread that ships its output."""

    def __init__(self, order: RankOrder, master_addr: str, master_port: int, environ: Mapping[str, str] = os.environ):
        self.done = threading.Event()
        self.code: int | None = None
        self.trouble = ""
        self._order = order
        self._environ = environ
        self._lock = threading.Lock()
        self._pid: int | None = None
        self._warden: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._told_to_stop = False
        self._oom_kills = oom_kills()
        folder = environ.get("AREAL_SKY_NODE_DIR") or f"{tempfile.gettempdir()}/areal_sky-{os.getuid()}"
        self.node_dir = Path(folder)
        name = f"{order.attempt}.{order.rank}"
        self.work_dir = self.node_dir / "work" / order.task_id / name
        self.log_files = {s: self.node_dir / "logs" / order.task_id / f"{name}.{s}" for s in ("out", "err")}
        own = environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if order.gpus > len(order.lent) else []
        self.visible = ",".join([*(d for d in own if d), *order.lent])
        self._master = {"MASTER_ADDR": master_addr, "MASTER_PORT": str(master_port)}

    def start(self) -> int:
        """Starts the command unless it was started before; returns its pid, 0 when it does not run."""
        with self._lock:
            if self._pid is None:
                try:
                    self._pid = self._start()
                except OSError as e:
                    self._pid, self.trouble = 0, f"cannot start it on this node: {e}"
                    self.done.set()
            return self._pid

    def stop(self, grace_s: float) -> None:
        """Idempotent; nothing happens after the end. What has not started yet will not."""
        with self._lock:
            self._told_to_stop = True
            warden = self._warden
            if self._pid is None:
                self._pid, self.code = 0, -int(signal.SIGTERM)
                self.done.set()
        if warden is None or warden.stdin is None or self._ended.is_set():
            return
        try:
            warden.stdin.write(b"stop %f\n" % grace_s)
            warden.stdin.flush()
        except OSError:
            pass  # the warden has ended by itself

    def environment(self) -> dict[str, str]:
        """The command's environment: the node's, less what is Ray's or secret, plus the rank's own."""
        o = self._order
        secret = (*SECRET_KEYS, "AREAL_SKY_HEAD_CONFIG", "AREAL_SKY_NODE_CONFIG")
        env = {k: v for k, v in self._environ.items() if k not in secret and _not_rays_own(k)}
        # `python` in a command is the Python that this node runs areal_sky with; where that one knows nothing of the
        # machine's own packages (core/installscript.py), the machine's comes first.
        folders = [str(Path(sys.executable).parent), env.get("PATH", os.defpath)]
        if (Path(sys.prefix) / "apart").exists():
            folders.reverse()
        env["PATH"] = os.pathsep.join(folders)
        env.setdefault("PYTHONUNBUFFERED", "1")
        env.update(o.envs)
        env.update(self._master)
        env.update(
            RANK=str(o.rank),
            WORLD_SIZE=str(o.world_size),
            LOCAL_RANK="0",  # every rank sees only its own devices
            CUDA_VISIBLE_DEVICES=self.visible,
            AREAL_SKY_TASK_ID=o.task_id,
            AREAL_SKY_ATTEMPT=str(o.attempt),
            AREAL_SKY_TOKEN=task_token(self._environ.get("AREAL_SKY_NODE_TOKEN", "")),
        )
        return env

    def _start(self) -> int:
        o = self._order
        for folder in (self.work_dir, self.log_files["out"].parent, self.node_dir / "running"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        argv = ["/bin/sh", "-c", o.command]
        if o.payload is not None:
            payload_file = self.work_dir / ".callable.pickle"
            payload_file.write_bytes(base64.b64decode(o.payload))
            argv = [sys.executable, "-m", "areal_sky.run.invoke", str(payload_file)]
        about = {
            "task_id": o.task_id,
            "rank": o.rank,
            "kind": o.kind,
            "gpus": _device_ids(self.visible),
            "gpus_frac": min(1.0, o.gpus),
        }
        running = self.node_dir / "running" / f"{o.task_id}.{o.rank}.json"
        status_read, status_write = os.pipe()
        script = Path(__file__).with_name("warden.py")
        with self.log_files["out"].open("wb") as out, self.log_files["err"].open("wb") as err:
            self._warden = subprocess.Popen(
                [sys.executable, "-I", "-S", str(script), str(status_write), str(running), json.dumps(about), *argv],
                stdin=subprocess.PIPE, stdout=out, stderr=err, cwd=self.work_dir, env=self.environment(),
                pass_fds=(status_write,), start_new_session=True,
            )  # fmt: skip
        os.close(status_write)
        status = os.fdopen(status_read, "r")
        first = status.readline().split()
        threading.Thread(target=self._watch, args=(status,), name="watch", daemon=True).start()
        threading.Thread(target=self._ship, name="ship", daemon=True).start()
        return int(first[1]) if len(first) == 2 and first[0] == "pid" else 0

    def _watch(self, status: IO[str]) -> None:
        with status:
            last = status.readline().split()
        assert self._warden is not None
        self._warden.wait()
        # A warden that ends without a word was killed itself.
        self.code = int(last[1]) if len(last) == 2 and last[0] == "exit" else -9
        if self.code in (-9, 137) and not self._told_to_stop and oom_kills() > self._oom_kills:
            self.trouble = OOM_KILLED
        self._ended.set()

    def _ship(self) -> None:
        o, env = self._order, self._environ
        url, token = env.get("AREAL_SKY_GATEWAY", ""), env.get("AREAL_SKY_NODE_TOKEN", "")
        shippers = [
            LogShipper(o.task_id, o.attempt, o.rank, stream, path, url, token)
            for stream, path in self.log_files.items()
        ]
        while not self._ended.wait(LOOK_S):
            news = [s for s in shippers if s.has_news()]
            for shipper in news:
                shipper.push()
            if news:
                self._ended.wait(PUSH_S - LOOK_S)
        give_up_s = time.monotonic() + LAST_PUSH_S
        while left := [s for s in shippers if not s.push(last=True)]:
            if time.monotonic() > give_up_s:
                break
            shippers = left
            time.sleep(PUSH_S)
        self.done.set()


def _not_rays_own(name: str) -> bool:
    """Whether a variable of the Ray worker may reach the command: RAY_AUTH_* lets it join Ray, others confuse it."""
    return not name.startswith("RAY_") or name.startswith("RAY_AUTH_")


def _device_ids(visible: str) -> list[int | str]:
    return [int(d) if d.strip().isdigit() else d.strip() for d in visible.split(",") if d.strip()]


def runner_arguments(gang_id: str, world_size: int, start: RankStart) -> tuple[RankOrder]:
    """What the Ray adapter gives a Runner: the order for one rank of a gang."""
    task_id, _, attempt = gang_id.rpartition(".")
    order = RankOrder(
        task_id, int(attempt), start.rank, world_size, start.kind, start.command, start.payload, start.gpus, start.envs,
        start.lent,
    )  # fmt: skip
    return (order,)
