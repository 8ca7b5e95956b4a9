"""SkyPilot's own catalogs and optimizer, asked through the child process, with no network and true prices."""

from __future__ import annotations

import csv
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from areal_sky.adapters.skypilot import offers as skypilot
from areal_sky.adapters.skypilot.offers import Answer, Ask, ask
from areal_sky.errors import Unreachable

pytestmark = [pytest.mark.sky, pytest.mark.skipif(find_spec("sky") is None, reason="needs SkyPilot")]
CATALOGS = Path(__file__).parents[1] / "catalogs" / "v8"


@pytest.fixture(autouse=True)
def at_home(sky_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(sky_home))
    monkeypatch.setenv("SKY_RUNTIME_DIR", str(sky_home))


@pytest.fixture(scope="module")
def answer(sky_home: Path) -> Answer:
    """One question for all tests: a child process takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(sky_home))
        patch.setenv("SKY_RUNTIME_DIR", str(sky_home))
        return ask(
            [
                Ask("h100", {"accelerators": "H100:8"}, None),
                Ask("v100", {"accelerators": "V100:8", "use_spot": True, "max_hourly_cost": 1}, "aws/us-east-1"),
                Ask("either", {"any_of": [{"accelerators": "V100:8"}, {"accelerators": "L40S:8"}]}, "aws"),
                Ask("head", {"cpus": "4+", "memory": "16+"}, None),
                Ask("three", {"accelerators": "H100:3"}, None),
                Ask("elsewhere", {"accelerators": "H100:8"}, "azure"),
                Ask("nowhere", {"accelerators": "H100:8"}, "aws/us-east-9"),
                Ask("spotless", {"accelerators": "H100:8"}, "lambda"),
                Ask("wrong", {"accelerators": "H100:8", "disk_tier": "huge"}, None),
                Ask("zone", {"accelerators": "V100:8"}, "aws/us-east-1/use1-az5"),
            ],
            offline=True,
            deadline_s=120,
        )


def rows(cloud: str) -> list[dict[str, str]]:
    with (CATALOGS / cloud / "vms.csv").open() as f:
        return list(csv.DictReader(f))


def test_what_is_enabled(answer: Answer) -> None:
    assert answer.clouds == ("aws", "gcp", "lambda") and answer.failed == {}


def test_spot_has_the_price_of_its_zone_and_on_demand_of_its_region(answer: Answer) -> None:
    spot = {
        (o.region, o.zone): o.price_usd_per_hour
        for o in answer.offers
        if o.instance_type == "p5.48xlarge" and o.market == "spot"
    }
    true = {
        (r["Region"], r["AvailabilityZone"]): pytest.approx(float(r["SpotPrice"]))
        for r in rows("aws")
        if r["InstanceType"] == "p5.48xlarge" and r["SpotPrice"]
    }
    assert spot == true and len(spot) > 5
    regular = [o for o in answer.offers if o.instance_type == "p5.48xlarge" and o.market == "on_demand"]
    assert {(o.region, o.zone, o.price_usd_per_hour) for o in regular} == {
        ("us-east-1", None, 55.04), ("us-west-2", None, 55.04),
    }  # fmt: skip


def test_gcp_is_machine_and_gpus_together(answer: Answer) -> None:
    there = [o for o in answer.offers if o.instance_type == "a3-highgpu-8g" and o.zone == "us-central1-a"]
    # 9.46006 for the machine and 33.60609 for its GPUs; spot 2.88933 and 23.9408.
    assert {o.market: o.price_usd_per_hour for o in there} == {
        "on_demand": pytest.approx(43.06615), "spot": pytest.approx(26.83013),
    }  # fmt: skip


def test_shapes_names_and_sources(answer: Answer) -> None:
    h100 = next(o for o in answer.offers if o.instance_type == "p5.48xlarge")
    shape = h100.shape
    assert (shape.accelerator, shape.gpus, shape.gpu_memory_gib, shape.cpus, shape.memory_gib) == (
        "H100", 8, 80, 192, 2048,
    )  # fmt: skip
    assert h100.source == "SkyPilot catalog aws, a file put there by hand"
    head = next(o for o in answer.offers if o.instance_type == "m6i.2xlarge")
    assert head.shape.accelerator is None and head.shape.gpus == 0


def test_no_spot_on_lambda(answer: Answer) -> None:
    assert {o.market for o in answer.offers if o.cloud == "lambda"} == {"on_demand"}


def test_the_market_and_the_cap_are_not_skypilots_to_judge(answer: Answer) -> None:
    group = answer.groups["v100"]
    assert group.asked == ("aws",) and group.offers > 1
    assert {o.market for o in answer.offers if o.instance_type == "p3.16xlarge"} == {"on_demand", "spot"}


def test_a_zone_pins_spot(answer: Answer) -> None:
    assert answer.groups["zone"].offers == 2  # on demand and spot, one zone each


def test_why_there_is_nothing(answer: Answer) -> None:
    three = answer.groups["three"]
    assert three.offers == 0 and three.near == ("H100:4", "H100:8") and three.asked == ("aws", "gcp", "lambda")
    assert answer.groups["elsewhere"].not_enabled == ("azure",) and answer.groups["elsewhere"].asked == ()
    assert "us-east-9" in answer.groups["nowhere"].hints["aws"]
    assert "huge" in answer.groups["wrong"].wrong or "disk_tier" in answer.groups["wrong"].wrong
    assert answer.groups["either"].offers > 2


def test_a_child_that_is_too_slow_is_ended() -> None:
    with pytest.raises(Unreachable, match="no answer within 0 s"):
        ask([Ask("g", {"cpus": 4}, None)], offline=True, deadline_s=0.05)


def test_a_child_that_breaks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / ".sky" / "state.db"
    state.parent.mkdir()
    state.write_text("no database")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SKY_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(Unreachable, match="cannot be asked: "):
        ask([Ask("g", {"cpus": 4}, None)], offline=True, deadline_s=120)


def test_state_tells_whether_anybody_ran_sky_check(
    sky_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert skypilot.ever_checked()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SKY_RUNTIME_DIR", str(tmp_path))
    assert not skypilot.ever_checked()


def test_skypilot_is_not_imported_here() -> None:
    code = "import sys, areal_sky.run.offers as o; print(o.skypilot.installed(), 'sky' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"]
