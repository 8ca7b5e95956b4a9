"""`areal-sky check`, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

GOOD = "name: grpo\ninfra: k8s\nnode_groups:\n  trainer: {replicas: 2}\n  rollout: {max_replicas: 4}\n"
BAD = "resources: {accelerators: V10O:8}\nscaling: {cooldown: 100 m}\n"


def run(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "areal_sky.ui.cli.main", "check", *args]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "bad.yaml").write_text(BAD)
    return str(tmp_path / "good.yaml"), str(tmp_path / "bad.yaml")


def test_a_good_spec_is_one_line(files: tuple[str, str]) -> None:
    done = run(files[0])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{files[0]}: ok (grpo, 2 groups: trainer 2 nodes, rollout 0..4 x 1 node, on k8s)\n"


def test_every_mistake_of_every_file_is_printed_and_the_code_is_2(files: tuple[str, str]) -> None:
    done = run(*files, "missing.yaml")
    assert done.returncode == 2
    assert "good.yaml: ok" in done.stdout
    lines = done.stderr.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [f"{files[1]}:1:27", f"{files[1]}:2:21", "missing.yaml:1:1"]
    assert "Traceback" not in done.stderr


def test_json_tells_the_same(files: tuple[str, str]) -> None:
    done = run("--json", *files)
    told = json.loads(done.stdout)
    assert (done.returncode, done.stderr, told["ok"]) == (2, "", False)
    good, bad = told["files"]
    assert (good["ok"], good["name"], [g["name"] for g in good["groups"]]) == (True, "grpo", ["trainer", "rollout"])
    assert [(m["line"], m["column"]) for m in bad["mistakes"]] == [(1, 27), (2, 21)]


def test_standard_input_and_no_file_at_all() -> None:
    assert run("-", stdin="resources: {cpus: 4}").returncode == 0
    assert run("-", stdin="").returncode == 2
    done = run()
    assert done.returncode == 2 and "Usage" in done.stderr


def test_a_deadline_is_held_against_the_clock() -> None:
    done = run("-", stdin="budget: {deadline: 2020-01-01T00:00:00Z}")
    assert done.returncode == 2 and "ago, expected a moment to come" in done.stderr


def test_nothing_heavy_is_imported(files: tuple[str, str]) -> None:
    code = (
        "import sys\nfrom areal_sky.ui.cli.main import cli\n"
        f"cli(['check', {files[0]!r}], standalone_mode=False)\n"
        "heavy = {'ray', 'sky', 'rich', 'pydantic', 'fastapi', 'httpx', 'numpy', 'sqlite3', 'asyncio'}\n"
        "print('heavy:', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("heavy: []\n")
