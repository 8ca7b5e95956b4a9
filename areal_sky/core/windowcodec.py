"""Windows on their way to the head, as columns: a field that is alike for all of a heartbeat's windows travels once,
one that is alike for all of a device's once per device. That is cheap to parse and to look through, since most of what
the head asks of windows it can ask of a whole column.
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
_DIGITS = {"start_s": 3, "end_s": 3}
_VALIDITIES = {v.value: v for v in Validity}
_LOADS = ("utilization_mean", "utilization_p95", "utilization_max")
_cells = attrgetter(*FIELDS)

Column = list[Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """Windows of one node, each device's oldest first: `columns[field][i]` is that of window `i`.

    `places` tells which windows are a device's. Times are on the head's clock, but `sent_end_s` is on the node's.
    """

    columns: Mapping[str, Column]
    places: Mapping[int, list[int]]
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
        fresh: list[int] = []
        for i, device in enumerate(self.columns["device"]):
            if ends_s[i] > seen.get(device, -math.inf) + slack_s:
                seen[device] = ends_s[i]
                fresh.append(i)
        if len(fresh) == len(ends_s):
            return self
        columns = {field: [column[i] for i in fresh] for field, column in self.columns.items()}
        return Batch(columns, _places(columns["device"]), [self.sent_end_s[i] for i in fresh])


def batch_of(windows: Sequence[GpuWindow]) -> Batch:
    """Windows that have not travelled."""
    cells = zip(*map(_cells, windows), strict=True) if windows else [()] * len(FIELDS)
    columns = {field: list(column) for field, column in zip(FIELDS, cells, strict=True)}
    return Batch(columns, _places(columns["device"]), columns["end_s"])


def to_wire(windows: Sequence[GpuWindow]) -> dict[str, dict[str, Any]]:
    """The windows as JSON values: {"same": {field: value}, "per_device": {field: one value of each device, in the order
    in which they are first met}, "each": {field: one value of each window}}, rounded to what they can mean.
    """
    batch = batch_of(windows)
    firsts = [at[0] for at in batch.places.values()]
    wire: dict[str, dict[str, Any]] = {"same": {}, "per_device": {}, "each": {"device": batch["device"]}}
    for field in FIELDS[1:] if windows else ():
        digits = _DIGITS.get(field, 4)
        column = [round(v, digits) if isinstance(v, float) else v for v in batch[field]]
        if column.count(column[0]) == len(column):
            wire["same"][field] = column[0]
        elif all(column[i] == column[at[0]] for at in batch.places.values() for i in at):
            wire["per_device"][field] = [column[i] for i in firsts]
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
        same: dict[str, Any] = {}
        per_device: dict[str, Any] = {}
    else:
        same, per_device, each = wire["same"], wire["per_device"], wire["each"]
    devices: Column = each["device"]
    if not all(type(d) is int and 0 <= d < MAX_DEVICES for d in devices):
        raise ValueError("a device that is none")
    places, count = _places(devices), len(devices)
    columns: dict[str, Column] = {"device": devices}
    for field in FIELDS[1:]:
        check = _CHECKS.get(field, _numbers)
        if field in each:
            column = check(each[field])
        elif field in per_device:
            told = dict(zip(places, check(per_device[field]), strict=True))
            column = [told[d] for d in devices]
        elif field in same or field not in _NEEDED or not count:
            column = check([same.get(field)] if count else []) * count
        else:
            raise KeyError(field)
        if len(column) != count:
            raise ValueError(f"{len(column)} values of {field} for {count} windows")
        columns[field] = column
    _agree(columns)
    sent_end_s = columns["end_s"]
    if shift_s:
        columns["start_s"] = [t + shift_s for t in columns["start_s"]]
        columns["end_s"] = [t + shift_s for t in sent_end_s]
    return Batch(columns, places, sent_end_s)


def _places(devices: Column) -> dict[int, list[int]]:
    places: dict[int, list[int]] = {}
    for i, device in enumerate(devices):
        if device in places:
            places[device].append(i)
        else:
            places[device] = [i]
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
