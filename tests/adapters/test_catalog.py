"""The shipped price table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_sky.adapters.catalog import PRICES, read_offers, shipped_offers
from areal_sky.errors import StateError
from areal_sky.spec.accelerators import find


def test_offers_are_complete_and_true_to_the_table() -> None:
    offers = shipped_offers()
    rows = [line.split(",") for line in PRICES.read_text().splitlines() if not line.startswith("#")][1:]
    assert len(offers) == sum(bool(r[8]) + bool(r[9]) for r in rows)
    assert len({(o.cloud, o.region, o.instance_type, o.market) for o in offers}) == len(offers)
    h100 = next(o for o in offers if (o.instance_type, o.region, o.market) == ("p5.48xlarge", "us-east-1", "on_demand"))
    assert (h100.price_usd_per_hour, h100.shape.gpus, h100.shape.cpus) == (55.04, 8.0, 192.0)


def test_every_price_names_the_commit_that_it_comes_from() -> None:
    commits = dict(re.findall(r"^#\s+(\w+)/vms\.csv\s+([0-9a-f]{40})$", PRICES.read_text(), re.MULTILINE))
    for offer in shipped_offers():
        assert offer.source == f"SkyPilot catalog {offer.cloud}@{commits[offer.cloud][:12]}"


def test_accelerators_are_those_of_the_spec_with_the_same_memory() -> None:
    for offer in shipped_offers():
        if offer.shape.accelerator:
            known = find(offer.shape.accelerator)
            assert known is not None and known.name == offer.shape.accelerator
            assert known.memory_gib == offer.shape.gpu_memory_gib


def test_gcp_prices_are_machine_and_gpus_together() -> None:
    a3 = [o for o in shipped_offers() if o.instance_type == "a3-highgpu-8g" and o.region == "us-central1"]
    # 9.46006 for the machine and 33.60609 for its GPUs; spot 2.88933 and 23.9408.
    assert {o.market: o.price_usd_per_hour for o in a3} == {"on_demand": 43.06615, "spot": 26.83013}


@pytest.mark.parametrize(
    "text", ["cloud,region\naws,x\n", "", "cloud,region,instance_type,accelerator,gpus,gpu_memory_gib,cpus,memory_gib,"
             "on_demand,spot\naws,r,t,,,,many,1,1,1\n"],
)  # fmt: skip
def test_a_damaged_table_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prices.csv"
    path.write_text("#   aws/vms.csv     00148f2af3672e2229b4f7bf8157d5a3f36e3c35\n" + text)
    if text:
        with pytest.raises(StateError, match="damaged"):
            read_offers(path)
    else:
        assert read_offers(path) == ()


def test_a_missing_table_is_said(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="reinstall"):
        read_offers(tmp_path / "none.csv")
