"""`areal-sky top`: true and readable at 80 columns, and it ends cleanly."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from areal_sky import home
from areal_sky.core.heartbeat import read_heartbeat
from areal_sky.core.telemetry import GpuWindow, Validity
from areal_sky.errors import NotFound, Unreachable
from areal_sky.run.hub import TelemetryHub
from areal_sky.ui.cli import main
from areal_sky.ui.cli.top import picture

NOW_S = 1000.0
NAME = "grpo-math-rollout"


def beat(hub: TelemetryHub, replica: str, t_s: float, loads: list[float | str | None], **more) -> None:
    """One heartbeat; a load is a number, None (not told) or the words of a lost GPU."""
    windows = []
    for device, use in enumerate(loads):
        lost = isinstance(use, str)
        validity = Validity.LOST if lost else Validity.UNKNOWN if use is None else Validity.KNOWN
        error = use if lost else "utilization: Not Supported" if use is None else ""
        mean = None if lost else use
        memory = None if lost else 12.3
        told = (mean, mean, mean, memory, 48.0, 61.0, 300.0, 1.0, validity, error)
        windows.append(asdict(GpuWindow(device, "L40S", t_s - 1, t_s, *told)))
    body = {
        "cluster": "c", "group": "rollout", "replica": replica, "index": 0, "t_s": t_s, "pid": 1,
        "raylet_alive": True, "gpus": len(loads), "interval_s": 0.1, "windows": windows,
    }  # fmt: skip
    hub.ingest(read_heartbeat(body | more, t_s), t_s)


def text(view: dict, width: int = 80, height: int | None = None, trouble: str = "") -> str:
    from rich.console import Console

    console = Console(width=width, highlight=False, record=True, file=io.StringIO())
    console.print(picture(view, width, height, trouble))
    return console.export_text()


@pytest.fixture
def hub() -> TelemetryHub:
    hub = TelemetryHub()
    running = [{"task_id": "train-4f2a", "rank": 0, "kind": "train", "gpus": [0]}]
    for i in range(60):
        beat(hub, f"{NAME}-0", NOW_S - 59 + i, [i / 59, 0.0, 0.6], running=running)
    return hub


def test_a_line_per_gpu_with_load_history_memory_heat_power_and_task(hub):
    lines = text(hub.gpus(60, NOW_S)).splitlines()
    assert lines[0].strip() == "1 node, 3 GPUs, mean load 53%"
    assert lines[2].strip() == f"{NAME}-0  heard 0 ms ago  3x L40S  every 100 ms"
    number, bar, load, history, *rest = lines[3].split()
    assert (number, bar, load, rest) == ("0", "██████████", "100%", ["12.3/48GiB", "61°C", "300W", "train-4f2a"])
    assert len(history) == 18 and list(history) == sorted(history) and history[-1] == "█"
    assert lines[4].split()[1:3] == ["░░░░░░░░░░", "0%"] and lines[4].rstrip().endswith("idle")
    assert lines[5].rstrip().endswith("in use, no task")


def test_what_is_not_known_is_never_shown_as_zero(hub):
    beat(hub, f"{NAME}-1", NOW_S, [None, "GPU is lost"], gpus=3)
    beat(hub, f"{NAME}-2", NOW_S - 31, [0.0])
    shown = text(hub.gpus(60, NOW_S), width=120)
    doubtful = [line for line in shown.splitlines() if "··········" in line]
    assert len(doubtful) == 4
    for line, words in zip(doubtful, ("unknown", "lost", "unknown", "stale 31 s"), strict=True):
        assert " n/a " in line and words in line and "%" not in line
    assert "GPU is lost" in doubtful[1] and "n/a  61°C" in doubtful[1]
    assert "its node has not reported this GPU" in doubtful[2]
    assert "silent for 31 s" in shown
    assert "mean load 53% of 3, 2 unknown, 1 stale, 1 lost" in shown


def test_trouble_of_a_gpu_that_answers_is_said_in_few_words(hub):
    window = GpuWindow(0, "L40S", NOW_S - 1, NOW_S, 0.5, 0.5, 0.5, 1.0, 48.0, 95.0, 300.0, 1.0, Validity.KNOWN,
                       throttle=("hw_thermal", "sw_power_cap"), ecc_uncorrected=2, xid=48)  # fmt: skip
    beat(hub, "hot-0", NOW_S, [0.5], windows=[asdict(window)], dropped=7)
    shown = text(hub.gpus(60, NOW_S), width=120)
    assert "300W  XID 48, 2 ECC errors, hw thermal" in shown and "7 windows lost" in shown


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_window(hub, width):
    beat(hub, f"{NAME}-1", NOW_S, [None, "GPU is lost"], telemetry_error="x" * 300, running=[])
    assert max(len(line) for line in text(hub.gpus(60, NOW_S), width).splitlines()) <= width


def test_more_gpus_than_lines_are_counted(hub):
    for i in range(1, 20):
        beat(hub, f"{NAME}-{i:02}", NOW_S, [0.5] * 8)
    lines = text(hub.gpus(60, NOW_S), height=24).splitlines()
    assert len(lines) < 24
    # in all: the summary, 5 lines of the first node and 10 of each other one; 22 of them are shown
    assert lines[-1].startswith(f"... {1 + 5 + 19 * 10 - 22} more lines")
    assert text(hub.gpus(60, NOW_S), height=24, trouble="no answer").splitlines()[-1].strip() == "no answer"


def test_nodes_without_gpus_with_trouble_and_none_at_all():
    hub = TelemetryHub()
    assert "no node has reported yet" in text(hub.gpus(60, NOW_S))
    beat(hub, "cpu-0", NOW_S, [])
    beat(hub, "gpu-0", NOW_S, [], gpus=1, telemetry_error="NVML does not start: Driver Not Loaded")
    beat(hub, "ray-0", NOW_S, [0.1], raylet_alive=False)
    shown = text(hub.gpus(60, NOW_S))
    assert "cpu-0  heard 0 ms ago  no GPUs" in shown
    assert "gpu-0  NVML does not start: Driver Not Loaded" in shown
    assert "ray-0  its Ray is down" in shown


class Gateway:
    """Stands in for the head's gateway."""

    def __init__(self, hub: TelemetryHub):
        self.hub, self.rights = hub, []

    def gateway(self, right: str) -> Gateway:
        self.rights.append(right)
        return self

    def gpus(self, seconds: float, points: int = 0) -> dict:
        return self.hub.gpus(seconds, NOW_S, points)


def test_the_command_prints_once_where_there_is_no_terminal(hub, monkeypatch):
    gateway, asked = Gateway(hub), []
    monkeypatch.setattr(home, "choose_cluster", lambda name: asked.append(name) or gateway)
    for arguments in (["top", "-c", "math", "--once"], ["top"]):
        result = CliRunner().invoke(main.cli, arguments)
        assert result.exit_code == 0 and "train-4f2a" in result.output
    result = CliRunner().invoke(main.cli, ["top", "--json"])
    view = json.loads(result.output)
    assert [g["device"] for g in view["nodes"][0]["gpus"]] == [0, 1, 2]
    assert asked == ["math", None, None] and set(gateway.rights) == {"read"}


def test_a_longer_time_is_one_curve_and_too_long_is_refused(hub, monkeypatch):
    monkeypatch.setattr(home, "choose_cluster", lambda name: Gateway(hub))
    result = CliRunner().invoke(main.cli, ["top", "--last", "10m", "--json"])
    history = json.loads(result.output)["nodes"][0]["gpus"][2]["history"]
    assert history == [None] * 27 + [pytest.approx(0.6)] * 3  # the hub has heard of a minute
    for wrong in ("8d", "x", "1s"):
        result = CliRunner().invoke(main.cli, ["top", "--last", wrong])
        assert result.exit_code == 2 and "--last" in result.output


@pytest.mark.parametrize("error", [NotFound("no cluster 'x'"), Unreachable("the head does not answer")])
def test_trouble_at_the_start_is_one_message(monkeypatch, capsys, error):
    def fail(name):
        raise error

    monkeypatch.setattr(home, "choose_cluster", fail)
    monkeypatch.setattr(sys, "argv", ["areal-sky", "top"])
    with pytest.raises(SystemExit) as e:
        main.main()
    assert e.value.code == 1
    assert capsys.readouterr().err == f"error: {error}\n"


LIVE = """
import sys, time
from areal_sky import home
from areal_sky.errors import Unreachable
class Gateway:
    calls = 0
    def gateway(self, right): return self
    def gpus(self, seconds):
        self.calls += 1
        if self.calls == 2: raise Unreachable("the head does not answer")
        return {"t_s": 0, "seconds": seconds, "nodes": [{"replica": "math-rollout-%d" % self.calls, "index": 0,
            "group": "g", "alive": True, "age_s": 0, "interval_s": 1, "raylet_alive": True, "telemetry_error": "",
            "running": [], "gpus": []}]}
gateway = Gateway()
home.choose_cluster = lambda name: gateway
sys.argv = ["areal-sky", "top"]
from areal_sky.ui.cli.main import main
main()
"""


def test_live_on_a_terminal_survives_a_silent_head_and_ends_cleanly_on_ctrl_c():
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24", "PYTHONPATH": str(Path.cwd())}
    process = subprocess.Popen(
        [sys.executable, "-c", LIVE], stdin=follower, stdout=follower, stderr=subprocess.PIPE, env=env
    )
    os.close(follower)
    try:
        shown = read_until(leader, b"math-rollout-3", 20)
        assert b"math-rollout-1" in shown
        assert b"the head does not answer" in shown
        process.send_signal(signal.SIGINT)
        shown = read_until(leader, b"\x1b[?1049l", 10)  # back to the ordinary screen
        assert process.wait(timeout=10) == 0
        assert b"\x1b[?25h" in shown  # with its cursor
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        os.close(leader)


def read_until(fd: int, needle: bytes, seconds: float) -> bytes:
    shown, until = b"", time.time() + seconds
    while needle not in shown:
        assert time.time() < until, f"{needle!r} did not come: {shown!r}"
        if select.select([fd], [], [], 0.2)[0]:
            try:
                shown += os.read(fd, 65536)
            except OSError:
                break
    return shown
