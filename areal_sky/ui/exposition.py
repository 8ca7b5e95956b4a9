"""GET /metrics: what is known now, in Prometheus' text format (0.0.4), base units, labels bounded.

What is not known is left out, never 0. A GPU has its place as labels, a task its id; values that tasks report come
under one name, at most MAX_TASK_SERIES of them, and how many were left out is told.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from areal_sky.adapters.processes import rss_mib
from areal_sky.core.heartbeat import read_heartbeat
from areal_sky.core.view import HeadView
from areal_sky.errors import Unreachable
from areal_sky.run.hub import TelemetryHub
from areal_sky.run.tasks import TaskService
from areal_sky.run.watch import Watch

EXPOSITION_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_TASK_SERIES = 2000
GIB, MIB, MHZ = 2.0**30, 2.0**20, 1e6
PREFIX = "areal_sky_"

Labels = Mapping[str, str]
Sample = tuple[Labels, float]


class Family(NamedTuple):
    name: str
    kind: str  # gauge or counter
    help: str
    samples: Iterable[Sample]


# field of GET /v1/gpus -> (name, kind, factor to the base unit, help)
GPU_FIELDS: dict[str, tuple[str, str, float, str]] = {
    "utilization": ("gpu_utilization_ratio", "gauge", 1.0, "Share of the last second in which a kernel ran."),
    "memory_used_gib": ("gpu_memory_used_bytes", "gauge", GIB, "Memory in use, the highest of the last second."),
    "memory_total_gib": ("gpu_memory_total_bytes", "gauge", GIB, "Memory of the device."),
    "temperature_celsius": ("gpu_temperature_celsius", "gauge", 1.0, "Temperature, the highest of the last second."),
    "power_watts": ("gpu_power_watts", "gauge", 1.0, "Power draw, the mean of the last second."),
    "sm_clock_mhz": ("gpu_sm_clock_hertz", "gauge", MHZ, "Clock of the streaming multiprocessors."),
    "memory_clock_mhz": ("gpu_memory_clock_hertz", "gauge", MHZ, "Clock of the memory."),
    "pcie_rx_mib_s": ("gpu_pcie_receive_bytes_per_second", "gauge", MIB, "PCIe traffic to the device."),
    "pcie_tx_mib_s": ("gpu_pcie_transmit_bytes_per_second", "gauge", MIB, "PCIe traffic from the device."),
    "nvlink_mib_s": ("gpu_nvlink_bytes_per_second", "gauge", MIB, "NVLink traffic, both ways, all links."),
    "ecc_uncorrected": ("gpu_ecc_uncorrected_errors_total", "counter", 1.0, "Uncorrectable memory errors."),
    "ecc_corrected": ("gpu_ecc_corrected_errors_total", "counter", 1.0, "Memory errors that were corrected."),
    "valid_frac": ("gpu_valid_ratio", "gauge", 1.0, "Share of the last second's samples that were known."),
    "age_s": ("gpu_age_seconds", "gauge", 1.0, "Age of what is known of the device."),
}


def exposition(cluster: str, service: TaskService, hub: Any, watch: Watch | None, now_s: float) -> str:
    """The page. `hub` is the TelemetryHub or None."""
    nodes = hub.gpus(0, now_s)["nodes"] if hub is not None else []
    try:
        view = service.view()
    except Unreachable:
        view = None
    families = [*_gpus(nodes), *_nodes(nodes), *_tasks(service, view), *_process("head")]
    if watch is not None:
        families += _alerts(watch)
    return "".join(_text(f, {"cluster": cluster}) for f in families)


def node_exposition(heartbeat: Mapping[str, Any], now_s: float) -> str:
    """The page of one node, from what its agent knows (`Agent.known`)."""
    hub = TelemetryHub()
    hub.ingest(read_heartbeat(heartbeat, now_s), now_s)
    families = [*_gpus(hub.gpus(0, now_s)["nodes"]), *_process("agent")]
    return "".join(_text(f, {"cluster": str(heartbeat["cluster"])}) for f in families)


def _gpus(nodes: list[dict[str, Any]]) -> Iterator[Family]:
    gpus = [(_place(n) | {"gpu": str(g["device"])}, g) for n in nodes for g in n["gpus"]]
    for field, (name, kind, factor, told) in GPU_FIELDS.items():
        samples = [(where, g[field] * factor) for where, g in gpus if g.get(field) is not None]
        yield Family(name, kind, told, samples)
    known = [(where, float(g["validity"] == "known")) for where, g in gpus]
    yield Family("gpu_known", "gauge", "1 where the device tells its load, 0: unknown, stale or lost.", known)
    lost = [(where, float(g["validity"] == "lost")) for where, g in gpus]
    yield Family("gpu_lost", "gauge", "1 where the device fell off the bus or its driver failed.", lost)
    held = [(where, why) for where, g in gpus if (why := g.get("throttle")) is not None]
    hot = [(where, float(any("thermal" in reason for reason in why))) for where, why in held]
    yield Family("gpu_thermal_throttled", "gauge", "1 where the device is slowed down for its heat.", hot)


def _nodes(nodes: list[dict[str, Any]]) -> Iterator[Family]:
    up = [(_place(n), float(n["alive"])) for n in nodes]
    yield Family("node_up", "gauge", "1 where the node's agent was heard within 15 s.", up)
    age = [(_place(n), float(n["age_s"])) for n in nodes]
    yield Family("node_heartbeat_age_seconds", "gauge", "Time since the node's agent was heard.", age)


def _tasks(service: TaskService, view: HeadView | None) -> Iterator[Family]:
    if view is not None:
        states = [({"state": "running"}, float(view.running_tasks)), ({"state": "waiting"}, float(view.waiting_tasks))]
        yield Family("tasks", "gauge", "Tasks that hold resources, or wait for them.", states)
        longest = max((d.waiting_s for d in view.demand), default=0.0)
        told = "The longest time that a task has waited which more machines would help."
        yield Family("queue_longest_wait_seconds", "gauge", told, [({}, longest)])
    reported = [
        ({"task": r.run.task_id, "metric": name}, value)
        for r in service.running()
        for name, value in sorted(r.metrics.items())
    ]
    told = "The latest value that a running task has reported, by the task's own name for it."
    yield Family("task_reported", "gauge", told, reported[:MAX_TASK_SERIES])
    left_out = float(max(0, len(reported) - MAX_TASK_SERIES))
    told = "Values of tasks for which there was no room here."
    yield Family("task_reported_left_out", "gauge", told, [({}, left_out)])


def _alerts(watch: Watch) -> Iterator[Family]:
    active, raised = watch.counts()
    samples = [({"kind": kind}, float(n)) for kind, n in sorted(active.items())]
    yield Family("alerts_active", "gauge", "Alerts that are active.", samples)
    samples = [({"kind": kind}, float(n)) for kind, n in sorted(raised.items())]
    yield Family("alerts_raised_total", "counter", "Alerts that were raised since the head started.", samples)


def _process(whose: str) -> Iterator[Family]:
    told = f"CPU time of the {whose}'s process."
    yield Family(f"{whose}_cpu_seconds_total", "counter", told, [({}, time.process_time())])
    told = f"Memory of the {whose}'s process."
    yield Family(f"{whose}_resident_memory_bytes", "gauge", told, [({}, rss_mib(os.getpid()) * MIB)])


def _place(node: Mapping[str, Any]) -> dict[str, str]:
    return {"group": str(node["group"]), "replica": str(node["replica"]), "node": str(node["index"])}


def _text(family: Family, common: Labels) -> str:
    samples = list(family.samples)
    if not samples:
        return ""
    name = PREFIX + family.name
    lines = [f"# HELP {name} {family.help}\n# TYPE {name} {family.kind}\n"]
    for labels, value in samples:
        told = ",".join(f'{k}="{_escaped(v)}"' for k, v in {**common, **labels}.items())
        lines.append(f"{name}{{{told}}} {value!r}\n")
    return "".join(lines)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
