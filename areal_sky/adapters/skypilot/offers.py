"""Offers from SkyPilot's catalogs, without importing SkyPilot here: a child process is asked, with a deadline."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_sky.core.model import NodeShape, Offer
from areal_sky.errors import Unreachable
from areal_sky.spec.accelerators import find

DEADLINE_S = 60.0  # the first fetch of all catalogs takes tens of seconds on a slow line; from disk it takes 2 to 4 s
CHILD = "areal_sky.adapters.skypilot.catalog_child"


@dataclass(frozen=True, slots=True)
class Ask:
    """What one group asks SkyPilot for: its `resources` as SkyPilot reads them, where, and how many nodes at once."""

    group: str
    resources: Mapping[str, Any]
    infra: str | None
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class GroupAnswer:
    """What SkyPilot says about one group besides offers.

    `hints`: cloud -> why it cannot serve the group. `near`: accelerators with other counts that it has.
    `asked`: the clouds looked at for it, `offers`: how many offers they had. `not_enabled`: clouds that the group
    names and SkyPilot may not use. `wrong`: SkyPilot cannot read the resources.
    """

    hints: Mapping[str, str]
    near: tuple[str, ...]
    not_enabled: tuple[str, ...]
    wrong: str
    asked: tuple[str, ...]
    offers: int


@dataclass(frozen=True, slots=True)
class Answer:
    """`clouds` are enabled; `failed` ones among them could not be asked, with the reason. Offers: all that would do."""

    clouds: tuple[str, ...]
    offers: tuple[Offer, ...]
    groups: Mapping[str, GroupAnswer]
    failed: Mapping[str, str]


def installed() -> bool:
    """Whether SkyPilot can be imported here; it is not imported to find out."""
    return importlib.util.find_spec("sky") is not None


def ever_checked() -> bool:
    """False where SkyPilot has no state at all, hence no cloud enabled: nobody ran `sky check` here."""
    if any(os.environ.get(k) for k in ("SKYPILOT_API_SERVER_ENDPOINT", "SKYPILOT_DB_CONNECTION_URI")):
        return True
    own = Path(os.environ.get("SKY_RUNTIME_DIR") or Path.home()) / ".sky"
    return any((place / name).exists() for place in {own, Path.home() / ".sky"} for name in ("state.db", "config.yaml"))


def ask(asks: Sequence[Ask], *, offline: bool = False, deadline_s: float = DEADLINE_S) -> Answer:
    """Everything that SkyPilot's enabled clouds have for these groups, spot and on demand, per region and zone.

    `offline`: use only what is on this machine. Blocks for 2 to 4 s, for `deadline_s` at most.
    Raises Unreachable when SkyPilot gives no answer in time, or breaks.
    """
    question = {
        "asks": [{"group": a.group, "resources": a.resources, "infra": a.infra, "nodes": a.nodes} for a in asks],
        "offline": offline,
    }
    env = os.environ | {"SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "SKYPILOT_DISABLE_LOCAL_API_SERVER": "1"}
    if offline:
        env |= {"AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", CHILD], input=json.dumps(question, default=_plain), env=env, capture_output=True,
            text=True, timeout=deadline_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Unreachable(f"SkyPilot's catalogs gave no answer within {deadline_s:.0f} s") from None
    except OSError as e:
        raise Unreachable(f"SkyPilot's catalogs cannot be asked: {e.strerror or e}") from None
    try:
        raw = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unreachable(f"SkyPilot's catalogs cannot be asked: {last[:200]}") from None
    if "error" in raw:
        raise Unreachable(f"SkyPilot's catalogs cannot be asked: {raw['error']}")
    return Answer(
        clouds=tuple(raw["clouds"]),
        offers=tuple(dict.fromkeys(_offer(row) for row in raw["offers"])),
        groups={name: _group(g) for name, g in raw["groups"].items()},
        failed=raw["failed"],
    )


def _group(raw: Mapping[str, Any]) -> GroupAnswer:
    lists = {k: tuple(raw[k]) for k in ("near", "not_enabled", "asked")}
    return GroupAnswer(hints=raw["hints"], wrong=raw["wrong"], offers=raw["offers"], **lists)


def _offer(row: Mapping[str, Any]) -> Offer:
    name = row["accelerator"]
    known = find(name) if name else None
    shape = NodeShape(
        gpus=0.0 if name and name.startswith("tpu") else row["gpus"],
        cpus=row["cpus"] or 1.0,
        memory_gib=row["memory_gib"] or 1.0,
        accelerator=known.name if known else name,
        gpu_memory_gib=known.memory_gib if known else None,
    )
    return Offer(
        row["cloud"], row["region"], row["zone"], row["instance_type"], shape, row["market"], row["usd"], row["source"]
    )


def _plain(value: object) -> Any:
    """Frozen mappings and tuples as JSON has them."""
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)
