"""The head's memory of GPU telemetry: an hour of 1 s windows per GPU, fed by the nodes' heartbeats.

Times are kept on the head's clock: a heartbeat says what its node's clock showed when it left, so a node whose clock
is wrong is neither stale nor from the future.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from areal_sky.core.nodeenv import DEFAULT_LEASE_S, GroupShape
from areal_sky.core.telemetry import STALE_AFTER_S, GpuWindow, LoadReading, Validity, freshness, replica_load
from areal_sky.errors import InvalidInput

KEEP_WINDOWS = 3600  # per GPU: an hour, about 1 MB
KEEP_PEAKS = 10_000  # tasks whose memory is remembered
ALIVE_S = 15.0  # heartbeats come each second; one that is this late is no hiccup
MAX_GPUS_PER_NODE = 256

NodeKey = tuple[str, int]  # replica, index


@dataclass(slots=True)
class _NodeRecord:
    group: str
    gpus: int = 0
    interval_s: float = 1.0
    heard_s: float = 0.0
    raylet_alive: bool = False
    telemetry_error: str = ""
    running: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    # device -> the node's own end time of a window -> that window on the head's clock, oldest first
    rings: dict[int, dict[float, GpuWindow]] = field(default_factory=dict[int, dict[float, GpuWindow]])


class TelemetryHub:
    """Takes heartbeats, answers questions; safe to use from many threads. Nothing here survives the process.

    `groups` says how many nodes a replica must have, so that a node never heard of makes its replica's load unknown.
    A node silent for longer than `lease_s` has ended itself, so it is forgotten.
    """

    def __init__(
        self,
        groups: Sequence[GroupShape] = (),
        *,
        lease_s: float = DEFAULT_LEASE_S,
        stale_after_s: float = STALE_AFTER_S,
    ):
        self._nodes_per_replica = {g.name: g.nodes_per_replica for g in groups}
        self._lease_s = lease_s
        self._stale_after_s = stale_after_s
        self._lock = threading.Lock()
        self._nodes: dict[NodeKey, _NodeRecord] = {}
        self._ending: set[str] = set()
        self._peaks: OrderedDict[str, tuple[float, float]] = OrderedDict()  # task -> (GiB of its fullest GPU, when)

    def ingest(self, heartbeat: Mapping[str, Any], now_s: float) -> None:
        """Take one heartbeat (the body of POST /v1/nodes/heartbeat). A repeated window is kept once.

        Raises InvalidInput when it cannot be understood; nothing of it is kept then.
        """
        try:
            key = (_text(heartbeat["replica"]), int(heartbeat["index"]))
            group = _text(heartbeat["group"])
            sent_s = float(heartbeat["t_s"])
            news = [_window(w) for w in heartbeat.get("windows", ())]
            gpus = int(heartbeat.get("gpus", 0))
            interval_s = float(heartbeat.get("interval_s", 1.0))
            running = [_running(r) for r in heartbeat.get("running", ())]
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise InvalidInput(f"the heartbeat is damaged: {type(e).__name__}: {e}") from None
        if not math.isfinite(sent_s):
            raise InvalidInput("the heartbeat is damaged: `t_s` is not a time")
        with self._lock:
            if heartbeat.get("leaving"):
                self._nodes.pop(key, None)
                return
            if key not in self._nodes:
                self._ending.discard(key[0])  # a new replica of an old name
            node = self._nodes.setdefault(key, _NodeRecord(group))
            node.group = group
            node.gpus = min(gpus, MAX_GPUS_PER_NODE)
            node.interval_s = interval_s
            node.heard_s = now_s
            node.raylet_alive = bool(heartbeat.get("raylet_alive"))
            node.telemetry_error = str(heartbeat.get("telemetry_error") or "")
            node.running = running
            for w in news:
                ring = node.rings.setdefault(w.device, {})
                if w.end_s not in ring:
                    ring[w.end_s] = replace(w, start_s=w.start_s - sent_s + now_s, end_s=w.end_s - sent_s + now_s)
                    self._note_peaks(running, w, now_s)
                    if len(ring) > KEEP_WINDOWS:
                        del ring[next(iter(ring))]

    def forget(self, replica: str) -> None:
        """Drop all nodes of a replica that is no more."""
        with self._lock:
            for key in [k for k in self._nodes if k[0] == replica]:
                del self._nodes[key]

    def expect_end(self, replica: str) -> None:
        """The replica is drained and will end: once its nodes fall silent they are gone, not in trouble."""
        with self._lock:
            self._ending.add(replica)

    def alive_nodes(self, now_s: float) -> frozenset[NodeKey]:
        """(replica, index) of the nodes that were heard within the last `ALIVE_S` seconds."""
        with self._lock:
            return frozenset(k for k, n in self._nodes.items() if now_s - n.heard_s <= ALIVE_S)

    def replica_loads(self, now_s: float) -> dict[str, LoadReading]:
        """Load per replica over its fresh windows: (utilization_mean or None, validity, age_s)."""
        with self._lock:
            self._expire(now_s)
            by_replica: dict[str, list[_NodeRecord]] = {}
            for (replica, _), node in sorted(self._nodes.items()):
                by_replica.setdefault(replica, []).append(node)
            return {name: self._load(nodes, now_s) for name, nodes in by_replica.items()}

    def peak_memory_gib(self, task_id: str, since_s: float) -> float | None:
        """The most that one of the task's GPUs was seen to hold since then; None when nothing was. Forgotten then."""
        with self._lock:
            gib, seen_s = self._peaks.pop(task_id, (0.0, 0.0))
        return gib if gib > 0 and seen_s >= since_s else None

    def gpus(self, seconds: float, now_s: float) -> dict[str, Any]:
        """The body of GET /v1/gpus: every GPU's latest window and `history`, its mean utilization per second over the
        last `seconds` (oldest first, None where nothing is known). Each GPU has `validity`, `age_s` and `error`;
        a GPU that its node should have and that was never reported is listed as unknown.
        """
        with self._lock:
            self._expire(now_s)
            nodes = [self._node_body(key, node, seconds, now_s) for key, node in sorted(self._nodes.items())]
        return {"t_s": now_s, "seconds": seconds, "nodes": nodes}

    # ------------------------------------------------------------ inside, the lock held

    def _note_peaks(self, running: Sequence[Mapping[str, Any]], w: GpuWindow, now_s: float) -> None:
        """Of a GPU that several tasks share nobody knows whose the memory is."""
        mine = [r["task_id"] for r in running if w.device in r["gpus"]]
        if len(mine) != 1 or w.memory_used_gib is None:
            return
        self._peaks[mine[0]] = (max(w.memory_used_gib, self._peaks.pop(mine[0], (0.0, 0.0))[0]), now_s)
        while len(self._peaks) > KEEP_PEAKS:
            self._peaks.popitem(last=False)

    def _expire(self, now_s: float) -> None:
        for key, node in list(self._nodes.items()):
            patience_s = ALIVE_S if key[0] in self._ending else self._lease_s
            if now_s - node.heard_s > patience_s:
                del self._nodes[key]

    def _load(self, nodes: list[_NodeRecord], now_s: float) -> LoadReading:
        devices: list[list[GpuWindow]] = []
        for node in nodes:
            for device in _devices(node):
                devices.append(_since(node.rings.get(device, {}), now_s - self._stale_after_s))
        if len(nodes) < self._nodes_per_replica.get(nodes[0].group, len(nodes)):
            devices.append([])  # a node that was never heard of
        return replica_load(devices, now_s, self._stale_after_s)

    def _node_body(self, key: NodeKey, node: _NodeRecord, seconds: float, now_s: float) -> dict[str, Any]:
        silent_s = max(0.0, now_s - node.heard_s)
        return {
            "replica": key[0],
            "index": key[1],
            "group": node.group,
            "alive": silent_s <= ALIVE_S,
            "age_s": silent_s,
            "interval_s": node.interval_s,
            "raylet_alive": node.raylet_alive,
            "telemetry_error": node.telemetry_error,
            "running": node.running,
            "gpus": [self._gpu_body(node, device, seconds, now_s) for device in _devices(node)],
        }

    def _gpu_body(self, node: _NodeRecord, device: int, seconds: float, now_s: float) -> dict[str, Any]:
        ring = node.rings.get(device, {})
        latest = next(reversed(ring.values()), None)
        body: dict[str, Any] = {
            "device": device,
            "tasks": sorted({r["task_id"] for r in node.running if device in r["gpus"]}),
            "history": _history(_since(ring, now_s - seconds), seconds, now_s),
        }
        if latest is None:
            error = node.telemetry_error or "its node has not reported this GPU"
            return body | dict.fromkeys(_TOLD) | {"name": "GPU", "validity": Validity.UNKNOWN.value, "error": error}
        validity = freshness(latest, now_s, self._stale_after_s)
        return body | {
            "name": latest.name,
            "validity": validity.value,
            "error": latest.error or node.telemetry_error,
            "age_s": max(0.0, now_s - latest.end_s),
            # What is stale was true once; the last known value is shown with its age, but never as the load now.
            "utilization": latest.utilization_mean if validity is Validity.KNOWN else None,
            "utilization_p95": latest.utilization_p95 if validity is Validity.KNOWN else None,
            "utilization_max": latest.utilization_max if validity is Validity.KNOWN else None,
            "memory_used_gib": latest.memory_used_gib,
            "memory_total_gib": latest.memory_total_gib,
            "temperature_celsius": latest.temperature_celsius,
            "power_watts": latest.power_watts,
            "valid_frac": latest.valid_frac,
        }


_TOLD = (
    "age_s", "utilization", "utilization_p95", "utilization_max", "memory_used_gib", "memory_total_gib",
    "temperature_celsius", "power_watts", "valid_frac",
)  # fmt: skip


def _devices(node: _NodeRecord) -> list[int]:
    """Devices that the node reported, and those that it should have reported."""
    return sorted(set(range(node.gpus)) | set(node.rings))


def _since(ring: dict[float, GpuWindow], from_s: float) -> list[GpuWindow]:
    """Windows that ended after `from_s`, oldest first; the latest one in any case."""
    recent: list[GpuWindow] = []
    for w in reversed(ring.values()):
        if recent and w.end_s <= from_s:
            break
        recent.append(w)
    return recent[::-1]


def _history(recent: Sequence[GpuWindow], seconds: float, now_s: float) -> list[float | None]:
    """One value per second, oldest first: that of the window over the middle of the second."""
    slots: list[float | None] = [None] * max(0, int(seconds))
    for w in recent:
        # A little wider than the window, since heartbeats' travel times shift neighbours apart by some milliseconds.
        first = max(0, math.ceil(now_s - w.end_s - 0.55))
        last = min(len(slots) - 1, math.floor(now_s - w.start_s - 0.45))
        for age in range(first, last + 1):
            slots[-1 - age] = w.utilization_mean
    return slots


def _window(raw: Mapping[str, Any]) -> GpuWindow:
    device = int(raw["device"])
    if not 0 <= device < MAX_GPUS_PER_NODE:
        raise ValueError(f"device {device}")
    start_s, end_s = float(raw["start_s"]), float(raw["end_s"])
    if not (math.isfinite(start_s) and math.isfinite(end_s)):
        raise ValueError("a window's time is not a number")
    validity = Validity(raw["validity"])
    known = validity is Validity.KNOWN
    if known and _number(raw["utilization_mean"]) is None:
        validity, known = Validity.UNKNOWN, False
    return GpuWindow(
        device=device,
        name=str(raw["name"]),
        start_s=start_s,
        end_s=end_s,
        utilization_mean=_number(raw["utilization_mean"]) if known else None,
        utilization_p95=_number(raw["utilization_p95"]) if known else None,
        utilization_max=_number(raw["utilization_max"]) if known else None,
        memory_used_gib=_number(raw["memory_used_gib"]),
        memory_total_gib=_number(raw["memory_total_gib"]),
        temperature_celsius=_number(raw["temperature_celsius"]),
        power_watts=_number(raw["power_watts"]),
        valid_frac=float(raw["valid_frac"]),
        validity=validity,
        error=str(raw.get("error") or ""),
    )


def _running(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "task_id": _text(raw["task_id"]),
        "rank": int(raw["rank"]),
        "kind": str(raw.get("kind") or ""),
        "gpus": [int(g) for g in raw["gpus"]],
    }


def _number(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is no name")
    return value
