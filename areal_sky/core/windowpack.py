"""Windows in 23 bytes each, as the head keeps them on disk, and a minute of them in one.

Numbers are half floats (three digits, 0 to 65504), not a number where nothing is known; times count in 10 ms from the
start of their block.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from areal_sky.core.telemetry import Validity
from areal_sky.core.windowcodec import Batch, with_nan

_RECORD = struct.Struct("<BBHHB8e")
_CODES = {v: i for i, v in enumerate(Validity)}
_VALUES = tuple(Validity)
_TICK_S = 0.01
_NAN = math.nan
_MOST = 65504.0  # of a half float


class Kept(NamedTuple):
    """A window as it was kept. Means, peaks and units as in `GpuWindow`."""

    device: int
    start_s: float
    end_s: float
    valid_frac: float
    validity: Validity
    utilization_mean: float | None
    utilization_p95: float | None
    utilization_max: float | None
    memory_used_gib: float | None
    memory_total_gib: float | None
    temperature_celsius: float | None
    power_watts: float | None
    sm_clock_mhz: float | None


_NUMBERS = Kept._fields[5:]


def pack(base_s: float, batch: Batch) -> bytes:
    """A block, or a part of one. Times beyond 11 minutes from `base_s` are cut there."""
    starts, ends = batch["start_s"], batch["end_s"]
    columns = (
        batch["device"], [_CODES[v] for v in batch["validity"]],
        [round((e - base_s) / _TICK_S) for e in ends],
        [round((e - s) / _TICK_S) for s, e in zip(starts, ends, strict=True)],
        [round(v * 255) for v in batch["valid_frac"]],
        *(with_nan(batch[field]) for field in _NUMBERS),
    )  # fmt: skip
    layout = "<" + _RECORD.format[1:] * len(ends)  # records have no gaps, so all go at once
    try:
        return struct.pack(layout, *chain.from_iterable(zip(*columns, strict=True)))
    except (OverflowError, struct.error):  # more than fits in
        limits = ((0, 255), (0, 255), (0, 65535), (0, 65535), (0, 255), *[(-_MOST, _MOST)] * len(_NUMBERS))
        cut = (
            [v if v != v else min(most, max(least, v)) for v in column]
            for column, (least, most) in zip(columns, limits, strict=True)
        )
        return struct.pack(layout, *chain.from_iterable(zip(*cut, strict=True)))


def unpack(base_s: float, data: bytes) -> Iterator[Kept]:
    """The windows of a block, in the order in which they were kept."""
    for device, code, end, length, valid, *numbers in _RECORD.iter_unpack(data):
        end_s = base_s + end * _TICK_S
        values = (None if n != n else n for n in numbers)
        yield Kept(device, end_s - length * _TICK_S, end_s, valid / 255, _VALUES[code], *values)


def rolled_up(base_s: float, data: bytes) -> bytes:
    """A block with one window per device: means of means, peaks of peaks, KNOWN if half of the time was known."""
    by_device: dict[int, list[tuple[float, ...]]] = {}
    for record in _RECORD.iter_unpack(data):
        by_device.setdefault(record[0], []).append(record)
    known_code = _CODES[Validity.KNOWN]
    packed: list[bytes] = []
    for device, records in sorted(by_device.items()):
        columns = [[r[i] for r in records if r[i] == r[i]] for i in range(5, 13)]
        ends = [r[2] for r in records]
        first = min(r[2] - r[3] for r in records)
        known = sum(1 for r in records if r[1] == known_code)
        code = known_code if 2 * known >= len(records) else int(records[-1][1])
        if code == known_code and 2 * known < len(records):
            code = _CODES[Validity.UNKNOWN]
        mean, p95, top, used, total, celsius, watts, mhz = columns
        numbers = (
            _mean(mean), max(p95, default=_NAN), max(top, default=_NAN), max(used, default=_NAN),
            max(total, default=_NAN), max(celsius, default=_NAN), _mean(watts), _mean(mhz),
        )  # fmt: skip
        valid = round(sum(r[4] for r in records) / len(records))
        packed.append(_RECORD.pack(device, code, max(ends), max(0, int(max(ends) - first)), valid, *numbers))
    return b"".join(packed)


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else _NAN
