"""Windows on their way to the head: rows of a table, so that names of fields travel once per heartbeat."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

from areal_sky.core.telemetry import GpuWindow, Validity

FIELDS = tuple(f.name for f in fields(GpuWindow))
MAX_DEVICES = 256  # of one node
_DEVICE, _START, _END, _MEAN, _VALIDITY = (
    FIELDS.index(f) for f in ("device", "start_s", "end_s", "utilization_mean", "validity")
)
_THROTTLE, _PROCESSES = FIELDS.index("throttle"), FIELDS.index("processes")
_VALIDITIES = {v.value: v for v in Validity}
_NEEDED = ("device", "name", "start_s", "end_s", "utilization_mean", "valid_frac", "validity")
_NUMBERS = tuple(
    i for i, f in enumerate(FIELDS)
    if f.endswith(("_mean", "_p95", "_max", "_gib", "_celsius", "_watts", "_frac", "_mhz", "_mib_s"))
    or f.startswith(("ecc_", "xid"))
)  # fmt: skip
_TEXTS = tuple(FIELDS.index(f) for f in ("name", "error", "uuid"))
_DIGITS = {"start_s": 3, "end_s": 3}

Row = list[Any]


def to_row(w: GpuWindow) -> Row:
    """The window as a row of `FIELDS`, numbers rounded to what they can mean."""
    row: Row = [getattr(w, f) for f in FIELDS]
    row[_VALIDITY] = w.validity.value
    for i, value in enumerate(row):
        if isinstance(value, float):
            row[i] = round(value, _DIGITS.get(FIELDS[i], 4))
    return row


def rows_of(heartbeat: Mapping[str, Any]) -> list[Row]:
    """The rows of a heartbeat, checked. Windows may be objects too, and fields that are not sent are None.

    Raises KeyError, TypeError or ValueError when any of them is damaged.
    """
    sent: Any = heartbeat.get("windows", ())
    names: Any = heartbeat.get("fields")
    if names is None:
        rows = [_by_name(w) for w in sent]
    elif tuple(names) == FIELDS:
        rows = cast("list[Row]", sent)
    else:  # a node of another version
        rows = [_by_name(dict(zip(names, w, strict=True))) for w in sent]
    for row in rows:
        _check(row)
    return rows


def from_row(row: Row, shift_s: float = 0.0) -> GpuWindow:
    """The window of a checked row, `shift_s` later."""
    values = [*row]
    values[_START] += shift_s
    values[_END] += shift_s
    values[_VALIDITY] = _VALIDITIES[row[_VALIDITY]]
    throttle, processes = row[_THROTTLE], row[_PROCESSES]
    values[_THROTTLE] = None if throttle is None else tuple(map(str, throttle))
    values[_PROCESSES] = tuple((int(pid), float(gib)) for pid, gib in processes) if processes else ()
    return GpuWindow(*values)


def windows_of(heartbeat: Mapping[str, Any], now_s: float, *, checked: bool = False) -> list[GpuWindow]:
    """The windows of a heartbeat on the head's clock, which showed `now_s` when it came. Raises as `rows_of` does.

    `checked`: `rows_of` has been over it before, which mends rows in place.
    """
    shift_s = now_s - float(heartbeat["t_s"])
    as_they_are = checked and tuple(heartbeat.get("fields") or ()) == FIELDS
    rows = cast("list[Row]", heartbeat["windows"]) if as_they_are else rows_of(heartbeat)
    return [from_row(row, shift_s) for row in rows]


def tells_of_a_loss(heartbeat: Mapping[str, Any]) -> bool:
    """Whether a GPU is lost in one of its windows. Quick: asked of every heartbeat."""
    if tuple(heartbeat.get("fields") or ()) == FIELDS:
        return any(row[_VALIDITY] == "lost" for row in heartbeat["windows"])
    return any(Validity.LOST in (w.values() if isinstance(w, Mapping) else w) for w in heartbeat.get("windows", ()))


def _by_name(w: Mapping[str, Any]) -> Row:
    for name in _NEEDED:
        w[name]  # KeyError
    return [w.get(f) for f in FIELDS]


def _check(row: Row) -> None:
    device = row[_DEVICE]
    if len(row) != len(FIELDS) or type(device) is not int or not 0 <= device < MAX_DEVICES:
        raise ValueError(f"device {device!r}")
    if not (math.isfinite(row[_START]) and math.isfinite(row[_END])):
        raise ValueError("a window's time is not a number")
    for i in _NUMBERS:
        if row[i] is not None and not math.isfinite(row[i]):
            row[i] = None
    for i in _TEXTS:
        if not isinstance(row[i], str):
            row[i] = ""
    validity = row[_VALIDITY]
    if validity != "known":
        Validity(validity)
    if validity != "known" or row[_MEAN] is None:
        if validity == "known":
            row[_VALIDITY] = Validity.UNKNOWN.value
        row[_MEAN] = row[_MEAN + 1] = row[_MEAN + 2] = None
    _check_lists(row[_PROCESSES], row[_THROTTLE])


def _check_lists(processes: Any, throttle: Any) -> None:
    if processes:
        for pid, gib in cast("Sequence[Any]", processes):
            if not (isinstance(pid, int) and isinstance(gib, int | float)):
                raise ValueError("processes are no pairs of numbers")
    if throttle is not None and not isinstance(throttle, list | tuple):
        raise ValueError("throttle is no list")
