"""The testbed from Python: what tests and benchmarks do to it. The shell scripts beside this file do the work."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# A testbed that is up already: its state folder (TB_DIR). Tests then use it and leave it up.
RUNNING = "AREAL_SKY_TESTBED"


def why_not() -> str | None:
    """Why no testbed can be brought up here, in words; None when it can."""
    if platform.system() != "Linux":
        return "the Slurm testbed needs Linux (network namespaces)"
    if os.geteuid() != 0:
        return "the Slurm testbed needs root, to make network namespaces"
    if missing := _script("packages.sh", "--list").strip():
        return f"the Slurm testbed needs Debian packages: apt-get install {missing}"
    isolated = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "true"]
    if subprocess.run(isolated, capture_output=True).returncode:
        return "the Slurm testbed needs the right to make network, mount and process namespaces"
    if not (ROOT / ".venv/bin/sky").exists():
        return "the Slurm testbed needs SkyPilot in .venv: make setup"
    return None


class Testbed:
    """A local Slurm cluster that is up, with SkyPilot's client and API server beside it."""

    __test__ = False  # nothing for pytest to collect

    def __init__(self, folder: Path):
        self.dir = folder
        settings = (folder / "settings").read_text()
        values = dict(line.split("=", 1) for line in settings.splitlines())
        self._values = {name.removeprefix("TB_"): "".join(shlex.split(value)) for name, value in values.items()}
        self.home = folder / "sky-home"  # HOME of SkyPilot's client and server
        self.shared = folder / "home"  # root's home on every host: a disk that all see
        self.infra = f"slurm/{self._values['CLUSTER']}/gpu"
        self.spot_infra = f"slurm/{self._values['CLUSTER']}/spot"
        self.gpus_per_node = int(self._values["GPUS"])
        self.accelerators = f"{self._values['GPU_TYPE'].upper()}:{self.gpus_per_node}"  # a whole node, as YAML says it
        self.nodes = tuple(f"{self._values['PREFIX']}{n + 1}" for n in range(int(self._values["NODES"])))
        self.api_port = int(self._values["API_PORT"] or 0)

    def env(self, **more: str) -> dict[str, str]:
        """Environment of a SkyPilot client here, `areal-sky` included; nothing of the real home is read or written."""
        unwanted = ("SKYPILOT_", "RAY_", "AREAL_SKY_", "PYTHONDONTWRITEBYTECODE", "XDG_")
        return {
            **{k: v for k, v in os.environ.items() if not k.startswith(unwanted)},
            "HOME": str(self.home),
            "SKY_RUNTIME_DIR": str(self.home),
            "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}",
            "SKYPILOT_API_SERVER_LOCAL_PORT": str(self.api_port),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "TB_MARK": str(self.dir),  # so that what outlives a test is found and ended
            "COLUMNS": "120",
            **more,
        }

    def sky(
        self, *args: str | Path, timeout_s: float = 240, env: dict[str, str] | None = None, folder: Path | None = None
    ) -> str:
        """`sky ARGS`, run in that folder; its output. Raises AssertionError when it fails."""
        return _checked(["sky", *map(str, args)], env or self.env(), timeout_s, folder)

    def areal_sky(
        self, home: Path, *args: str, code: int | None = 0, timeout_s: float = 900, **env: str
    ) -> str:
        """`areal-sky ARGS` with that AREAL_SKY_HOME and `env`: what it prints, errors included.

        Raises AssertionError for another exit code than `code` (None: any), with what its controllers have logged last.
        """
        found, text = _run(["areal-sky", *args], self.env(AREAL_SKY_HOME=str(home), **env), timeout_s)
        if code not in (None, found):
            logs = "".join(p.read_text()[-6000:] for p in home.glob("clusters/*/controller.log"))
            raise AssertionError(f"{args}: exit code {found}\n{text}{logs}")
        return text

    def launch(self, name: str, *args: str | Path, timeout_s: float = 240, **more: Any) -> str:
        """`sky launch -d` of a cluster with that name; args: a YAML, a command, options. `more` as for `sky`."""
        return self.sky("launch", "-y", "-d", "-c", name, *args, timeout_s=timeout_s, **more)

    def down(self, *names: str) -> None:
        """`sky down` of clusters; those that are unknown are no error."""
        known = [name for name in names if name in self.clusters()]
        if known:
            self.sky("down", "-y", *known)

    def clusters(self) -> tuple[str, ...]:
        """Names of all SkyPilot clusters, from its cache."""
        out = self.sky("status", "--output", "json")
        return tuple(c["name"] for c in json.loads(out[out.index("[") :]))

    def launches_of(self, name: str) -> int:
        """How often SkyPilot's API server has been asked to launch that cluster since it was started.

        Its job queue does not tell: where Slurm ended a cluster, the next one of that name finds the old one's jobs.
        """
        ask = "from sky.client import sdk\nfor r in sdk.api_status(all_status=True): print(r.name, r.cluster_name)"
        out = _checked([f"{ROOT}/.venv/bin/python", "-c", ask], self.env(), 60)
        return out.splitlines().count(f"sky.launch {name}")

    def on(self, host: str, *argv: str, timeout_s: float = 60) -> str:
        """A command on one host (`login`, or a node): its output."""
        return _checked([str(HERE / "host.sh"), "run", host, *argv], self._own_env(), timeout_s)

    def jobs(self) -> list[dict[str, str]]:
        """Slurm's jobs: id, name (ends with SkyPilot's cluster name on cloud), state, node list, partition."""
        text = self.on("login", "squeue", "-h", "-o", "%i|%j|%T|%N|%P")
        return [
            dict(zip(("id", "name", "state", "nodes", "partition"), line.split("|"), strict=True))
            for line in text.splitlines()
        ]

    def job_of(self, cluster: str) -> dict[str, str]:
        """The Slurm job that is that SkyPilot cluster. Raises AssertionError when there is none."""
        found = [job for job in self.jobs() if job["name"].startswith(cluster + "-")]
        assert found, f"no Slurm job of {cluster!r}; there are {[job['name'] for job in self.jobs()]}"
        return found[0]

    def node_of(self, cluster: str) -> str:
        """The (first) host that the cluster runs on."""
        return self.on("login", "scontrol", "show", "hostnames", self.job_of(cluster)["nodes"]).split()[0]

    def scancel(self, cluster: str, *options: str) -> None:
        """The reclaim: Slurm ends the cluster's job (SIGTERM, SIGKILL after KillWait, 5 s) behind SkyPilot's back."""
        self.on("login", "scancel", *options, self.job_of(cluster)["id"])

    def crash(self, node: str) -> None:
        """A power cut. Slurm tells after SlurmdTimeout (30 s); whoever watches the network sees it at once."""
        _script("host.sh", "crash", node, env=self._own_env())

    def start(self, node: str) -> None:
        """Switches a crashed node on again and waits until Slurm can use it. Changes nothing on a node that is up."""
        _script("host.sh", "start", node, env=self._own_env())
        until(lambda: self._is_usable(node), 90, what=lambda: f"{node} is {self.state_of(node)}")

    def _is_usable(self, node: str) -> bool:
        # Not "idle" alone: after a job's end sinfo may say "mixed" for a minute, although all of the node can be had.
        if self.state_of(node).split()[0] not in ("idle", "mixed", "allocated"):
            return False
        try:
            return "Slurmd PID" in self.on(node, "scontrol", "show", "slurmd")
        except AssertionError:  # its slurmd is not up yet
            return False

    def state_of(self, node: str) -> str:
        """Slurm's word for it: idle, mixed, allocated, down, drained ..., with its reason if there is one."""
        return self.on("login", "sinfo", "-h", "-n", node, "-p", "gpu", "-o", "%T %E").strip().removesuffix(" none")

    def kill_api(self) -> None:
        """kill -9 of SkyPilot's API server with all its workers, launches in flight included."""
        _script("api.sh", "kill", env=self._own_env())

    def start_api(self) -> None:
        """Starts the API server where it is not up; returns when it answers."""
        _script("api.sh", "start", env=self._own_env())

    def busy(self) -> str:
        """What a test has left: SkyPilot clusters and Slurm jobs, in words; empty when nothing."""
        left = [*self.clusters(), *(job["name"] for job in self.jobs())]
        return ", ".join(left)

    def clear(self) -> str:
        """Has every node up, and no cluster and no job there is; what was, in words: empty when a test left nothing."""
        self.start_api()
        left = self.busy()
        if left:
            self.down(*self.clusters())
            if self.jobs():
                self.on("login", "scancel", "--user=root")
                until(lambda: not self.jobs(), 60)
        for node in self.nodes:
            self.start(node)
        return left

    def _own_env(self) -> dict[str, str]:
        return {**os.environ, "TB_DIR": str(self.dir)}


@contextlib.contextmanager
def running(nodes: int = 6) -> Iterator[Testbed]:
    """The testbed that AREAL_SKY_TESTBED names, or a new one, which is taken down in the end."""
    if folder := os.environ.get(RUNNING):
        yield Testbed(Path(folder))
        return
    folder = tempfile.mkdtemp(prefix="areal-sky-testbed-", dir="/tmp")  # Ray's sockets need a short path
    # Two can stand side by side: names and addresses differ.
    number = next(n for n in range(20, 250) if not Path(f"/run/netns/as{n}n-login").exists())
    env = {
        **os.environ,
        "TB_DIR": folder,
        "TB_PREFIX": f"as{number}n",
        "TB_NET": f"10.78.{number}",
        "TB_PORT": str(free_port()),
        "TB_API_PORT": str(free_port()),
        "TB_NODES": str(nodes),
    }
    # Told to end, it ends as by Ctrl-C: with the testbed taken down.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _script("up.sh", env=env)
        yield Testbed(Path(folder))
    finally:
        _script("down.sh", env={**os.environ, "TB_DIR": folder})
        signal.signal(signal.SIGTERM, before)


def until(
    condition: Callable[[], Any], timeout_s: float, every_s: float = 0.2, what: Callable[[], str] = lambda: "no"
) -> Any:
    """Waits for a true value and returns it. Raises AssertionError with `what()` after `timeout_s`."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if value := condition():
            return value
        time.sleep(every_s)
    raise AssertionError(f"did not come true within {timeout_s:g} s: {what()}")


def free_port() -> int:
    """Below the range from which the kernel gives ports to others, who would take it while a server restarts."""
    for port in random.Random(os.getpid() + time.monotonic_ns()).sample(range(20000, 32000), 100):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port from 20000 to 32000")


def _script(name: str, *args: str, env: dict[str, str] | None = None) -> str:
    return _checked([str(HERE / name), *args], env or dict(os.environ), 300)


def _checked(argv: Sequence[str], env: dict[str, str], timeout_s: float, folder: Path | None = None) -> str:
    code, text = _run(argv, env, timeout_s, folder)
    assert code == 0, f"{shlex.join(argv)}: exit code {code}\n{text}"
    return text


def _run(
    argv: Sequence[str], env: dict[str, str], timeout_s: float, folder: Path | None = None
) -> tuple[int, str]:
    # A file, not a pipe: daemons that the command leaves inherit its output, and a pipe ends only with them.
    with tempfile.TemporaryFile("w+") as out:
        done = subprocess.run(
            argv, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            timeout=timeout_s,
        )  # fmt: skip
        out.seek(0)
        return done.returncode, out.read()
