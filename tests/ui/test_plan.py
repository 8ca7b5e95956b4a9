"""`areal-sky plan` and `areal-sky render`, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.fixture(autouse=True)
def no_cloud_enabled(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A HOME in which nobody ever ran `sky check`."""
    home = str(tmp_path_factory.mktemp("home"))
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("SKY_RUNTIME_DIR", home)


def areal_sky(
    *arguments: str | Path, cwd: Path | None = None, home: Path | None = None
) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"COLUMNS": "80"} | ({"HOME": str(home), "SKY_RUNTIME_DIR": str(home)} if home else {})
    return subprocess.run(
        [sys.executable, "-m", "areal_sky.ui.cli.main", *map(str, arguments)],
        env=env, cwd=cwd, capture_output=True, text=True, timeout=150,
    )  # fmt: skip


@pytest.mark.parametrize("case", ["article", "plain", "full", "places"])
def test_a_plan_fits_80_columns_and_its_numbers_add_up(case: str) -> None:
    path = GOLDEN / case / "spec.yaml"
    shown = areal_sky("plan", path)
    assert shown.returncode == 0, shown.stderr
    assert max(map(len, shown.stdout.splitlines())) <= 80
    data = json.loads(areal_sky("plan", path, "--json").stdout)
    for end in ("min", "max"):
        parts = [g["usd_per_hour"][end] for g in (data["head"], *data["groups"])]
        assert data["usd_per_hour"][end] == pytest.approx(sum(parts), abs=0.001)
        assert f"{data['usd_per_hour'][end]:,.2f}" in shown.stdout
        assert data["usd_per_month"][end] == pytest.approx(data["usd_per_hour"][end] * 730, abs=0.1)
    flat = " ".join(shown.stdout.split())
    for line in (*data["guesses"], *data["unknowns"]):
        assert " ".join(line.split()) in flat
    for group in data["groups"]:
        assert group["name"] in shown.stdout and group["offer"]["instance_type"] in shown.stdout
    assert "not today's" in flat


def test_the_saving_of_spot_is_against_all_on_demand() -> None:
    data = json.loads(areal_sky("plan", GOLDEN / "full" / "spec.yaml", "--json").stdout)
    rollout = data["groups"][1]
    node = rollout["usd_per_hour"]["node"]
    saved = 15 * (node["on_demand"] - node["spot"])
    assert data["spot_saves_usd_per_hour_at_max"] == pytest.approx(saved, abs=0.01)
    assert saved > 0


def test_no_price_is_a_question_mark_and_null(tmp_path: Path) -> None:
    spec = tmp_path / "s.yaml"
    spec.write_text("infra: slurm/hpc\nresources: {accelerators: H100:8}\n")
    assert "no price known" in areal_sky("plan", spec).stdout
    data = json.loads(areal_sky("plan", spec, "--json").stdout)
    assert data["groups"][0]["usd_per_hour"]["min"] is None
    assert data["usd_per_hour"]["without_price"] == ["head", "main"]


def test_exit_codes_and_no_traceback(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("resources: {accelerators: V1000:8}\n")
    dear = tmp_path / "dear.yaml"
    dear.write_text("infra: aws\nresources: {accelerators: H100:8}\nbudget: {max_hourly_usd: 1}\n")
    for arguments, code, words in (
        (("plan", wrong), 2, "wrong.yaml:1:"),
        (("plan", tmp_path / "none.yaml"), 2, "no such file"),
        (("plan", dear), 3, "more than budget.max_hourly_usd 1.00"),
        (("render", dear, "--out", tmp_path / "out"), 3, "more than budget"),
        (("render", wrong, "--out", tmp_path / "out"), 2, "wrong.yaml:1:"),
    ):
        done = areal_sky(*arguments)
        assert done.returncode == code, done.stderr
        assert words in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_render_writes_what_the_golden_files_say_and_is_idempotent(tmp_path: Path) -> None:
    done = areal_sky("render", GOLDEN / "full" / "spec.yaml", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    names = {"head.yaml", "trainer.yaml", "rollout.yaml"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == {*names, "areal_sky-0.1.0-py3-none-any.whl"}
    for name in names:
        text = (tmp_path / "out" / name).read_text()
        assert text == (GOLDEN / "full" / name).read_text()
        assert f"wrote     {tmp_path / 'out' / name}" in done.stdout
    again = areal_sky("render", GOLDEN / "full" / "spec.yaml", "--out", tmp_path / "out")
    assert again.returncode == 0 and again.stdout.count("unchanged") == 4


def test_render_overwrites_nothing_that_differs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "rollout.yaml").write_text("mine\n")
    refused = areal_sky("render", GOLDEN / "full" / "spec.yaml", "--out", out)
    assert refused.returncode == 3 and "rollout.yaml" in refused.stderr and "--force" in refused.stderr
    assert [p.name for p in out.iterdir()] == ["rollout.yaml"] and (out / "rollout.yaml").read_text() == "mine\n"
    assert areal_sky("render", GOLDEN / "full" / "spec.yaml", "--out", out, "--force").returncode == 0
    assert (out / "rollout.yaml").read_text() != "mine\n"


def test_render_where_it_may_not_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = areal_sky("render", GOLDEN / "full" / "spec.yaml", "--out", tmp_path / "file" / "out")
    assert done.returncode == 1 and "cannot write to" in done.stderr and "Traceback" not in done.stderr


def test_a_local_spec_renders_for_real_clouds(tmp_path: Path) -> None:
    spec = tmp_path / "s.yaml"
    spec.write_text("infra: local\nresources: {accelerators: V100:8}\n")
    done = areal_sky("render", spec, "--out", tmp_path / "out")
    assert done.returncode == 0 and "infra: local needs no SkyPilot" in done.stdout
    task = yaml.safe_load((tmp_path / "out" / "main.yaml").read_text())
    assert json.loads(task["envs"]["AREAL_SKY_NODE_CONFIG"])["simulated_gpus"] is False
    assert "local" not in task["resources"].get("infra", "")


def test_planning_needs_neither_ray_nor_sky() -> None:
    code = (
        "import sys, areal_sky.ui.cli.plan;"
        "print([m for m in ('ray', 'sky', 'rich', 'fastapi', 'httpx') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_without_an_enabled_cloud_a_plan_is_quick_and_says_what_it_cannot_know() -> None:
    data = json.loads(areal_sky("plan", GOLDEN / "full" / "spec.yaml", "--json").stdout)
    said = "no cloud is enabled" if find_spec("sky") else "SkyPilot is not installed"
    assert said in data["unknowns"][0] and "is not known" in data["unknowns"][0]
    data = json.loads(areal_sky("plan", GOLDEN / "full" / "spec.yaml", "--json", "--no-sky").stdout)
    assert "SkyPilot was not asked" in data["unknowns"][0]


# ---------------------------------------------------------------- with SkyPilot's catalogs


needs_sky = pytest.mark.skipif(find_spec("sky") is None, reason="needs SkyPilot")
TWO_GROUPS = """
name: grpo
node_groups:
  trainer: {resources: {accelerators: "H100:8"}, replicas: 2}
  rollout:
    resources: {accelerators: {H100: 8, A100-80GB: 8, L40S: 8}}
    min_replicas: 1
    max_replicas: 4
    market: mixed
    on_demand_base: 1
"""


@pytest.mark.sky
@needs_sky
def test_a_plan_with_skypilots_offers(sky_home: Path, tmp_path: Path) -> None:
    spec = tmp_path / "s.yaml"
    spec.write_text(TWO_GROUPS)
    shown = areal_sky("plan", spec, "--offline", home=sky_home)
    assert shown.returncode == 0, shown.stderr
    assert max(map(len, shown.stdout.splitlines())) <= 80
    data = json.loads(areal_sky("plan", spec, "--offline", "--json", home=sky_home).stdout)
    trainer, rollout = data["groups"]
    # us-east-1 of the AWS catalog: m6i.2xlarge 0.384; p5 55.04; p4de 27.44705, on spot 8.6505 in its cheapest zone.
    assert (trainer["offer"]["cloud"], trainer["offer"]["region"]) == ("aws", "us-east-1")
    assert data["usd_per_hour"]["min"] == pytest.approx(0.384 + 2 * 55.04 + 27.44705, abs=0.001)
    assert data["usd_per_hour"]["max"] == pytest.approx(0.384 + 2 * 55.04 + 27.44705 + 3 * 8.6505, abs=0.001)
    assert data["usd_per_month"]["max"] == pytest.approx(data["usd_per_hour"]["max"] * 730, abs=0.1)
    assert rollout["spot_offer"]["zone"] == "use1-az6" and data["unknowns"] == [] and data["refusals"] == []
    # 27.44705 + 3 x 8.6505 with A100-80GB; 55.04 + 3 x 10.2397 with H100.
    assert {c["accelerator"]: round(c["usd_per_hour"], 2) for c in rollout["choices"]} == {
        "H100:8": 85.76, "A100-80GB:8": 53.40, "L40S:8": 54.19,
    }  # fmt: skip
    flat = " ".join(shown.stdout.split())
    for words in (
        "SkyPilot catalog aws, a file put there by hand", "rollout with H100:8 (p5.48xlarge): $85.76/h at the largest",
        "elsewhere, all of it at its largest: aws/us-west-2", "less than on demand, in use1-az",
    ):  # fmt: skip
        assert words in flat


@pytest.mark.sky
@needs_sky
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("resources: {accelerators: H100:3}", ("main: no machine with H100:3 on aws, gcp, lambda; there is H100:4",)),
        ("infra: azure\nresources: {accelerators: H100:8}", ("main: azure is not enabled", "sky check azure")),
        (
            TWO_GROUPS + "infra: aws\nbudget: {max_hourly_usd: 50}",
            ("more than budget.max_hourly_usd 50.00", "one node of it alone costs $55.04/h"),
        ),
        (
            "node_groups: {a: {resources: {accelerators: 'L40S:8', infra: aws}},"
            " b: {resources: {accelerators: 'H100:8', infra: gcp}}}",
            ("mixed regions: ", "can be had in"),
        ),
        ("infra: aws\nresources: {accelerators: H100:8, max_hourly_cost: 20}", ("max_hourly_cost is 20.00",)),
    ],
    ids=["no such accelerator", "cloud not enabled", "budget", "regions", "cap per node"],
)
def test_refusals_end_with_3_and_one_message(sky_home: Path, tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    spec = tmp_path / "s.yaml"
    spec.write_text(text)
    done = areal_sky("plan", spec, "--offline", "--json", home=sky_home)
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == 1
    assert all(w in done.stderr for w in words)
    refusals = json.loads(done.stdout)["refusals"]
    assert done.stderr == "error: " + "\n".join(refusals) + "\n"
