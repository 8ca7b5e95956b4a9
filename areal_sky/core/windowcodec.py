"""Windows on their way to the head, as columns. What is alike for all of a heartbeat's windows travels once, what is
alike for all of a device's once per device, times once for all devices. That is cheap to parse and to look through,
since most of what the head asks of windows it can ask of a whole column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, cast

from areal_sky.core.telemetry import GpuWindow, Validity

FIELDS = tuple(f.name for f in fields(GpuWindow))
MAX_DEVICES = 256  # of one node
_NEEDED = frozenset(("device", "name", "start_s", "end_s", "utilization_mean", "valid_frac", "validity"))
_DIGITS = {"s": 3, "frac": 4, "mean": 4, "p95": 4, "max": 4, "gib": 3}  # by the end of a field's name; else 1
_ROUNDED = {field: _DIGITS.get(field.rpartition("_")[2], 1) for field in FIELDS[1:]}
_VALIDITIES = {v.value: v for v in Validity}
_LOADS = ("utilization_mean", "utilization_p95", "utilization_max")
_cells, _device = attrgetter(*FIELDS), attrgetter("device")

Column = list[Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """Windows of one node, by device, each device's oldest first: `columns[field][i]` is that of window `i`.

    `places` tells which windows are a device's. Times are on the head's clock, but `sent_end_s` is on the node's.
    """

    columns: Mapping[str, Column]
    places: Mapping[int, slice]
    sent_end_s: Sequence[float]

    def __len__(self) -> int:
        return len(self.sent_end_s)

    def __getitem__(self, field: str) -> Column:
        return self.columns[field]

    def window(self, i: int) -> GpuWindow:
        return GpuWindow(*[column[i] for column in self.columns.values()])

    def windows(self) -> list[GpuWindow]:
        return list(map(GpuWindow, *self.columns.values()))

    def newer(self, seen: dict[int, float], ends_s: Sequence[float], slack_s: float = 0.0) -> Batch:
        """Those windows that ended (by `ends_s`) later than `seen` tells of their device, which then tells of them."""
        batch = self
        if ends_s and min(ends_s) <= max(seen.values(), default=-math.inf) + slack_s:
            devices = self.columns["device"]
            fresh = [i for i, d in enumerate(devices) if ends_s[i] > seen.get(d, -math.inf) + slack_s]
            if len(fresh) < len(devices):
                batch = self.those(fresh)
                ends_s = [ends_s[i] for i in fresh]
        for device, at in batch.places.items():
            seen[device] = ends_s[at.stop - 1]
        return batch

    def those(self, order: Sequence[int]) -> Batch:
        """The windows at these places, in this order, which must be by device."""
        columns = {field: [column[i] for i in order] for field, column in self.columns.items()}
        return Batch(columns, _slices(columns["device"]), [self.sent_end_s[i] for i in order])

    def in_time(self, devices: Sequence[int]) -> list[int]:
        """The places of these devices' windows, oldest first."""
        ends = self.columns["end_s"]
        found = [i for d in devices if (at := self.places.get(d)) is not None for i in range(at.start, at.stop)]
        return sorted(found, key=ends.__getitem__)


def batch_of(windows: Sequence[GpuWindow]) -> Batch:
    """Windows that have not travelled."""
    cells = zip(*map(_cells, windows), strict=True) if windows else [()] * len(FIELDS)
    columns = {field: list(column) for field, column in zip(FIELDS, cells, strict=True)}
    return _ordered(Batch(columns, _slices(sorted(columns["device"])), columns["end_s"]))


def with_nan(column: Column) -> list[float]:
    """Numbers, not a number where they are not known."""
    return [math.nan if v is None else v for v in column] if None in column else column


def to_wire(windows: Sequence[GpuWindow]) -> dict[str, dict[str, Any]]:
    """The windows as JSON values, by device and by time, rounded to what they can mean: {"same": {field: value},
    "per_device": {field: a value of each device}, "in_turn": {field: those of one device's windows, and again of the
    next one's}, "each": {field: a value of each window}}.
    """
    batch = batch_of(windows)
    slices = batch.places.values()
    turn = len(windows) // max(1, len(slices))
    wire: dict[str, dict[str, Any]] = {"same": {}, "per_device": {}, "in_turn": {}, "each": {"device": batch["device"]}}
    for field, digits in _ROUNDED.items() if windows else ():
        column = batch[field]
        if column.count(column[0]) < len(column):
            column = [round(v, digits) if isinstance(v, float) else v for v in column]
        if column.count(column[0]) == len(column):
            wire["same"][field] = round(column[0], digits) if isinstance(column[0], float) else column[0]
        elif all(column[at].count(column[at.start]) == at.stop - at.start for at in slices):
            wire["per_device"][field] = [column[at.start] for at in slices]
        elif column == column[:turn] * len(slices):
            wire["in_turn"][field] = column[:turn]
        else:
            wire["each"][field] = column
    return wire


def read_windows(wire: Any, shift_s: float) -> Batch:
    """The windows of a heartbeat, checked, `shift_s` later: what its node's clock is behind ours. A list of objects
    will do as well; fields that are not sent are None, unknown ones are left out.

    Raises KeyError, TypeError, ValueError, AttributeError or OverflowError when any of them is damaged.
    """
    if isinstance(wire, list):
        each = _of_objects(cast("list[Mapping[str, Any]]", wire))
        same = per_device = in_turn = dict[str, Any]()
    else:
        same, per_device, in_turn, each = wire["same"], wire["per_device"], wire["in_turn"], wire["each"]
    devices: Column = each["device"]
    if not all(type(d) is int and 0 <= d < MAX_DEVICES for d in devices):
        raise ValueError("a device that is none")
    numbers, count = sorted(set(devices)), len(devices)
    columns: dict[str, Column] = {"device": devices}
    for field in FIELDS[1:]:
        check = _CHECKS.get(field, _numbers)
        if field in each:
            column = check(each[field])
        elif field in per_device:
            told = dict(zip(numbers, check(per_device[field]), strict=True))
            column = [told[d] for d in devices]
        elif field in in_turn:
            column = check(in_turn[field]) * len(numbers)
        elif field in same or field not in _NEEDED or not count:
            column = check([same.get(field)] if count else []) * count
        else:
            raise KeyError(field)
        if len(column) != count:
            raise ValueError(f"{len(column)} values of {field} for {count} windows")
        columns[field] = column
    _agree(columns)
    batch = _ordered(Batch(columns, _slices(sorted(devices)), columns["end_s"]))
    if not shift_s:
        return batch
    later = {field: [t + shift_s for t in batch[field]] for field in ("start_s", "end_s")}
    return Batch({**batch.columns, **later}, batch.places, batch.sent_end_s)


def _ordered(batch: Batch) -> Batch:
    """By device and by time, as it nearly always is already, and of each device but one window of a time."""
    devices, ends = batch["device"], batch["end_s"]
    if devices == sorted(devices) and (
        len(batch.places) == len(devices) or all(ends[at] == sorted(set(ends[at])) for at in batch.places.values())
    ):
        return batch
    order = {(device, end_s): i for i, (device, end_s) in enumerate(zip(devices, ends, strict=True))}
    return batch.those([i for _, i in sorted(order.items())])


def _slices(devices: Column) -> dict[int, slice]:
    """Where each device's windows are, which follow each other."""
    places: dict[int, slice] = {}
    start = 0
    while start < len(devices):
        device = devices[start]
        stop = start + devices.count(device)
        places[device] = slice(start, stop)
        start = stop
    return places


def _of_objects(windows: list[Mapping[str, Any]]) -> dict[str, Column]:
    return {f: [w[f] if f in _NEEDED else w.get(f) for w in windows] for f in FIELDS}


def _agree(columns: dict[str, Column]) -> None:
    """A load is told if and only if it is known."""
    validity, means = columns["validity"], columns["utilization_mean"]
    if validity.count(Validity.KNOWN) == len(means) and None not in means:
        return
    for field in ("validity", *_LOADS):
        columns[field] = columns[field].copy()  # the sender's own lists may be shared
    for i, told in enumerate(validity):
        if told is Validity.KNOWN and means[i] is None:
            columns["validity"][i] = Validity.UNKNOWN
        if told is not Validity.KNOWN or means[i] is None:
            for field in _LOADS:
                columns[field][i] = None


# ------------------------------------------------------------ checks of a column; in nearly all nothing is wrong


def _numbers(column: Column) -> Column:
    """None where a number is none that can be reckoned with."""
    if column.count(None) == len(column):
        return column
    try:
        if all(map(math.isfinite, column)):
            return column
    except TypeError:  # some are not known
        pass
    return [None if v is None or not math.isfinite(v) else v for v in column]


def _fracs(column: Column) -> Column:
    return [0.0 if v is None else v for v in _numbers(column)]


def _times(column: Column) -> Column:
    if not all(map(math.isfinite, column)):
        raise ValueError("a window's time is not a number")
    return column


def _texts(column: Column) -> Column:
    return [v if isinstance(v, str) else "" for v in column]


def _states(column: Column) -> Column:
    return [_VALIDITIES[v] for v in column]


def _reasons(column: Column) -> Column:
    return [None if v is None else tuple(map(str, _a_list(v))) for v in column]


def _processes(column: Column) -> Column:
    return [tuple([(int(pid), float(gib)) for pid, gib in v]) if v else () for v in column]


def _a_list(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError("what should be a list is none")
    return cast("list[Any]", value)


_CHECKS: dict[str, Callable[[Column], Column]] = {
    "name": _texts, "error": _texts, "uuid": _texts, "start_s": _times, "end_s": _times, "validity": _states,
    "valid_frac": _fracs, "throttle": _reasons, "processes": _processes,
}  # fmt: skip
