"""`submit`, `queue`, `cancel`, `logs` against a gateway that is really served."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml
from click.testing import CliRunner, Result

from areal_sky.adapters.fake_ray import FakeRayCluster
from areal_sky.adapters.fakes import FakeClock
from areal_sky.adapters.gateway_client import GatewayClient
from areal_sky.core.model import NodeShape
from areal_sky.core.nodeenv import GroupShape, HeadEnv
from areal_sky.errors import ArealSkyError, InvalidInput, NotFound, Refused, SpecError
from areal_sky.run.journal import Journal
from areal_sky.run.tasks import TaskService
from areal_sky.task import (
    Task,
    TaskHandle,
    TaskScheduler,
    TaskStatus,
    checkpointed,
    low_phase,
    track_runtime_metrics,
)
from areal_sky.ui.cli.main import cli
from areal_sky.ui.gateway import create_app

SHAPE = NodeShape(4, 16, 64, "H100")
TOKENS = {right: f"{right}-" * 4 for right in ("read", "submit", "operate", "node")}


class Head:
    """What choose_cluster would find."""

    def __init__(self, folder: Path, port: int):
        self.ray = FakeRayCluster()
        self.ray.add_node("w", "c-w-0", SHAPE)
        self.clock = FakeClock()
        env = HeadEnv(
            "c", "c-head-0", str(folder), groups=(GroupShape("w", SHAPE, 1, 1, 2),), weights=(("moe", 1.5),),
            models=(("qwen3-30b-a3b", "moe"),),
        )  # fmt: skip
        self.service = TaskService(self.ray.connection(), Journal(folder / "journal.db"), self.clock, env)
        self.url = f"http://127.0.0.1:{port}"
        app = create_app(self.service, None, TOKENS, "c")
        self.server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", ws="none"))
        threading.Thread(target=self.server.run, daemon=True).start()
        while not self.server.started:
            time.sleep(0.01)
        self.tick()

    def gateway(self, right: str = "read") -> GatewayClient:
        return GatewayClient(self.url, TOKENS[right])

    def tick(self) -> None:
        self.service.tick(self.clock.advance(1.0))

    def run(self, *words: str) -> Result:
        """As main() does it: our own errors are left to it."""
        return CliRunner().invoke(cli, words)


@pytest.fixture
def head(tmp_path: Path, free_port: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    made = Head(tmp_path, free_port())
    monkeypatch.setattr("areal_sky.home.choose_cluster", lambda name: made)
    yield made
    made.server.should_exit = True


def failure(result: Result) -> ArealSkyError:
    assert isinstance(result.exception, ArealSkyError), result.output
    return result.exception


def test_words_after_the_options_are_the_command(head: Head) -> None:
    options = ("--gpus", "2", "--bundles", "2", "--env", "A=b c")
    result = head.run("submit", *options, "--", "python", "a b.py", "--lr", "1")
    assert result.output == "t1 scheduled\n"
    task = head.service.get("t1")
    assert (task["command"], task["bundles"], task["bundle"]["gpus"]) == ("python 'a b.py' --lr 1", 2, 2.0)
    assert head.service._tasks.get("t1").spec.envs == {"A": "b c"}
    head.run("submit", "--cpus", "0.5", "python", "b.py", "--gpus", "9")  # no `--` needed
    assert head.service.get("t2")["command"] == "python b.py --gpus 9"
    head.run("submit", "echo hi | wc")
    assert head.service.get("t3")["command"] == "echo hi | wc"


def test_a_file_gives_the_fields_and_options_win(head: Head, tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(
        "run: |\n  python train.py\nkind: rollout\ngpus: 1\nmemory: 2GiB\npriority: 7\nenvs: {LR: 0.1}\n"
        "accelerators: H100\nmodel: qwen3-30b-a3b\n"
    )
    assert json.loads(head.run("submit", "--priority", "9", "--json", str(file)).output)["status"] == "SCHEDULED"
    spec = head.service._tasks.get("t1").spec
    assert (spec.kind, spec.priority, spec.envs) == ("rollout", 9.0, {"LR": "0.1"})
    assert (spec.bundle.memory_gib, spec.accelerators) == (2.0, ("H100",))
    assert head.service.get("t1")["weight"] == 1.5


def test_a_file_of_several_tasks_is_queued_at_once_and_in_order(head: Head, tmp_path: Path) -> None:
    file = tmp_path / "tasks.yaml"
    file.write_text(
        "tasks:\n  - {run: train, name: train, after: prep, timeout: 2h, labels: {run: a}}\n"
        "  - {run: prep, name: prep, array: 3, gpus: 4, labels: {run: a}}\n"
    )
    told = head.run("submit", str(file)).output.splitlines()
    assert told[0].startswith("t1 queued: it comes after t2..t4 (prep), 3 of them left")
    assert told[1] == "t2..t4 scheduled"
    lines = head.run("queue", "--label", "run=a").output.splitlines()
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["t2", "prep[0]"], ["t3", "prep[1]"], ["t4", "prep[2]"], ["t1", "train"]
    ]  # fmt: skip
    assert head.run("queue", "--label", "run=b").output == "no such task\n"
    assert head.run("queue", "--state", "succeeded").output == "no such task\n"
    assert "these are several" in str(failure(head.run("submit", "--follow", str(file))))
    circle = "tasks:\n  - {run: a, name: a, after: b}\n  - {run: b, name: b, after: a}\n  - {run: c, after: x}\n"
    file.write_text(circle)
    told = str(failure(head.run("submit", str(file))))
    assert "task 3: after: there is no task 'x'" in told
    assert "after: a waits for b waits for a: a circle, none of them could ever start" in told


def test_the_example_of_several_tasks_is_queued_as_it_says(head: Head) -> None:
    file = Path(__file__).parents[2] / "examples" / "06-tasks.yaml"
    told = head.run("submit", str(file)).output
    assert told.splitlines()[0] == "t1 scheduled"
    assert "t2..t5 queued: it comes after t1 (prepare)" in told
    assert "t6 queued: it comes after t2..t5 (sweep), 4 of them left" in " ".join(told.split())
    head.tick()
    head.tick()
    head.ray.finish("t1.1", 0)
    for _ in range(3):
        head.tick()
    assert [t["state"] for t in head.service.list(labels={"experiment": "seeds"})] == ["RUNNING"] * 4


def test_a_late_deadline_is_warned_of_or_refused(head: Head) -> None:
    head.clock.advance(time.time() - head.clock.now())
    result = CliRunner(mix_stderr=False).invoke(cli, ["submit", "--deadline", "1s", "--estimate", "2h", "x"])
    assert result.stdout == "t1 scheduled\n"
    assert result.stderr.startswith("warning: it")
    late = failure(head.run("submit", "--deadline", "1s", "--estimate", "2h", "--if-late", "refuse", "x"))
    assert isinstance(late, Refused)


def test_a_skypilot_task_is_submitted_without_its_machines(head: Head) -> None:
    file = Path(__file__).parents[2] / "task_yamls" / "areal_grpo.yaml"
    words = ["submit", "--kind", "driver", "--env", "TRIAL=t9", str(file)]
    told = CliRunner(mix_stderr=False).invoke(cli, words).stderr
    assert "left out, since the cluster's machines are up: resources, num_nodes, secrets" in told
    spec = head.service._tasks.get("t1").spec
    task = yaml.safe_load(file.read_text())
    assert (spec.kind, spec.name, spec.command) == ("driver", "areal-grpo", task["run"])
    assert spec.envs == {**task["envs"], "TRIAL": "t9"}
    assert "options go before" in str(failure(head.run("submit", str(file), "--kind", "driver")))


def test_mistakes_are_told_all_at_once(head: Head, tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text("runn: x\nbundels: 2\n")
    told = str(failure(head.run("submit", str(file))))
    assert f"{file}:1:1: unknown key `runn` at the top, did you mean `run`?" in told
    assert f"{file}:2:1: unknown key `bundels` at the top, did you mean `bundles`?" in told
    assert "the task has no `run`" in told
    file.write_text("run: [")
    assert isinstance(failure(head.run("submit", str(file))), SpecError)
    assert "no-such.yaml" in str(failure(head.run("submit", "no-such.yaml")))
    told = str(failure(head.run("submit", "--gpus", "1.5", "--bundles", "0", "--priority", "200", "x")))
    assert len(told.splitlines()) == 3
    assert "expected K=V" in str(failure(head.run("submit", "--env", "A", "x")))
    assert failure(head.run("submit", "--memory", "lots", "x")).exit_code == 2


def test_a_gang_that_can_never_fit_ends_with_3(head: Head) -> None:
    error = failure(head.run("submit", "--gpus", "4", "--bundles", "3", "x"))
    assert isinstance(error, Refused)
    assert error.exit_code == 3


def test_the_queue_fits_80_columns_and_is_in_order(head: Head) -> None:
    assert "no tasks" in head.run("queue").output
    head.run("submit", "--gpus", "4", "--name", "the-first-of-all-tasks", "x")
    head.run("submit", "--gpus", "4", "x")
    head.run("submit", "--gpus", "4", "--model", "qwen3-30b-a3b", "--kind", "rollout", "x")
    head.tick()
    lines = head.run("queue").output.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[:4]] == ["ID", "t1", "t3", "t2"]
    assert lines[4].startswith("t3: group w: 0 of 1 fit now (4 GPUs, 1 CPU each; free on 1 node")
    assert "5x1.5" in lines[2]
    told = head.run("queue", "--explain").output
    assert "t3: score 7.50 = priority 5 x weight 1.5 x rollout 1 + 0.00 for 0 min waited" in " ".join(told.split())
    assert "waits because group w: 0 of 1 fit now" in " ".join(told.split())
    assert "c-w-0/0" in lines[1]
    assert lines[-1] == "1 running, 2 waiting"
    assert [t["task_id"] for t in json.loads(head.run("queue", "--json").output)["tasks"]] == ["t1", "t3", "t2"]


def test_only_the_latest_ended_are_shown(head: Head) -> None:
    for i in range(8):
        head.run("submit", "x")
        head.service.cancel(f"t{i + 1}")
    assert "3 more that ended (--all)" in head.run("queue").output
    assert len(head.run("queue", "--all").output.splitlines()) == 10  # header, 8, summary


def test_cancel_says_what_came_of_it(head: Head) -> None:
    head.run("submit", "--gpus", "4", "x")
    head.run("submit", "--gpus", "4", "x")
    head.tick()
    result = head.run("cancel", "t1", "t2", "t77")
    assert result.output == "t1 is being ended\nt2 cancelled\n"
    assert isinstance(failure(result), NotFound)


def test_logs_print_both_streams_to_their_places(head: Head) -> None:
    head.run("submit", "x")
    head.tick()
    head.service.push_log("t1", 1, 0, "out", 0, b"hello\n" * 100_000)
    head.service.push_log("t1", 1, 0, "err", 0, b"oh\n")
    result = CliRunner(mix_stderr=False).invoke(cli, ["logs", "t1"])
    assert (result.stdout, result.stderr) == ("hello\n" * 100_000, "oh\n")
    result = CliRunner(mix_stderr=False).invoke(cli, ["logs", "t1", "--stderr"])
    assert (result.stdout, result.stderr) == ("oh\n", "")


def test_follow_goes_over_attempts_to_the_end(head: Head) -> None:
    def work() -> None:
        while head.service._tasks.get("t1") is None:
            time.sleep(0.01)
        head.tick()
        head.service.push_log("t1", 1, 0, "out", 0, b"one\n")
        time.sleep(0.5)
        head.ray.finish("t1.1", 0, 1)
        for _ in range(4):
            head.tick()
        head.service.push_log("t1", 2, 0, "out", 0, b"two\n")
        time.sleep(0.3)
        head.ray.finish("t1.2", 0, 3)
        for _ in range(4):
            head.tick()

    thread = threading.Thread(target=work)
    thread.start()
    result = CliRunner(mix_stderr=False).invoke(cli, ["submit", "--retries", "1", "--backoff", "0s", "--follow", "x"])
    thread.join()
    assert result.stdout == "one\ntwo\n"
    assert "t1 runs again, attempt 2" in result.stderr
    assert "t1 failed: rank 0 ended with exit code 3" in result.stderr
    assert result.exit_code == 1


def test_the_python_api(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_SKY_GATEWAY", head.url)
    monkeypatch.setenv("AREAL_SKY_TOKEN", TOKENS["submit"])
    scheduler = TaskScheduler()
    assert scheduler.schedule_task(Task("x", gpus=4), priority=5) is TaskStatus.SCHEDULED
    assert scheduler.schedule_task(Task(["echo", "a b"], gpus=4, workdir="/tmp/x y")) is TaskStatus.QUEUED
    first, second = scheduler.handles
    assert head.service.get("t2")["command"] == "cd '/tmp/x y' && { echo 'a b'\n}"
    head.tick()
    assert (first.status(), second.status()) == (TaskStatus.SCHEDULED, TaskStatus.QUEUED)
    head.tick()
    assert (first.status(), second.status()) == (TaskStatus.RUNNING, TaskStatus.QUEUED)
    assert "0 of 1 fit now" in second.why()[-1][1]
    assert track_runtime_metrics("t1", {"reward": 1.0})
    assert checkpointed("t1")
    with low_phase("eval", "t1"):
        assert (first.info()["phase"], first.info()["phase_low"]) == ("eval", True)
    assert (first.info()["phase"], first.info()["phase_low"]) == ("after eval", False)
    assert [text for _, text in first.why()][-4:] == [
        "saved a checkpoint", "phase eval: leaves its GPUs idle", "phase after eval", "reported (once): reward 1"
    ]  # fmt: skip
    with pytest.raises(Refused, match="t2 does not run: it is queued"):
        checkpointed("t2")
    with pytest.raises(InvalidInput, match="no task id"):
        checkpointed()
    third, *rest = scheduler.submit_many([Task("x", name="a", array=2), Task("y", after="a")])
    assert [h.task_id for h in (third, *rest)] == ["t3", "t4", "t5"]
    assert head.service.get("t5")["after"] == ["t3..t4"]
    for handle in rest:
        handle.cancel()
    third.cancel()
    assert first.metrics() == {"reward": 1.0}
    head.service.push_log("t1", 1, 0, "out", 0, b"hi\n")
    assert first.logs() == "hi\n"
    assert second.cancel() is TaskStatus.CANCELLED
    head.ray.finish("t1.1", 0, 0)
    head.tick()
    assert first.wait(5) is TaskStatus.SUCCEEDED
    with pytest.raises(NotFound):
        TaskHandle(head.gateway, "t9").status()  # type: ignore[arg-type]
    head.server.should_exit = True
    monkeypatch.setenv("AREAL_SKY_GATEWAY", "http://127.0.0.1:9")
    assert not track_runtime_metrics("t1", {"reward": 1.0})


def test_python_tasks_are_checked_before_they_travel() -> None:
    with pytest.raises(InvalidInput, match="kind"):
        Task("x", kind="trian").spec()
    with pytest.raises(InvalidInput, match="duration"):
        Task("x", deadline="2 moons").spec()
    with pytest.raises(InvalidInput, match="cannot be pickled"):
        lock = threading.Lock()
        Task(lambda: print(lock)).spec()
    now_s = time.time()
    deadline_s = Task("x", deadline="2h", memory="512MB").spec().deadline_s
    assert deadline_s is not None
    assert 7199 < deadline_s - now_s < 7205
