"""Samples and windows of GPU telemetry, with how far each can be trusted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Any, NamedTuple, Protocol

# A window tells the load only if at least this share of its samples came and were known. Half: a sampler that was
# starved for a moment still counts, a window with one lucky read out of ten does not.
MIN_VALID_FRAC = 0.5

# A window is about a second, so ten missed ones in a row are no hiccup.
STALE_AFTER_S = 10.0

# A replica's load is the mean over this long: enough to even out the steps of an RL loop, short enough that a task
# that has ended no longer shows.
LOAD_OVER_S = 5.0


class Validity(StrEnum):
    KNOWN = "known"
    UNKNOWN = "unknown"  # the device does not tell (N/A): never read as 0
    STALE = "stale"  # older than it may be
    LOST = "lost"  # the device fell off the bus or its driver failed


class GpuSample(NamedTuple):  # ten times as quick to make as a frozen dataclass, and there are many
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
    uuid: str = ""
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle: tuple[str, ...] | None = None  # why the clocks are held down, "hw_thermal" say; (): they are not
    ecc_uncorrected: int | None = None  # since the driver was loaded, as all ECC counts here
    ecc_corrected: int | None = None
    pcie_rx_mib_s: float | None = None
    pcie_tx_mib_s: float | None = None
    nvlink_mib_s: float | None = None  # both ways, all links
    xid: int | None = None  # the driver's error number, only in the first sample after it came
    processes: tuple[tuple[int, float], ...] = ()  # (pid, GiB)
    # The driver's own measurements of utilization since the read before: (its clock in s, 0..1). Empty: no new one,
    # `utilization_frac` is the last one again; or this driver does not tell when it measured.
    measured: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class GpuWindow:
    """About a second of samples of one device. `valid_frac` is the share of expected samples that were known.

    `utilization_*` are None unless `validity` is KNOWN. Memory and temperature are the highest seen (peaks are what
    kills a task), `throttle` names every reason seen, ECC counts, `xid` and `processes` are the last ones, all else is
    the mean; they are told even where the utilization is not.
    """

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
    uuid: str = ""
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle: tuple[str, ...] | None = None
    ecc_uncorrected: int | None = None
    ecc_corrected: int | None = None
    pcie_rx_mib_s: float | None = None
    pcie_tx_mib_s: float | None = None
    nvlink_mib_s: float | None = None
    xid: int | None = None
    processes: tuple[tuple[int, float], ...] = ()


class Load(Protocol):
    """What of a window tells a load: a GpuWindow, or less."""

    @property
    def end_s(self) -> float: ...
    @property
    def utilization_mean(self) -> float | None: ...
    @property
    def validity(self) -> Validity: ...


class LoadReading(NamedTuple):
    """Mean utilization (0..1) of a set of GPUs, and how far to trust it.

    `utilization_mean` is None unless `validity` is KNOWN. `age_s` is the age of the oldest device's latest window;
    None when a device has none.
    """

    utilization_mean: float | None
    validity: Validity
    age_s: float | None


def window(samples: Sequence[GpuSample], start_s: float, end_s: float, expected: int) -> GpuWindow:
    """Summarise the samples of ONE device taken in (start_s, end_s]; `expected` is how many were due.

    LOST when the last read found the device lost, STALE when the driver has not answered it lately, UNKNOWN when fewer
    than half of the due reads told a utilization (N/A is left out of every mean, never counted as 0), else KNOWN.
    A measurement of the driver counts once, however many reads saw it.
    Raises ValueError on no samples, or on those of two devices.
    """
    if not samples:
        raise ValueError("a window needs at least one sample")
    last = samples[-1]
    values = _Values(samples)
    if not values.alike("device"):
        raise ValueError("samples of two devices in one window")
    told = values.known("utilization_frac")
    valid_frac = min(1.0, len(told) / max(1, expected))
    measured = dict(chain.from_iterable(values["measured"]))
    loads = sorted(measured.values()) if measured else sorted(told)
    if last.validity in (Validity.LOST, Validity.STALE):
        validity = last.validity
    elif told and valid_frac >= MIN_VALID_FRAC:
        validity = Validity.KNOWN
    else:
        validity = Validity.UNKNOWN
    known = validity is Validity.KNOWN
    return GpuWindow(
        device=last.device,
        name=last.name,
        start_s=start_s,
        end_s=end_s,
        utilization_mean=_mean(loads) if known else None,
        utilization_p95=_p95(loads) if known else None,
        utilization_max=loads[-1] if known else None,
        memory_used_gib=values.max("memory_used_gib"),
        memory_total_gib=values.max("memory_total_gib"),
        temperature_celsius=values.max("temperature_celsius"),
        power_watts=values.mean("power_watts"),
        valid_frac=valid_frac,
        validity=validity,
        error=last.error or ("" if known else _why_unknown(samples, len(told), expected)),
        uuid=last.uuid,
        sm_clock_mhz=values.mean("sm_clock_mhz"),
        memory_clock_mhz=values.mean("memory_clock_mhz"),
        throttle=values.union("throttle"),
        ecc_uncorrected=values.last("ecc_uncorrected"),
        ecc_corrected=values.last("ecc_corrected"),
        pcie_rx_mib_s=values.mean("pcie_rx_mib_s"),
        pcie_tx_mib_s=values.mean("pcie_tx_mib_s"),
        nvlink_mib_s=values.mean("nvlink_mib_s"),
        xid=values.last("xid"),
        processes=last.processes,
    )


class _Values:
    """What is known of each field over some samples, oldest first. Most fields are read once a second, and repeated."""

    def __init__(self, samples: Sequence[GpuSample]):
        columns: Iterable[tuple[Any, ...]] = zip(*samples, strict=True)
        self._columns = dict(zip(GpuSample._fields, columns, strict=True))

    def __getitem__(self, field: str) -> tuple[Any, ...]:
        return self._columns[field]

    def alike(self, field: str) -> bool:
        column = self._columns[field]
        return column.count(column[0]) == len(column)

    def known(self, field: str) -> Sequence[Any]:
        column = self._columns[field]
        return [v for v in column if v is not None] if None in column else column

    def mean(self, field: str) -> float | None:
        return self._columns[field][0] if self.alike(field) else _mean(self.known(field))

    def max(self, field: str) -> float | None:
        return self._columns[field][0] if self.alike(field) else max(self.known(field), default=None)

    def last(self, field: str) -> int | None:
        return self._columns[field][0] if self.alike(field) else next(reversed(self.known(field)), None)

    def union(self, field: str) -> tuple[str, ...] | None:
        told = set(self.known(field))
        return tuple(sorted(set(chain.from_iterable(told)))) if told else None


def windows(
    samples: Sequence[GpuSample], start_s: float, end_s: float, expected: int
) -> tuple[GpuWindow, ...]:
    """One `window` per device seen in `samples`, by device number."""
    devices: dict[int, list[GpuSample]] = {}
    for sample in samples:
        devices.setdefault(sample.device, []).append(sample)
    return tuple(window(devices[d], start_s, end_s, expected) for d in sorted(devices))


def replica_load(
    devices: Sequence[Sequence[Load]], now_s: float, stale_after_s: float = STALE_AFTER_S
) -> LoadReading:
    """The load of a replica from the recent windows (oldest first) of each of its GPUs.

    Every GPU that the replica should have takes a place in `devices`; one that was never heard of is an empty
    sequence. The worst device decides: the load is KNOWN only if each latest window is known and fresh, because the
    mean of seven known GPUs says nothing of the eighth. The windows of the last `LOAD_OVER_S` are averaged, of each
    device the latest one at least.
    """
    latest = [d[-1] if d else None for d in devices]
    ages = [None if w is None else max(0.0, now_s - w.end_s) for w in latest]
    told = [a for a in ages if a is not None]
    age_s = max(told) if told and len(told) == len(ages) else None
    if not devices or any(w is None for w in latest):
        return LoadReading(None, Validity.UNKNOWN, age_s)
    states = {freshness(w, now_s, stale_after_s) for w in latest if w is not None}
    for worst in (Validity.LOST, Validity.STALE, Validity.UNKNOWN):
        if worst in states:
            return LoadReading(None, worst, age_s)
    means = [_recent_mean(d, now_s) for d in devices]
    return LoadReading(_mean([m for m in means if m is not None]), Validity.KNOWN, age_s)


def freshness(latest: Load, now_s: float, stale_after_s: float = STALE_AFTER_S) -> Validity:
    """How far a device's latest window can be trusted at `now_s`: too old is STALE whatever it said."""
    return Validity.STALE if now_s - latest.end_s > stale_after_s else latest.validity


def _recent_mean(device: Sequence[Load], now_s: float) -> float | None:
    recent = [w for w in device if now_s - w.end_s <= LOAD_OVER_S] or [device[-1]]
    return _mean([w.utilization_mean for w in recent if w.utilization_mean is not None])


def _why_unknown(samples: Sequence[GpuSample], known: int, expected: int) -> str:
    if known:
        return f"only {known} of {expected} samples were known"
    return next((s.error for s in reversed(samples) if s.error), "the device tells no utilization")


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _p95(ordered: Sequence[float]) -> float:
    """The smallest value that at least 95 % of the values do not exceed (nearest rank: no made-up values)."""
    return ordered[max(0, math.ceil(0.95 * len(ordered)) - 1)]
