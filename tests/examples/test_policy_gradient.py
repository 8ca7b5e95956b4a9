"""The example RL job: the reward rises, a killed run goes on where it was, a gang learns what its ranks saw."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

SCRIPT = Path(__file__).parents[2] / "examples/rl/policy_gradient.py"


def start(role: str, folder: Path, iterations: int, pace: float = 0.0, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), role, "--dir", str(folder)]
    command += ["--iterations", str(iterations), "--pace", str(pace)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **env})


def run(role: str, folder: Path, iterations: int, **env: str) -> str:
    process = start(role, folder, iterations, **env)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    return out


def metric(out: str, name: str) -> list[float]:
    return [float(x) for x in re.findall(rf"^AREAL_SKY_METRIC .*\b{name}=([\d.e-]+)", out, re.M)]


def weights(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "tiny/policy.npz") as stored:
        return {key: stored[key] for key in stored.files}


def test_reward_rises_from_chance(tmp_path: Path) -> None:
    rewards = metric(run("train", tmp_path, 60), "reward")
    assert len(rewards) == 60
    assert rewards[0] < 0.15, "an untrained policy guesses: one in ten"
    assert np.mean(rewards[-5:]) > 0.8
    assert metric(run("eval", tmp_path, 1), "accuracy")[0] > 0.8


def test_killed_run_resumes_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    run("train", tmp_path / "whole", 12)
    victim = start("train", tmp_path / "killed", 12, pace=0.2)
    assert victim.stdout is not None
    while "step   4/" not in victim.stdout.readline():
        assert victim.poll() is None
    victim.send_signal(signal.SIGKILL)
    victim.wait(10)
    out = run("train", tmp_path / "killed", 12)
    assert re.search(r"resumed from the checkpoint of step [4-6]\b", out)
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert whole["step"] == resumed["step"] == 12
    np.testing.assert_array_equal(whole["w1"], resumed["w1"])


def test_two_ranks_learn_together(tmp_path: Path, free_port: Callable[[], int]) -> None:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    # Rank 1 comes first and must wait for rank 0 to listen; its own directory shows that gradients travel.
    one = start("train", tmp_path / "b", 8, RANK="1", **shared)
    time.sleep(0.3)
    zero = start("train", tmp_path / "a", 8, RANK="0", **shared)
    outs = [p.communicate(timeout=60)[0] for p in (zero, one)]
    assert (zero.returncode, one.returncode) == (0, 0)
    assert len(metric(outs[0], "reward")) == 8 and outs[1] == ""
    run("train", tmp_path / "alone", 8)
    assert not np.array_equal(weights(tmp_path / "a")["w1"], weights(tmp_path / "alone")["w1"])


def test_trainer_uses_fresh_rollouts_and_drops_stale_ones(tmp_path: Path) -> None:
    out = run("rollout", tmp_path, 3, AREAL_SKY_TASK_ID="t1")
    assert len(metric(out, "reward")) == 3
    assert "3 rollout batches used" in run("train", tmp_path, 1).splitlines()[0]
    run("train", tmp_path, 8)
    run("rollout", tmp_path, 5, AREAL_SKY_TASK_ID="t1")  # resumes after its third batch
    left = list((tmp_path / "tiny/rollouts").glob("000008-t1*.npz"))
    assert len(left) == 2
    for path in left:  # pretend that they lag far behind
        path.rename(path.with_name("old-" + path.name))
        with np.load(path.with_name("old-" + path.name)) as stored:
            arrays = {**{k: stored[k] for k in stored.files}, "version": np.array(0)}
        np.savez(path.with_name("old-" + path.name), **arrays)
    out = run("train", tmp_path, 9)
    assert "rollout batches used" not in out
    assert not list((tmp_path / "tiny/rollouts").glob("*.npz"))
