"""`areal-sky memory`, and what `plan` and `up` say of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_sky.errors import Refused

HUGE = """
name: huge
infra: aws/us-east-1
resources: {accelerators: "A100:8"}
models: [{name: qwen3-235b-a22b, model_type: moe, train: "fsdp:d8"}]
"""


def run(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "areal_sky.ui.cli.main", *arguments],
        capture_output=True, text=True, timeout=120, cwd=cwd, env=os.environ | {"COLUMNS": "80"} | env,
    )  # fmt: skip


def test_the_breakdown_is_read_in_80_columns_and_adds_up() -> None:
    done = run("memory", "qwen3-30b-a3b", "--train", "megatron:d2p2t4e4", "--rollout", "sglang:d4t2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "30.5B parameters (3.35B active)" in done.stdout
    rows = [line.split() for line in lines]
    totals = [float(r[1]) for r in rows if r[:1] == ["total"]]
    named = ("weights", "gradients", "optimizer", "activations", "logits", "loss", "fragmentation", "workspace")
    start = next(i for i, r in enumerate(rows) if r[:1] == ["total"])
    parts = [float(r[1]) for r in rows[:start] if r and r[0] in named]
    parts += [float(r[3]) for r in rows[:start] if r[:3] == ["CUDA", "and", "NCCL"]]
    assert len(totals) == 2 and sum(parts) == pytest.approx(totals[0], abs=0.06)
    assert "[1] Megatron Core" in done.stdout


def test_json_says_all_of_it() -> None:
    gpus = ("--gpu", "L4", "--gpu", "H100")
    done = run("memory", "qwen2.5-7b", "--rollout", "vllm:d8", *gpus, "--json", "--set", "context=16384")
    found = json.loads(done.stdout)
    assert found["parameters"] == 7_615_616_512 and found["settings"]["context"] == 16384
    estimate = found["estimates"][0]
    assert estimate["fits"] == {"L4": "over", "H100": "fits"}
    assert sum(p["gib"] for p in estimate["parts"]) == pytest.approx(estimate["device_gib"], abs=0.01)
    assert [(s["gpu"], s["backend"]) for s in found["smallest"]] == [("L4", "vllm:d1t2"), ("H100", "vllm:d1")]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["qwen3-30b"], "did you mean `qwen3-30b-a3b`"),
        ([], "expected a MODEL"),
        (["qwen2.5-7b", "--train", "sglang:d8"], "cannot do train"),
        (["qwen2.5-7b", "--train", "fsdp:x8"], "dimension `x`"),
        (["qwen2.5-7b", "--gpu", "H1000"], "did you mean `H100`"),
        (["qwen2.5-7b", "--set", "optimiser=adam"], "did you mean `optimizer`"),
        (["qwen2.5-7b", "--set", "micro_batch_tokens=-3"], "no whole number"),
        (["/dev/zero/config.json"], "no known model"),
    ],
)
def test_wrong_input_is_one_message_and_ends_with_2(arguments: list[str], reason: str) -> None:
    done = run("memory", *arguments)
    assert done.returncode == 2 and not done.stdout and "Traceback" not in done.stderr
    assert reason in done.stderr


def test_plan_and_up_refuse_what_cannot_fit(tmp_path: Path, private_home: Path) -> None:
    (tmp_path / "huge.yaml").write_text(HUGE)
    planned = run("plan", "huge.yaml", "--no-sky", cwd=tmp_path)
    assert planned.returncode == 3 and "cannot fit" in " ".join(planned.stdout.split())
    assert "qwen3-235b-a22b train fsdp:d8" in planned.stderr
    as_json = json.loads(run("plan", "huge.yaml", "--no-sky", "--json", cwd=tmp_path).stdout)
    assert as_json["memory"]["needs"][0]["least_gib"] > 100 and as_json["refusals"]


def test_up_refuses_before_anything_is_recorded_and_warns_of_what_is_tight(
    tmp_path: Path, private_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from areal_sky.adapters.catalog import shipped_offers
    from areal_sky.cluster import Cluster
    from areal_sky.core.offers import Known
    from areal_sky.run import names, offers, supervise

    monkeypatch.setattr(offers, "known_for", lambda spec, **_: Known(shipped_offers()))
    monkeypatch.setattr(supervise, "check_reachable", lambda spec: None)
    monkeypatch.setattr(names, "clusters_listed", lambda *_: (), raising=False)
    spec = tmp_path / "huge.yaml"
    spec.write_text(HUGE)
    with pytest.raises(Refused, match="qwen3-235b-a22b train fsdp:d8"):
        Cluster.create(spec)
    assert not (private_home / "clusters" / "huge").exists()
    spec.write_text(HUGE.replace("qwen3-235b-a22b", "qwen2.5-32b"))
    told: list[str] = []
    Cluster.create(spec, warn=told.append)
    assert len(told) == 1 and "does not fit as assumed" in told[0]
    assert Cluster.attach("huge").spec_and_plan()[1].memory.needs  # kept with the cluster


def test_a_config_json_of_ones_own(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4,
              "num_hidden_layers": 2, "vocab_size": 1000}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run("memory", "config.json", "--train", "fsdp:d1", cwd=tmp_path)
    assert done.returncode == 0 and "parameters; 2 layers, hidden 64" in done.stdout
