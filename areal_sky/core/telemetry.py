"""Samples and windows of GPU telemetry, with how far each can be trusted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Validity(StrEnum):
    KNOWN = "known"
    UNKNOWN = "unknown"  # the device does not tell (N/A): never read as 0
    STALE = "stale"  # older than it may be
    LOST = "lost"  # the device fell off the bus or its driver failed


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One read of one device at `t_s`. A field is None when the device does not tell."""

    device: int
    t_s: float
    name: str
    utilization_frac: float | None  # 0..1, share of the driver's own window in which a kernel ran
    memory_used_gib: float | None
    memory_total_gib: float | None
    temperature_celsius: float | None
    power_watts: float | None
    validity: Validity = Validity.KNOWN
    error: str = ""


@dataclass(frozen=True, slots=True)
class GpuWindow:
    """About a second of samples of one device. `valid_frac` is the share of expected samples that were known."""

    device: int
    name: str
    start_s: float
    end_s: float
    utilization_mean: float | None
    utilization_p95: float | None
    utilization_max: float | None
    memory_used_gib: float | None
    memory_total_gib: float | None
    temperature_celsius: float | None
    power_watts: float | None
    valid_frac: float
    validity: Validity
    error: str = ""
