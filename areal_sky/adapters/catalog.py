"""The shipped price table as Offers: what machines cost, with no account and no network."""

from __future__ import annotations

import csv
import re
from functools import cache
from pathlib import Path
from typing import Literal

from areal_sky.core.model import NodeShape, Offer
from areal_sky.errors import StateError

PRICES = Path(__file__).resolve().parent.parent / "data" / "prices.csv"
_COMMIT = re.compile(r"#\s+(\w+)/vms\.csv\s+([0-9a-f]{40})")


@cache
def shipped_offers() -> tuple[Offer, ...]:
    """All offers of `areal_sky/data/prices.csv`; its header names the public source and its date-less commits."""
    return read_offers(PRICES)


def read_offers(path: Path) -> tuple[Offer, ...]:
    """Offers of a price table, in file order; `source` names the commit that a row's cloud comes from.

    A row without a spot price gives no spot offer. Raises StateError when the file is missing or damaged.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as e:
        raise StateError(f"cannot read the price table {path}: {e.strerror}; reinstall areal-sky") from None
    commits = {m[1]: m[2][:12] for line in lines if (m := _COMMIT.match(line))}
    offers: list[Offer] = []
    try:
        for row in csv.DictReader(line for line in lines if not line.startswith("#")):
            offers.extend(_row_offers(row, commits))
    except (KeyError, TypeError, ValueError) as e:
        raise StateError(f"the price table {path} is damaged: {e}; reinstall areal-sky") from None
    return tuple(offers)


def _row_offers(row: dict[str, str], commits: dict[str, str]) -> list[Offer]:
    shape = NodeShape(
        gpus=float(row["gpus"] or 0),
        cpus=float(row["cpus"]),
        memory_gib=float(row["memory_gib"]),
        accelerator=row["accelerator"] or None,
        gpu_memory_gib=float(row["gpu_memory_gib"]) if row["gpu_memory_gib"] else None,
    )
    source = f"SkyPilot catalog {row['cloud']}@{commits[row['cloud']]}"
    markets: tuple[Literal["on_demand", "spot"], ...] = ("on_demand", "spot")
    return [
        Offer(row["cloud"], row["region"], None, row["instance_type"], shape, market, float(row[market]), source)
        for market in markets
        if row[market]
    ]


def listed_price(cloud: str, region: str, instance_type: str, market: str) -> float | None:
    """What the shipped table says such a machine costs per hour; None when it does not list it."""
    wanted = (cloud, region, instance_type, market)
    prices = (
        o.price_usd_per_hour for o in shipped_offers() if (o.cloud, o.region, o.instance_type, o.market) == wanted
    )
    return next(prices, None)
