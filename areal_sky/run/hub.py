"""The head's memory of GPU telemetry, fed by the nodes' heartbeats: two minutes of 1 s windows per GPU at hand, an
hour of them and a week of minutes on disk (`adapters/windowstore.py`).
"""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_sky.adapters.windowstore import WindowStore
from areal_sky.core.gpuseries import Point, Series, in_slots, per_second
from areal_sky.core.heartbeat import Heartbeat, RankOn
from areal_sky.core.nodeenv import DEFAULT_LEASE_S, GroupShape
from areal_sky.core.sampling import beat_every_s
from areal_sky.core.telemetry import STALE_AFTER_S, GpuWindow, LoadReading, Validity, freshness, replica_load
from areal_sky.core.windowcodec import FIELDS, Batch, with_nan
from areal_sky.core.windowpack import pack

KEEP_WINDOWS = 120  # per GPU, at hand
BLOCK_S = 60.0  # what goes to disk at once
KEEP_PEAKS = 10_000  # tasks whose memory is remembered
ALIVE_S = 15.0  # heartbeats come each second, of a thousand nodes each fifth; one that is this late is no hiccup

NodeKey = tuple[str, int]  # replica, index


@dataclass(slots=True)
class _NodeRecord:
    beat: Heartbeat  # the latest
    heard_s: float
    block_until_s: float  # when the windows at hand are put on disk
    seen: dict[int, float] = field(default_factory=dict[int, float])  # by the node's clock: each device's newest window
    series: dict[int, Series] = field(default_factory=dict[int, Series])
    latest: dict[int, tuple[Batch, int]] = field(default_factory=dict[int, tuple[Batch, int]])  # and its place there
    owners: dict[int, str] = field(default_factory=dict[int, str])  # device -> the one task on it
    block: list[bytes] = field(default_factory=list[bytes])  # packed windows that are not on disk
    block_s: tuple[float, float] = (0.0, 0.0)


class TelemetryHub:
    """Takes heartbeats, answers questions; safe to use from many threads. Only what is in `store` survives the process.

    `groups` says how many nodes a replica must have, so that a node never heard of makes its replica's load unknown.
    A node silent for longer than `lease_s` has ended itself, so it is forgotten.
    """

    def __init__(
        self,
        groups: Sequence[GroupShape] = (),
        *,
        lease_s: float = DEFAULT_LEASE_S,
        stale_after_s: float = STALE_AFTER_S,
        store: WindowStore | None = None,
    ):
        self._nodes_per_replica = {g.name: g.nodes_per_replica for g in groups}
        self._lease_s = lease_s
        self._stale_after_s = stale_after_s
        self._store = store
        self._lock = threading.Lock()
        self._nodes: dict[NodeKey, _NodeRecord] = {}
        self._ending: set[str] = set()
        self._peaks: OrderedDict[str, tuple[float, float]] = OrderedDict()  # task -> (GiB of its fullest GPU, when)

    def ingest(self, beat: Heartbeat, now_s: float) -> dict[str, Any]:
        """Take one heartbeat; what the node should do, as part of the answer. A repeated window is kept once."""
        key = (beat.replica, beat.index)
        with self._lock:
            if beat.leaving:
                if (node := self._nodes.pop(key, None)) is not None:
                    self._put_away(key, node)
                return {}
            node = self._nodes.get(key)
            if node is None:
                self._ending.discard(key[0])  # a new replica of an old name
                node = self._nodes[key] = _NodeRecord(beat, now_s, now_s + _first_block_s(key))
                node.owners = _owners(beat.running)
            if beat.running != node.beat.running:
                node.owners = _owners(beat.running)
            if beat.sent_s < node.beat.sent_s:  # its clock was set back
                node.seen.clear()
            node.beat, node.heard_s = beat, now_s
            windows = beat.windows.newer(node.seen, beat.windows.sent_end_s)
            if windows:
                self._take(key, node, windows, now_s)
            return {"beat_s": beat_every_s(len(self._nodes))}

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

    def gpus(self, seconds: float, now_s: float, points: int = 0) -> dict[str, Any]:
        """The body of GET /v1/gpus: every GPU's latest window and `history`, its mean utilization over the last
        `seconds` (oldest first, None where nothing is known): one value per second of the last two minutes, or with
        `points` that many values over up to a week. Each GPU has `validity`, `age_s` and `error`; a GPU that its node
        should have and that was never reported is listed as unknown.
        """
        with self._lock:
            self._expire(now_s)
            records = sorted(self._nodes.items())
            nodes = [self._node_body(key, node, seconds, now_s) for key, node in records]
            recent = {key: {d: s.since(0.0) for d, s in node.series.items()} for key, node in records} if points else {}
        for body in nodes if points else ():
            key = (body["replica"], body["index"])
            for gpu in body["gpus"]:
                gpu["history"] = in_slots(
                    self._past(key, gpu["device"], recent[key].get(gpu["device"], []), now_s - seconds, now_s),
                    points, now_s - seconds, now_s,
                )  # fmt: skip
        return {"t_s": now_s, "seconds": seconds, "nodes": nodes}

    def close(self) -> None:
        """Write what is not on disk, and close the store."""
        with self._lock:
            for key, node in self._nodes.items():
                self._put_away(key, node)
        if self._store is not None:
            self._store.close()

    def _past(self, key: NodeKey, device: int, recent: list[Point], since_s: float, now_s: float) -> list[Point]:
        until_s = recent[0].start_s if recent else now_s
        kept = self._store.read(*key, since_s, until_s) if self._store is not None else []
        old = [Point(k.start_s, k.end_s, k.utilization_mean) for k in kept if k.device == device]
        return old + recent

    # ------------------------------------------------------------ inside, the lock held

    def _take(self, key: NodeKey, node: _NodeRecord, windows: Batch, now_s: float) -> None:
        starts, ends, means = windows["start_s"], windows["end_s"], with_nan(windows["utilization_mean"])
        for device, places in windows.places.items():
            series = node.series.get(device)
            if series is None:
                series = node.series[device] = Series(KEEP_WINDOWS)
            series.extend(starts[places], ends[places], means[places])
            node.latest[device] = (windows, places.stop - 1)
            if (task_id := node.owners.get(device)) is not None:
                held = [gib for gib in windows["memory_used_gib"][places] if gib is not None]
                self._note_peak(task_id, max(held, default=0.0), now_s)
        if self._store is not None:
            if node.block and not node.block_s[0] <= ends[-1] < node.block_until_s:
                self._put_away(key, node)
                node.block_until_s = starts[0] + BLOCK_S
            base_s = node.block_s[0] if node.block else starts[0]
            node.block_s = (base_s, ends[-1])
            node.block.append(pack(base_s, windows))

    def _put_away(self, key: NodeKey, node: _NodeRecord) -> None:
        if self._store is not None and node.block:
            self._store.put(*key, *node.block_s, b"".join(node.block))
        node.block = []

    def _note_peak(self, task_id: str, gib: float, now_s: float) -> None:
        self._peaks[task_id] = (max(gib, self._peaks.pop(task_id, (0.0, 0.0))[0]), now_s)
        while len(self._peaks) > KEEP_PEAKS:
            self._peaks.popitem(last=False)

    def _expire(self, now_s: float) -> None:
        for key, node in list(self._nodes.items()):
            patience_s = ALIVE_S if key[0] in self._ending else self._lease_s
            if now_s - node.heard_s > patience_s:
                self._put_away(key, self._nodes.pop(key))

    def _load(self, nodes: list[_NodeRecord], now_s: float) -> LoadReading:
        devices: list[list[Point]] = []
        for node in nodes:
            for device in _devices(node):
                series, latest = node.series.get(device), node.latest.get(device)
                points = series.since(now_s - self._stale_after_s) if series is not None else []
                if points and latest is not None:  # a lost device is no unknown one
                    points[-1] = Point(*points[-1][:3], latest[0]["validity"][latest[1]])
                devices.append(points)
        if len(nodes) < self._nodes_per_replica.get(nodes[0].beat.group, len(nodes)):
            devices.append([])  # a node that was never heard of
        return replica_load(devices, now_s, self._stale_after_s)

    def _node_body(self, key: NodeKey, node: _NodeRecord, seconds: float, now_s: float) -> dict[str, Any]:
        silent_s, beat = max(0.0, now_s - node.heard_s), node.beat
        return {
            "replica": key[0],
            "index": key[1],
            "group": beat.group,
            "alive": silent_s <= ALIVE_S,
            "age_s": silent_s,
            "interval_s": beat.interval_s,
            "raylet_alive": beat.raylet_alive,
            "telemetry_error": beat.telemetry_error,
            "dropped_windows": beat.dropped,
            "running": [r._asdict() for r in beat.running],
            "gpus": [self._gpu_body(node, device, seconds, now_s) for device in _devices(node)],
        }

    def _gpu_body(self, node: _NodeRecord, device: int, seconds: float, now_s: float) -> dict[str, Any]:
        series = node.series.get(device)
        latest = _window_of(node, device)
        body: dict[str, Any] = {
            "device": device,
            "tasks": sorted({r.task_id for r in node.beat.running if device in r.gpus}),
            "history": per_second(series.since(now_s - seconds) if series is not None else (), seconds, now_s),
        }
        if latest is None:
            error = node.beat.telemetry_error or "its node has not reported this GPU"
            return body | dict.fromkeys(_TOLD) | {"name": "GPU", "validity": Validity.UNKNOWN.value, "error": error}
        validity = freshness(latest, now_s, self._stale_after_s)
        return body | {
            "name": latest.name,
            "validity": validity.value,
            "error": latest.error or node.beat.telemetry_error,
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
            **{f: getattr(latest, f) for f in _MORE},
        }


_MORE = FIELDS[FIELDS.index("uuid") :]
_TOLD = (
    "age_s", "utilization", "utilization_p95", "utilization_max", "memory_used_gib", "memory_total_gib",
    "temperature_celsius", "power_watts", "valid_frac", *_MORE,
)  # fmt: skip

def _devices(node: _NodeRecord) -> list[int]:
    """Devices that the node reported, and those that it should have reported."""
    return sorted(set(range(node.beat.gpus)) | set(node.series))


def _window_of(node: _NodeRecord, device: int) -> GpuWindow | None:
    told = node.latest.get(device)
    return None if told is None else told[0].window(told[1])


def _first_block_s(key: NodeKey) -> float:
    """Nodes that started together do not write to disk together."""
    return BLOCK_S * (zlib.crc32(f"{key[0]}/{key[1]}".encode()) % 1000) / 1000


def _owners(running: Sequence[RankOn]) -> dict[int, str]:
    """Device -> the one task that has it. Of a GPU that several tasks share nobody knows whose the memory is."""
    owners: dict[int, str] = {}
    shared: set[int] = set()
    for r in running:
        for device in r.gpus:
            if owners.setdefault(device, r.task_id) != r.task_id:
                shared.add(device)
    return {d: t for d, t in owners.items() if d not in shared}
