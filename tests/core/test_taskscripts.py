"""What the bash of generated tasks does, run for real on a home folder with doubles of the programs it starts."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_sky.adapters.catalog import shipped_offers
from areal_sky.core import taskscripts
from areal_sky.core.launch import plan
from areal_sky.core.taskyaml import task_dicts
from areal_sky.spec import load_text

ROOT = Path(__file__).resolve().parents[2]
NOW_S = 1_790_000_000.0
# Lines that look like the end of the here-documents in which a user's text stands.
ESCAPING = "echo started\nAREAL_SKY_RUN\ntouch escaped\nAREAL_SKY_RUN_2\n"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


class Machine:
    """A home folder and a PATH with doubles of `areal-sky` and `python3`, to run generated bash on."""

    def __init__(self, folder: Path):
        self.home = folder / "home"
        self.bin = folder / "bin"
        self.home.mkdir()
        self.bin.mkdir()
        self.env = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(self.home),
            "AREAL_SKY_CLUSTER": "c",
            "AREAL_SKY_REPLICA": "c-g-0",
            "AREAL_SKY_HEAD_IP": "10.0.0.7",
            "AREAL_SKY_RAY_PORT": "6379",
            "AREAL_SKY_GATEWAY_PORT": "8790",
            "AREAL_SKY_NODE_TOKEN": "n",
            "AREAL_SKY_RAY_TOKEN": "r",
            "AREAL_SKY_TOKENS": "{}",
            "AREAL_SKY_PACKAGE": "",
            "SKYPILOT_NODE_RANK": "1",
        }

    def has(self, program: str, script: str) -> Machine:
        path = self.bin / program
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
        return self

    def bash(self, script: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", script], env={**self.env, **env}, cwd=self.home, capture_output=True, text=True, timeout=30
        )

    def lines(self, name: str) -> list[str]:
        return (self.home / name).read_text().splitlines()


def taken_port() -> socket.socket:
    """A listening socket outside the range that Ray keeps for its workers."""
    low, high = taskscripts.RAY_WORKER_PORTS
    while True:
        server = socket.create_server(("127.0.0.1", 0))
        if not low <= server.getsockname()[1] <= high:
            return server
        server.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_areals_own_ray_cluster_task_trains_in_the_clusters_ray(machine: Machine, rank: int) -> None:
    """The example's `ray start` loops on both ranks come to their end, and the driver is told where the Ray is."""
    text = (ROOT / "examples" / "05-areal-ray-cluster.yaml").read_text()
    task, spec = yaml.safe_load(text), load_text(text, "x.yaml", NOW_S)
    tasks = task_dicts(spec, plan(spec, shipped_offers()))
    (machine.home / "AReaL").mkdir()
    machine.has("ray", 'echo "ray $1" >> $HOME/calls; printf " 1 node_a\\n 1 node_b\\n"')
    machine.has("python3", 'echo "$RAY_ADDRESS $PWD $*" >> $HOME/calls').has("areal-sky", f"{JOIN}; sleep 2")
    sky = {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "10.0.0.8\n10.0.0.9", "SKYPILOT_NUM_NODES": "2"}
    done = machine.bash(tasks["main"]["run"],
                        **sky, **task["envs"], SKYPILOT_NUM_GPUS_PER_NODE="8")  # fmt: skip
    assert done.returncode == 0 and "own run ended with code 0; the node stays" in done.stderr
    if rank:
        assert "left out: ray start --address 10.0.0.8:6379" in done.stderr and not (machine.home / "calls").exists()
        return
    assert "left out: ray start --head --port 6379" in done.stderr
    status, train = machine.lines("calls")
    assert status == "ray status" and train.startswith(f"10.0.0.7:6379 {machine.home}/AReaL examples/math/gsm8k_rl.py")
    assert "scheduler.type=ray" in train and "cluster.n_nodes=2 cluster.n_gpus_per_node=8" in train


JOIN = 'touch "$AREAL_SKY_STATE_DIR/joined"'


def test_a_node_is_started_again_until_its_planned_end(machine: Machine) -> None:
    machine.has("areal-sky", 'echo "$1 $RAY_AUTH_MODE" >> $HOME/starts; [ $(wc -l < $HOME/starts) -ge 3 ]')
    done = machine.bash(taskscripts.node_run(None))
    assert done.returncode == 0
    assert machine.lines("starts") == ["node token"] * 3
    assert done.stderr.count("starting it again") == 2


@pytest.mark.parametrize("code", [2, 78])
def test_what_can_never_work_is_not_tried_again(machine: Machine, code: int) -> None:
    machine.has("areal-sky", f"echo x >> $HOME/starts; exit {code}")
    assert machine.bash(taskscripts.node_run("sleep 60")).returncode == code
    assert machine.lines("starts") == ["x"]


def test_a_user_run_waits_for_the_join_and_its_failure_does_not_end_the_node(machine: Machine) -> None:
    machine.has("areal-sky", f"sleep 0.3; echo joined >> $HOME/order; {JOIN}; sleep 1.5; echo end >> $HOME/order")
    user = 'echo "run $SKYPILOT_NODE_RANK $RAY_ADDRESS ${AREAL_SKY_NODE_TOKEN:-none}" >> $HOME/order; exit 3\n'
    done = machine.bash(taskscripts.node_run(user))
    assert done.returncode == 0
    assert machine.lines("order") == ["joined", "run 1 10.0.0.7:6379 none", "end"]
    assert "ended with code 3; the node stays" in done.stderr


def test_a_user_run_ends_with_its_node(machine: Machine) -> None:
    machine.has("areal-sky", f"{JOIN}; sleep 1.5")
    user = "sleep 300 & echo $! > $HOME/pid\nsleep 300\n"
    assert machine.bash(taskscripts.node_run(user)).returncode == 0
    pid = int(machine.lines("pid")[0])
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split(")")[1].split()[0] == "Z"


def test_a_run_cannot_leave_its_here_document(machine: Machine) -> None:
    """Lines that look like the end mark stay text: nothing of the run starts before the node has joined."""
    machine.has("areal-sky", "sleep 0.2")
    run = ESCAPING
    assert machine.bash(taskscripts.node_run(run)).returncode == 0
    assert not (machine.home / "escaped").exists()
    machine.has("areal-sky", f"{JOIN}; sleep 1.5")
    assert "started" in machine.bash(taskscripts.node_run(run)).stdout
    assert (machine.home / "escaped").exists()


def test_a_run_that_is_not_bash_does_not_break_the_node(machine: Machine) -> None:
    machine.has("areal-sky", f"{JOIN}; sleep 1.5; echo end > $HOME/end")
    done = machine.bash(taskscripts.node_run("if then ) ' oops"))
    assert done.returncode == 0 and machine.lines("end") == ["end"]


@pytest.mark.parametrize("name", ["AREAL_SKY_HEAD_IP", "AREAL_SKY_NODE_TOKEN", "AREAL_SKY_RAY_TOKEN"])
@pytest.mark.parametrize("part", [taskscripts.node_setup, taskscripts.node_run])
def test_a_missing_value_is_named_at_once(machine: Machine, name: str, part: Any) -> None:
    machine.has("areal-sky", "echo x > $HOME/started")
    done = machine.bash(part(None), **{name: ""})
    assert done.returncode == 78 and f"{name} is not set" in done.stderr
    assert not (machine.home / "started").exists()


@pytest.mark.parametrize("variable", ["AREAL_SKY_RAY_PORT", "AREAL_SKY_GATEWAY_PORT"])
def test_a_head_says_which_port_is_taken(machine: Machine, variable: str) -> None:
    machine.has("areal-sky", "echo x > $HOME/started")
    with taken_port() as server:
        port = server.getsockname()[1]
        ports = {"AREAL_SKY_RAY_PORT": "9", "AREAL_SKY_GATEWAY_PORT": "9"} | {variable: str(port)}
        done = machine.bash(taskscripts.head_run(), **ports)
    assert done.returncode == 78 and f"port {port} is in use" in done.stderr
    assert not (machine.home / "started").exists()


def test_a_head_keeps_out_of_rays_own_ports(machine: Machine) -> None:
    done = machine.bash(taskscripts.head_run(), AREAL_SKY_RAY_PORT="10002")
    assert done.returncode == 78 and "worker range" in done.stderr


def test_a_head_that_comes_back_finds_its_own_ray_on_the_port(machine: Machine) -> None:
    machine.has("areal-sky", "echo ok > $HOME/started")
    state = machine.home / ".areal_sky" / "head" / "c"
    state.mkdir(parents=True)
    (state / "ray.json").write_text("{}")
    with taken_port() as server:
        port = str(server.getsockname()[1])
        done = machine.bash(taskscripts.head_run(), AREAL_SKY_RAY_PORT=port, SKYPILOT_NODE_IPS="10.1.2.3\n10.1.2.4")
    assert done.returncode == 0 and machine.lines("started") == ["ok"]
    assert "AREAL_SKY_HEAD_IP=10.1.2.3\n" in done.stdout


def test_a_failing_user_setup_is_the_failure_of_the_setup(machine: Machine) -> None:
    done = machine.bash(taskscripts.node_setup("echo mine > mine\nfalse\nexit 7"))
    assert done.returncode == 7 and "setup ended with code 7" in done.stderr
    assert machine.lines("mine") == ["mine"] and not (machine.home / ".areal_sky").exists()


USER_RAY = """
ray start --head --port=6379; ray status --plain; ray stop --force
bash -c 'ray start --address 10.0.0.9:6379'
echo "$RAY_ADDRESS|${RAY_AUTH_MODE:-}|$(python)" >> $HOME/seen
"""


def test_a_users_own_ray_start_and_stop_leave_the_clusters_ray_alone(machine: Machine) -> None:
    """The machine is in a Ray already: the user's `ray start` adds nothing to it and `ray stop` would end it."""
    machine.has("areal-sky", f"{JOIN}; sleep 1.5").has("ray", 'echo "$@" >> $HOME/ray').has("python", "echo ours")
    done = machine.bash(taskscripts.node_run(USER_RAY))
    assert machine.lines("ray") == ["status --plain"]
    assert machine.lines("seen") == ["10.0.0.7:6379|token|ours"]
    assert done.stderr.count("left out: ray st") == 3


@pytest.mark.parametrize("why", ["asked", "apart"])
def test_a_ray_of_the_users_own_is_let_be_but_never_stops_ours(machine: Machine, why: str) -> None:
    machine.has("areal-sky", f"{JOIN}; sleep 1.5").has("ray", 'echo "$@" >> $HOME/ray').has("python", "true")
    if why == "apart":
        (machine.bin.parent / "apart").touch()
    done = machine.bash(taskscripts.node_run(USER_RAY), **({"AREAL_SKY_OWN_RAY": "1"} if why == "asked" else {}))
    assert machine.lines("ray") == ["start --head --port=6379", "status --plain", "start --address 10.0.0.9:6379"]
    assert machine.lines("seen") == ["||"]
    assert done.stderr.count("left out: ray stop --force") == 1
