"""One rank: its environment, its files, its output on the way to the head, and that nothing of it stays behind."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from areal_sky.adapters.ports import RankStart
from areal_sky.errors import Unreachable
from areal_sky.run import runner, shipper
from areal_sky.run.runner import RankOrder, RankProcess, Runner, runner_arguments
from areal_sky.run.shipper import parse_metrics


class Head:
    """Takes what runners push, as the gateway would."""

    def __init__(self) -> None:
        self.streams: dict[str, bytes] = {}
        self.metrics: dict[str, float] = {}
        self.told: list[object] = []
        self.silent = False

    def connect(self, url: str, token: str) -> Head:
        assert (url, token) == ("http://head", "node-token")
        return self

    def push_log(self, task_id: str, attempt: int, rank: int, stream: str, offset: int, text: str) -> int:
        if self.silent:
            raise Unreachable("no head")
        have = self.streams.get(stream, b"")
        assert offset <= len(have)
        self.streams[stream] = have[:offset] + text.encode("utf-8", "surrogateescape")
        return len(self.streams[stream])

    def track_metrics(self, task_id: str, metrics: dict[str, float], rank: int | None = None) -> None:
        if self.silent:
            raise Unreachable("no head")
        self.metrics.update(metrics)

    def checkpointed(self, task_id: str) -> None:
        self.told.append("checkpoint")

    def enter_phase(self, task_id: str, phase: str, low: bool) -> None:
        self.told.append((phase, low))


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Head:
    made = Head()
    monkeypatch.setattr("areal_sky.adapters.gateway_client.GatewayClient", made.connect)
    return made


Run = Callable[..., RankProcess]


@pytest.fixture
def run(tmp_path: Path, head: Head) -> Iterator[Run]:
    started: list[RankProcess] = []

    def begin(command: str = "", *, gpus: float = 0, payload: str | None = None, **envs: str) -> RankProcess:
        environ = {
            **os.environ, "AREAL_SKY_NODE_DIR": str(tmp_path), "AREAL_SKY_GATEWAY": "http://head",
            "AREAL_SKY_NODE_TOKEN": "node-token", "RAY_JOB_ID": "01", "RAY_AUTH_TOKEN": "ray-token",
            "CUDA_VISIBLE_DEVICES": "2,3", "AREAL_SKY_RAY_TOKEN": "ray-token",
        }  # fmt: skip
        order = RankOrder("t7", 2, 1, 4, "train", command, payload, gpus, envs)
        process = RankProcess(order, "10.0.0.1", 12345, environ)
        process.start()
        started.append(process)
        return process

    yield begin
    for process in started:
        process.stop(0)
        assert process.done.wait(10)


def finished(process: RankProcess, seconds: float = 15) -> int | None:
    assert process.done.wait(seconds), "it did not end"
    return process.code


def until(condition: Callable[[], Any], seconds: float = 10) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.02)


def test_the_environment_of_a_rank(run: Run, head: Head) -> None:
    assert finished(run("env", gpus=2, MINE="yes")) == 0
    env = dict(line.split("=", 1) for line in head.streams["out"].decode().splitlines() if "=" in line)
    wanted = {
        "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "12345",
        "CUDA_VISIBLE_DEVICES": "2,3", "AREAL_SKY_TASK_ID": "t7", "AREAL_SKY_ATTEMPT": "2", "MINE": "yes",
        "AREAL_SKY_GATEWAY": "http://head", "RAY_AUTH_TOKEN": "ray-token",
    }  # fmt: skip
    assert {k: env.get(k) for k in wanted} == wanted
    assert env["PATH"].startswith(str(Path(sys.executable).parent))
    assert not {"AREAL_SKY_NODE_TOKEN", "AREAL_SKY_RAY_TOKEN", "RAY_JOB_ID"} & set(env)


def test_a_python_apart_from_the_machines_comes_last(
    run: Run, head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = str(Path(sys.executable).parent)
    assert run().environment()["PATH"].startswith(f"{own}{os.pathsep}")
    (tmp_path / "apart").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert run().environment()["PATH"] == os.pathsep.join([os.environ["PATH"], own])


def test_without_gpus_none_is_visible(run: Run, head: Head) -> None:
    finished(run('echo "[$CUDA_VISIBLE_DEVICES]"'))
    assert head.streams["out"] == b"[]\n"


def test_exit_codes_and_both_streams(run: Run, head: Head) -> None:
    assert finished(run("echo to-out; echo to-err >&2; exit 3")) == 3
    assert (head.streams["out"], head.streams["err"]) == (b"to-out\n", b"to-err\n")


def test_a_command_that_does_not_exist(run: Run, head: Head) -> None:
    assert finished(run("no-such-command-at-all")) == 127
    assert b"not found" in head.streams["err"]


def test_it_runs_in_a_fresh_directory_of_its_own(run: Run, head: Head, tmp_path: Path) -> None:
    finished(run("ls -A; pwd; umask"))
    assert head.streams["out"].decode().splitlines()[0] == str(tmp_path / "work" / "t7" / "2.1")


def test_a_callable_runs_and_its_int_is_the_exit_code(run: Run, head: Head) -> None:
    def work() -> int:
        print("from a callable", os.environ["RANK"])
        return 5

    payload = base64.b64encode(cloudpickle.dumps(work)).decode()
    assert finished(run(payload=payload)) == 5
    assert head.streams["out"] == b"from a callable 1\n"


def test_output_arrives_while_it_runs(run: Run, head: Head) -> None:
    process = run("echo early; sleep 30")
    until(lambda: head.streams.get("out") == b"early\n")
    assert not process.done.is_set()


def test_any_bytes_arrive_as_they_were(run: Run, head: Head) -> None:
    finished(run(r"printf 'a\377\303\274\200b'"))
    assert head.streams["out"] == b"a\xff\xc3\xbc\x80b"


def test_output_larger_than_a_chunk_arrives_whole(run: Run, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipper, "CHUNK_BYTES", 1000)
    finished(run("seq 1 3000"))
    assert head.streams["out"] == b"".join(b"%d\n" % i for i in range(1, 3001))


def test_metric_lines_become_metrics(run: Run, head: Head) -> None:
    lines = "echo AREAL_SKY_METRIC reward=0.5 step=3 bad=x; echo no AREAL_SKY_METRIC y=1"
    finished(run(lines + "; printf 'AREAL_SKY_METRIC z=2'; sleep 1"))
    assert head.metrics == {"reward": 0.5, "step": 3.0, "z": 2.0}
    told = parse_metrics("AREAL_SKY_METRIC a=1e-3 b=inf c=nan d=x =4")
    assert (told["a"], told["b"], str(told["c"]), len(told)) == (0.001, math.inf, "nan", 3)


def test_a_rank_tells_of_checkpoints_and_phases(run: Run, head: Head) -> None:
    finished(run("echo AREAL_SKY_CHECKPOINT; echo AREAL_SKY_PHASE eval low; sleep 1; echo AREAL_SKY_PHASE train"))
    assert head.told == ["checkpoint", ("eval", True), ("train", False)]


def test_what_the_head_has_is_given_back_to_the_disk(
    run: Run, head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipper, "KEEP_BYTES", 2**20)
    finished(run("head -c 8000000 /dev/zero; echo end"))
    assert len(head.streams["out"]) == 8_000_004
    file = tmp_path / "logs" / "t7" / "2.1.out"
    assert file.stat().st_size == 8_000_004  # offsets stay
    assert file.read_bytes().endswith(b"end\n")
    assert file.stat().st_blocks * 512 < 4_000_000


def test_a_kill_for_want_of_memory_is_told_from_others(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter((3, 3, 3, 4))
    monkeypatch.setattr(runner, "oom_kills", lambda: next(counts))
    killed, out_of_memory = run("kill -9 $$"), None
    finished(killed)
    out_of_memory = run("kill -9 $$")
    finished(out_of_memory)
    assert (killed.code, killed.trouble) == (-9, "")
    assert (out_of_memory.code, out_of_memory.trouble) == (-9, "the kernel killed it: out of memory")


def test_the_exit_waits_until_the_head_has_the_output(run: Run, head: Head) -> None:
    head.silent = True
    process = run("echo precious; echo AREAL_SKY_METRIC x=1")
    assert not process.done.wait(1.0)
    head.silent = False
    assert finished(process) == 0
    assert head.streams["out"] == b"precious\nAREAL_SKY_METRIC x=1\n"
    assert head.metrics == {"x": 1.0}


def test_a_head_that_never_answers_does_not_hold_the_exit_for_ever(
    run: Run, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LAST_PUSH_S", 0.5)
    head.silent = True
    assert finished(run("echo lost")) == 0


def test_what_runs_on_which_gpu_is_told_to_the_node(run: Run, tmp_path: Path) -> None:
    process = run("sleep 30", gpus=0.5)
    file = tmp_path / "running" / "t7.1.json"
    until(file.exists)
    about = json.loads(file.read_text())
    assert psutil.pid_exists(about.pop("pid"))
    assert about == {"task_id": "t7", "rank": 1, "kind": "train", "gpus": [2, 3], "gpus_frac": 0.5}
    process.stop(0)
    finished(process)
    assert not file.exists()


def test_stop_is_term_first_and_kill_after_the_grace(run: Run, head: Head) -> None:
    polite = run("trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done")
    until(lambda: head.streams.get("out") == b"up\n")
    polite.stop(10)
    assert finished(polite) == 0
    assert head.streams["out"] == b"up\nsaved\n"
    stubborn = run("trap '' TERM; echo stubborn; while :; do sleep 0.05; done")
    until(lambda: b"stubborn" in head.streams["out"])
    stubborn.stop(0.3)
    assert finished(stubborn) == -signal.SIGKILL


def test_nothing_of_the_tree_survives(run: Run, head: Head) -> None:
    """Neither what was put into the background nor what left for a session of its own."""
    process = run("setsid sleep 987 & sleep 986 & setsid sh -c 'sleep 985; true' & sleep 0.2; echo $$")
    assert finished(process) == 0
    until(lambda: not _sleepers())


def _sleepers() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] and p.info["cmdline"][-1] in
            ("987", "986", "985")]  # fmt: skip


def test_the_command_dies_with_its_runner(tmp_path: Path) -> None:
    """kill -9 of the process that holds the runner, as when Ray or the node goes away."""
    code = f"""
import os, time
os.environ["AREAL_SKY_NODE_DIR"] = {str(tmp_path)!r}
from areal_sky.run.runner import RankOrder, RankProcess
p = RankProcess(RankOrder("t8", 1, 0, 1, "eval", "sleep 654 & sleep 653", None, 0, {{}}), "h", 1)
print(p.start(), flush=True)
time.sleep(60)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    pid = int(holder.stdout.readline())
    assert psutil.Process(pid).is_running()
    holder.kill()
    holder.wait()
    until(lambda: not psutil.pid_exists(pid), 5)
    until(lambda: not (tmp_path / "running" / "t8.0.json").exists(), 5)


def test_a_node_whose_disk_refuses_tells_so(tmp_path: Path) -> None:
    (tmp_path / "work").write_text("a file where a folder must be")
    process = RankProcess(
        RankOrder("t9", 1, 0, 1, "train", "true", None, 0, {}), "h", 1, {"AREAL_SKY_NODE_DIR": str(tmp_path)}
    )
    assert process.start() == 0
    assert (process.code, process.done.is_set()) == (None, True)
    assert "cannot start it on this node" in process.trouble


def test_the_actor_answers_while_the_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_SKY_NODE_DIR", str(tmp_path))
    start = RankStart(0, "echo $MASTER_PORT; sleep 30", None, {}, "train")

    async def drive() -> tuple[int | None, str]:
        actor = Runner(*runner_arguments("t3.2", 1, start))
        port = await actor.free_port()
        first = await actor.start("127.0.0.1", port)
        assert await actor.start("127.0.0.1", port) == first  # started once, however often it is told
        exit_ = asyncio.create_task(actor.wait_exit())
        await asyncio.sleep(0.1)
        assert not exit_.done()
        await actor.stop(5)
        return await exit_

    assert asyncio.run(drive()) == (-signal.SIGTERM, "")
    assert (tmp_path / "logs" / "t3" / "2.0.out").exists()


def test_a_stop_that_overtakes_the_start_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_SKY_NODE_DIR", str(tmp_path))

    async def drive() -> tuple[int | None, str]:
        actor = Runner(*runner_arguments("t4.1", 1, RankStart(0, "touch ran; sleep 30", None, {})))
        await actor.stop(5)
        assert await actor.start("127.0.0.1", 1) == (0, [])
        return await actor.wait_exit()

    assert asyncio.run(drive()) == (-signal.SIGTERM, "")
    assert not (tmp_path / "work").exists()
