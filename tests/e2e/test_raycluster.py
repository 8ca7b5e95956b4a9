"""Gangs on real Ray: one head and pretend nodes of this machine, the task service, the HTTP gateway."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_sky.core.model import Bundle, NodeShape
from areal_sky.core.nodeenv import GroupShape, HeadEnv
from areal_sky.core.taskmodel import TaskSpec

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

SHAPE = NodeShape(gpus=4, cpus=8, memory_gib=4)
TOKENS = {right: secrets.token_hex(16) for right in ("read", "submit", "operate", "node", "ray")}
RAY = str(Path(sys.executable).with_name("ray"))


class SystemClock:
    def now(self) -> float:
        return time.time()


class PretendCluster:
    """A Ray head and nodes as processes, each ended by the pids that it recorded."""

    def __init__(self, folder: Path, ray_port: int, gateway_port: int):
        self.folder = folder
        self.address = f"127.0.0.1:{ray_port}"
        self.gateway_port = gateway_port
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.mark = secrets.token_hex(4)
        self._start("head", "--head", f"--port={ray_port}", "--num-cpus=0", "--num-gpus=0", "--include-dashboard=false",
                    group="head")  # fmt: skip
        until(lambda: _answers(ray_port), 30)

    def add_node(self, name: str) -> None:
        self._start(
            name, f"--address={self.address}", f"--num-cpus={SHAPE.cpus:.0f}", f"--num-gpus={SHAPE.gpus:.0f}",
            f"--memory={int(SHAPE.memory_gib * 2**30)}", group="w",
        )  # fmt: skip

    def kill(self, name: str) -> None:
        """The power goes off: every process of the node, told apart by its mark, at once."""
        mark = f"{self.mark}/{name}"
        for p in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if p.environ().get("AREAL_SKY_NODE") == mark:
                    p.kill()
        self.processes.pop(name).wait(10)

    def end(self) -> None:
        for name in list(self.processes):
            self.kill(name)

    def node_dir(self, name: str) -> Path:
        return self.folder / "nodes" / name

    def ray_tmp(self, name: str) -> Path:
        return self.folder / "r" / name

    def _start(self, name: str, *arguments: str, group: str) -> None:
        self.node_dir(name).mkdir(parents=True)
        env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKENS["ray"], "RAY_memory_monitor_refresh_ms": "0",
            "RAY_health_check_initial_delay_ms": "2000", "RAY_health_check_period_ms": "500",
            "RAY_health_check_timeout_ms": "1000", "RAY_health_check_failure_threshold": "2",
            "RAY_prestart_worker_first_driver": "0",
            "AREAL_SKY_NODE": f"{self.mark}/{name}", "AREAL_SKY_NODE_DIR": str(self.node_dir(name)),
            "AREAL_SKY_GATEWAY": f"http://127.0.0.1:{self.gateway_port}", "AREAL_SKY_NODE_TOKEN": TOKENS["node"],
        }  # fmt: skip
        labels = f"areal-sky/cluster=c,areal-sky/group={group},areal-sky/replica=c-{name},areal-sky/index=0"
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                # A temporary folder each: raylets of one host that share it may take the same socket.
                [RAY, "start", *arguments, "--node-ip-address=127.0.0.1", f"--labels={labels}", "--block",
                 f"--temp-dir={self.ray_tmp(name)}", "--object-store-memory=80000000", "--disable-usage-stats"],
                env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip


class Service:
    """The head's service in a process of its own, so that it can be killed like one."""

    def __init__(self, cluster: PretendCluster, state_dir: Path):
        self.cluster, self.state_dir = cluster, state_dir
        self.start()

    def start(self) -> None:
        config = json.dumps(
            [self.cluster.address, self.cluster.gateway_port, str(self.state_dir), TOKENS,
             str(self.cluster.ray_tmp("head"))]
        )  # fmt: skip
        self.process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, start_new_session=True)
        assert self.process.stdin is not None
        self.process.stdin.write(config.encode())
        self.process.stdin.close()
        until(lambda: _answers(self.cluster.gateway_port), 30)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def sees(self) -> int:
        """Live nodes, 0 before the first look."""
        from areal_sky.errors import Unreachable

        try:
            return len(self.client().view().nodes)
        except Unreachable:
            return 0

    def client(self, right: str = "operate") -> Any:
        from areal_sky.adapters.gateway_client import GatewayClient

        return GatewayClient(f"http://127.0.0.1:{self.cluster.gateway_port}", TOKENS[right])


def serve() -> None:
    """What `areal-sky head` does, without starting Ray."""
    import uvicorn

    from areal_sky.adapters.raycluster import RayClusterAdapter
    from areal_sky.run.journal import Journal
    from areal_sky.run.runner import Runner, runner_arguments
    from areal_sky.run.tasks import TaskService
    from areal_sky.ui.gateway import create_app

    address, port, state_dir, tokens, ray_tmp = json.load(sys.stdin)
    env = HeadEnv("c", "c-head-0", state_dir, groups=(GroupShape("w", SHAPE, 1, 1, 3),))
    ray = RayClusterAdapter(address, tokens["ray"], Runner, runner_arguments, Path(ray_tmp))
    service = TaskService(ray, Journal(Path(state_dir) / "journal.db"), SystemClock(), env, grace_s=2.0,
                          min_runtime_s=0.0)  # fmt: skip
    app = create_app(service, None, tokens, "c")
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", ws="none"))
    threading.Thread(target=server.run, daemon=True).start()
    while True:
        service.tick(time.time())
        time.sleep(0.1)


def until(condition: Callable[[], Any], seconds: float = 20) -> Any:
    end_s = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.05)
    return found


def _answers(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def two_nodes(free_port: Callable[[], int]) -> Iterator[PretendCluster]:
    """A head and two nodes, ended with all they have started."""
    # Ray's unix sockets lie below it and may have 107 characters: tmp_path would be too long.
    folder = Path(tempfile.mkdtemp(prefix="as-e2e-", dir="/tmp"))
    made = PretendCluster(folder, free_port(), free_port())
    try:
        made.add_node("w-0")
        made.add_node("w-1")
        yield made
    finally:
        made.end()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def served(cluster: PretendCluster) -> Iterator[Service]:
    """Its task service, once that sees all three nodes."""
    made = Service(cluster, cluster.folder / "state")
    try:
        until(lambda: made.sees() == 3, 60)
        yield made
    finally:
        made.kill()


@pytest.fixture(scope="module")
def cluster(free_port: Callable[[], int]) -> Iterator[PretendCluster]:
    with two_nodes(free_port) as made:
        yield made


@pytest.fixture(scope="module")
def service(cluster: PretendCluster) -> Iterator[Service]:
    with served(cluster) as made:
        yield made


def submit(service: Service, command: str, bundles: int = 1, gpus: float = 1, **more: Any) -> str:
    kind = more.pop("kind", "train")
    spec = TaskSpec(kind, command=command, bundles=bundles, bundle=Bundle(gpus, 1, 0.25), **more)
    return service.client("submit").submit(spec)["task_id"]


def wait_state(service: Service, task_id: str, *states: str, seconds: float = 30) -> dict[str, Any]:
    def look() -> Any:
        task = service.client().task(task_id)
        return task if task["state"] in states else None

    return until(look, seconds)


def text(service: Service, task_id: str, rank: int = 0, stream: str = "out") -> str:
    return service.client().logs(task_id, rank=rank, stream=stream)["text"]


def test_a_gang_runs_on_two_nodes_with_its_environment(service: Service) -> None:
    command = 'echo "$RANK/$WORLD_SIZE cuda=$CUDA_VISIBLE_DEVICES master=$MASTER_ADDR:$MASTER_PORT"; echo hm >&2'
    task_id = submit(service, f"{command}; echo AREAL_SKY_METRIC reward=0.5", bundles=2, gpus=4)
    task = wait_state(service, task_id, "SUCCEEDED", "FAILED")
    assert (task["state"], task["exit_codes"]) == ("SUCCEEDED", {"0": 0, "1": 0})
    assert {p["replica"] for p in task["places"]} == {"c-w-0", "c-w-1"}
    lines = [text(service, task_id, rank).splitlines()[0] for rank in (0, 1)]
    masters = {line.split("master=")[1] for line in lines}
    assert len(masters) == 1
    port = int(masters.pop().rpartition(":")[2])
    assert 0 < port < 65536
    assert [line.split(" master")[0] for line in lines] == ["0/2 cuda=0,1,2,3", "1/2 cuda=0,1,2,3"]
    assert text(service, task_id, 1, "err") == "hm\n"
    assert task["metrics"] == {"reward": 0.5}


def test_ranks_on_one_node_get_devices_of_their_own(service: Service) -> None:
    task_id = submit(service, 'echo "$CUDA_VISIBLE_DEVICES"', bundles=2, gpus=2)
    task = wait_state(service, task_id, "SUCCEEDED")
    assert len({p["node_id"] for p in task["places"]}) == 1
    devices = [set(text(service, task_id, rank).strip().split(",")) for rank in (0, 1)]
    assert len(devices[0]) == len(devices[1]) == 2
    assert not devices[0] & devices[1]


def test_a_command_that_does_not_exist(service: Service) -> None:
    task = wait_state(service, submit(service, "no-such-program --x"), "FAILED")
    assert task["exit_codes"] == {"0": 127}
    assert "command not found" in task["reason"]
    assert "no-such-program" in task["reason"]


def test_cancel_kills_the_process(service: Service, cluster: PretendCluster) -> None:
    task_id = submit(service, "sleep 543 & echo $!; wait")
    pid = int(until(lambda: text(service, task_id)))
    assert psutil.pid_exists(pid)
    service.client("submit").cancel(task_id)
    wait_state(service, task_id, "CANCELLED")
    until(lambda: not psutil.pid_exists(pid), 5)
    assert not list(cluster.folder.glob("nodes/*/running/*.json"))


def test_a_callable_runs(service: Service) -> None:
    from areal_sky.task import Task

    def work() -> int:
        import os

        print("rank", os.environ["RANK"])
        return 0

    spec = Task(kind="eval", entrypoint=work).spec()
    task_id = service.client("submit").submit(spec)["task_id"]
    wait_state(service, task_id, "SUCCEEDED")
    assert text(service, task_id) == "rank 0\n"


def test_a_task_can_report_and_submit_by_itself(service: Service) -> None:
    code = (
        "from areal_sky.task import Task, TaskScheduler, track_runtime_metrics; import os; "
        "assert track_runtime_metrics(os.environ['AREAL_SKY_TASK_ID'], {'step': 7}); "
        "print(TaskScheduler().schedule_task(Task('true', kind='eval', name='child'), priority=9))"
    )
    task_id = submit(service, f'python -c "{code}"', gpus=0)
    task = wait_state(service, task_id, "SUCCEEDED", "FAILED")
    assert task["state"] == "SUCCEEDED", text(service, task_id, stream="err")
    assert task["metrics"] == {"step": 7.0}
    assert text(service, task_id) == "SCHEDULED\n"
    child = next(t for t in service.client().tasks() if t["name"] == "child")
    assert wait_state(service, child["task_id"], "SUCCEEDED")["priority"] == 9


def test_an_elastic_gang_gives_ranks_to_a_heavier_task(service: Service) -> None:
    elastic = submit(service, "echo up; sleep 300", bundles=8, min_bundles=2, kind="rollout", priority=1.0)
    wait_state(service, elastic, "RUNNING", seconds=60)
    heavy = submit(service, "echo $CUDA_VISIBLE_DEVICES", bundles=2, gpus=2, priority=9.0)
    assert wait_state(service, heavy, "SUCCEEDED", "FAILED", seconds=60)["state"] == "SUCCEEDED"
    smaller = service.client().task(elastic)
    assert (smaller["state"], len(smaller["gone_ranks"]), smaller["attempt"]) == ("RUNNING", 4, 1)
    service.client("submit").cancel(elastic)
    wait_state(service, elastic, "CANCELLED")
    until(lambda: sum(n.free_gpus for n in service.client().view().nodes) == 8)


def test_idle_gpus_are_lent_and_given_back(service: Service) -> None:
    command = "echo $CUDA_VISIBLE_DEVICES; echo AREAL_SKY_PHASE eval low; sleep 300"
    train = submit(service, command, bundles=2, gpus=4)
    until(lambda: service.client().task(train)["phase_low"], 60)
    guest = submit(service, "echo $CUDA_VISIBLE_DEVICES; sleep 300", gpus=2, kind="eval")
    devices = until(lambda: text(service, guest), 60).strip().split(",")
    assert len(devices) == 2 and set(devices) <= {"0", "1", "2", "3"}
    assert service.client().task(train)["borrowers"] == [guest]
    service.client("submit").enter_phase(train, "train", False)
    assert wait_state(service, guest, "QUEUED")["preempted"] == 1
    assert service.client().task(train)["state"] == "RUNNING"
    for task_id in (guest, train):
        service.client("submit").cancel(task_id)
        wait_state(service, task_id, "CANCELLED")
    until(lambda: sum(n.free_gpus for n in service.client().view().nodes) == 8)


def test_a_task_out_of_memory_asks_for_more(service: Service) -> None:
    command = "echo 'torch.OutOfMemoryError: CUDA out of memory.' >&2; [ $AREAL_SKY_ATTEMPT = 2 ] || exit 1"
    task_id = submit(service, command, gpus=0.5, max_retries=1, backoff_s=0.5)
    task = wait_state(service, task_id, "SUCCEEDED", "FAILED", seconds=60)
    assert (task["state"], task["attempt"], task["bundle"]["gpus"]) == ("SUCCEEDED", 2, 1.0)


def test_kill_9_of_the_service_harms_no_task(service: Service) -> None:
    running = submit(service, "echo $$; sleep 12; echo survived", gpus=4)
    pid = int(until(lambda: text(service, running)))
    ends_meanwhile = submit(service, "sleep 4; exit 5", gpus=1)
    wait_state(service, ends_meanwhile, "RUNNING")
    waiting = submit(service, "echo later", bundles=2, gpus=4)
    service.kill()
    assert psutil.pid_exists(pid)
    time.sleep(1.5)
    service.start()
    assert wait_state(service, running, "RUNNING", "SUCCEEDED")["attempt"] == 1
    assert wait_state(service, ends_meanwhile, "FAILED")["exit_codes"] == {"0": 5}
    assert wait_state(service, running, "SUCCEEDED")["attempt"] == 1
    assert text(service, running) == f"{pid}\nsurvived\n"
    assert wait_state(service, waiting, "SUCCEEDED")["attempt"] == 1


def test_a_dead_node_costs_a_task_nothing_but_time(service: Service, cluster: PretendCluster) -> None:
    gang = submit(service, "echo up $AREAL_SKY_ATTEMPT; [ $AREAL_SKY_ATTEMPT = 2 ] || sleep 300", bundles=2, gpus=4)
    until(lambda: text(service, gang, 0) and text(service, gang, 1))
    later = submit(service, "true", bundles=2, gpus=4)
    victim = wait_state(service, gang, "RUNNING")["places"][1]["replica"].removeprefix("c-")
    cluster.kill(victim)
    task = wait_state(service, gang, "QUEUED")
    assert (task["retries"], task["attempt"]) == (0, 1)
    view = until(lambda: (v := service.client().view()).waiting_tasks == 2 and v)
    assert [d.task_id for d in view.demand] == [gang, later]  # its old place
    cluster.add_node("w-2")
    task = wait_state(service, gang, "SUCCEEDED", "FAILED", seconds=40)
    assert (task["state"], task["attempt"], task["retries"]) == ("SUCCEEDED", 2, 0)
    assert "c-w-2" in {p["replica"] for p in task["places"]}
    story = "\n".join(line["text"] for line in service.client().story(gang))
    assert f"node c-{victim}/0 died" in story
    wait_state(service, later, "SUCCEEDED")


def test_evict_moves_a_task_and_a_drained_node_takes_nothing(service: Service) -> None:
    task_id = submit(service, 'trap "exit 0" TERM; echo up; while :; do sleep 0.1; done', gpus=4)
    until(lambda: text(service, task_id))
    first = wait_state(service, task_id, "RUNNING")["places"][0]["replica"]
    assert service.client().evict(first, "reclaimed") == {"nodes": 1}
    moved = until(lambda: (t := service.client().task(task_id))["attempt"] == 2 and t["state"] == "RUNNING" and t)
    assert moved["places"][0]["replica"] != first
    service.client("submit").cancel(task_id)
    wait_state(service, task_id, "CANCELLED")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    serve()
