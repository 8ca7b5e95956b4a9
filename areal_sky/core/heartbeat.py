"""What a node's agent tells the head: read once, at the door, into what the hub and the watch both use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from areal_sky.core.windowcodec import MAX_DEVICES, Batch, read_windows
from areal_sky.errors import InvalidInput


class RankOn(NamedTuple):
    """A rank on a node, and the GPUs that it has there. `kind` is that of its task."""

    task_id: str
    rank: int
    gpus: tuple[int, ...]
    kind: str = ""


class HostMemory(NamedTuple):
    """What is in use of a machine's memory, of all that may be used there. `at_s` is by the head's clock."""

    at_s: float
    used_gib: float
    total_gib: float


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One post of a node. `sent_s` is by its own clock; `gpus` is how many it should have, `dropped` how many windows
    it could not keep until the head took them. `leaving`: it says goodbye. `memory` is told now and then.
    """

    group: str
    replica: str
    index: int
    sent_s: float
    windows: Batch
    gpus: int
    interval_s: float
    raylet_alive: bool
    telemetry_error: str
    running: tuple[RankOn, ...]
    dropped: int
    leaving: bool
    memory: HostMemory | None = None


def read_heartbeat(raw: Mapping[str, Any], now_s: float) -> Heartbeat:
    """The body of POST /v1/nodes/heartbeat, which came when the head's clock showed `now_s`. Raises InvalidInput."""
    try:
        sent_s = float(raw["t_s"])
        if not math.isfinite(sent_s):
            raise ValueError("`t_s` is not a time")
        return Heartbeat(
            group=_text(raw["group"]),
            replica=_text(raw["replica"]),
            index=int(raw["index"]),
            sent_s=sent_s,
            # Times are kept on the head's clock, so a node whose clock is wrong is neither stale nor from the future.
            windows=read_windows(raw.get("windows", []), now_s - sent_s),
            gpus=min(int(raw.get("gpus", 0)), MAX_DEVICES),
            interval_s=float(raw.get("interval_s", 1.0)),
            raylet_alive=bool(raw.get("raylet_alive")),
            telemetry_error=str(raw.get("telemetry_error") or ""),
            running=tuple(map(_rank, raw.get("running", ()))),
            dropped=int(raw.get("dropped", 0)),
            leaving=bool(raw.get("leaving")),
            memory=None if raw.get("memory") is None else HostMemory(now_s, *map(_amount, raw["memory"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
        raise InvalidInput(f"the heartbeat is damaged: {type(e).__name__}: {e}") from None


def _rank(raw: Mapping[str, Any]) -> RankOn:
    return RankOn(
        _text(raw["task_id"]), int(raw["rank"]), tuple(map(int, raw["gpus"])), str(raw.get("kind") or "")
    )


def _amount(value: Any) -> float:
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{value!r} is no amount")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is no name")
    return value
