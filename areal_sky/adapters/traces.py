"""Readers of public traces: Microsoft Philly (as petuum/adaptdl has it), Alibaba gpu-v2023, spot-traces, Azure LLM."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from areal_sky.errors import InvalidInput

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TraceTask:
    """One job of a Philly virtual cluster: submitted at a Unix time, ran for `duration_s` on so many GPUs."""

    submitted_s: float
    duration_s: float
    gpus: int


@dataclass(frozen=True, slots=True)
class TraceNode:
    """A machine of the Alibaba trace: whole GPUs of one model."""

    name: str
    cpus: float
    memory_gib: float
    gpus: int
    model: str


@dataclass(frozen=True, slots=True)
class TracePod:
    """A pod of the Alibaba trace. `gpus` devices, of each a share `gpu_share` (1 where it asks for several).

    `models`: the only GPU models it may run on; empty: any.
    """

    name: str
    cpus: float
    memory_gib: float
    gpus: int
    gpu_share: float
    models: tuple[str, ...]
    created_s: float | None = None  # since the start of the trace
    scheduled_s: float | None = None
    deleted_s: float | None = None

    @property
    def gpu_request(self) -> float:
        """GPUs in all, as the paper counts them."""
        return self.gpus * self.gpu_share


def read_philly(path: Path) -> tuple[TraceTask, ...]:
    """`timestamp,duration,num_gpus,gpu_time,cluster`, one job a row; in order of submits. Raises InvalidInput."""

    def task(row: dict[str, str]) -> TraceTask:
        when = datetime.fromisoformat(row["timestamp"])
        when = when if when.tzinfo else when.replace(tzinfo=UTC)
        return TraceTask(when.timestamp(), _number(row, "duration"), _count(row, "num_gpus", at_least=1))

    tasks = _read(path, ("timestamp", "duration", "num_gpus"), task)
    return tuple(sorted(tasks, key=lambda t: t.submitted_s))


def read_alibaba_nodes(path: Path) -> tuple[TraceNode, ...]:
    """`sn,cpu_milli,memory_mib,gpu,model`, one machine a row. Raises InvalidInput."""

    def node(row: dict[str, str]) -> TraceNode:
        return TraceNode(
            row["sn"], _number(row, "cpu_milli") / 1000, _number(row, "memory_mib") / 1024, _count(row, "gpu"),
            row["model"],
        )  # fmt: skip

    return _read(path, ("sn", "cpu_milli", "memory_mib", "gpu", "model"), node)


def read_alibaba_pods(path: Path) -> tuple[TracePod, ...]:
    """`name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,...`, one pod a row. Raises InvalidInput."""

    def pod(row: dict[str, str]) -> TracePod:
        gpus, milli = _count(row, "num_gpu"), _number(row, "gpu_milli")
        if milli > 1000:
            raise ValueError(f"gpu_milli is {milli:g}, expected at most 1000 (of each GPU)")
        if gpus > 1 and milli != 1000:
            raise ValueError(f"num_gpu is {gpus} with gpu_milli {milli:g}, expected 1000: several GPUs are whole ones")
        models = tuple(m for m in (row["gpu_spec"] or "").split("|") if m)
        share = milli / 1000 if gpus else 0.0
        return TracePod(
            row["name"], _number(row, "cpu_milli") / 1000, _number(row, "memory_mib") / 1024,
            gpus if share > 0 else 0, share, models, _moment(row, "creation_time"), _moment(row, "scheduled_time"),
            _moment(row, "deletion_time"),
        )  # fmt: skip

    return _read(path, ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "gpu_spec"), pod)


def read_spot(path: Path) -> tuple[float, tuple[int, ...]]:
    """(seconds per step, machines that could be had at each step) of a file of skypilot-org/spot-traces.

    `{"metadata": {"gap_seconds": N}, "data": [...]}`. Raises InvalidInput.
    """
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
        gap_s, counts = float(raw["metadata"]["gap_seconds"]), tuple(int(n) for n in raw["data"])
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidInput(f"{path}: cannot be read: {e}") from None
    except (ValueError, TypeError, KeyError):
        raise InvalidInput(f"{path}: expected {{metadata: {{gap_seconds: N}}, data: [machines, ...]}}") from None
    if not (gap_s > 0 and math.isfinite(gap_s) and counts and min(counts) >= 0):
        raise InvalidInput(f"{path}: expected gap_seconds above 0 and at least one count, none below 0")
    return gap_s, counts


def read_lengths(path: Path) -> tuple[int, ...]:
    """Generated tokens of each request of an Azure LLM trace (`TIMESTAMP,ContextTokens,GeneratedTokens`).

    Raises InvalidInput.
    """
    return _read(path, ("GeneratedTokens",), lambda row: _count(row, "GeneratedTokens"))


def columns_of(path: Path) -> tuple[str, ...]:
    """The names in the first line of a CSV file. Raises InvalidInput."""
    try:
        with path.open(encoding="utf-8") as file:
            return tuple(c.strip() for c in file.readline(10_000).split(","))
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidInput(f"{path}: cannot be read: {e}") from None


def trace_files(folder: Path) -> tuple[Path, ...]:
    """The CSV files of a folder, by name. Raises InvalidInput when there is none."""
    found = tuple(sorted(folder.glob("*.csv"))) if folder.is_dir() else ()
    if not found:
        raise InvalidInput(f"{folder}: no folder with *.csv files")
    return found


# ---------------------------------------------------------------- how


def _read(path: Path, columns: tuple[str, ...], parse: Callable[[dict[str, str]], T]) -> tuple[T, ...]:
    out: list[T] = []
    for line, row in _rows(path, columns):
        try:
            out.append(parse(row))
        except ValueError as e:
            raise InvalidInput(f"{path}:{line}: {e}") from None
    if not out:
        raise InvalidInput(f"{path}: no rows")
    return tuple(out)


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [c for c in columns if c not in (reader.fieldnames or ())]
            if missing:
                raise InvalidInput(f"{path}:1: no column {', '.join(missing)}; expected {', '.join(columns)}")
            for row in reader:
                if None in row or any(row[c] is None for c in columns):
                    wanted = len(reader.fieldnames or ())
                    raise InvalidInput(f"{path}:{reader.line_num}: expected {wanted} fields as in the first line")
                yield reader.line_num, row
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise InvalidInput(f"{path}: cannot be read: {e}") from None


def _number(row: dict[str, str], column: str) -> float:
    try:
        value = float(row[column])
    except ValueError:
        raise ValueError(f"{column} is {row[column][:40]!r}, expected a number") from None
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{column} is {value:g}, expected a number of at least 0")
    return value


def _moment(row: dict[str, str], column: str) -> float | None:
    return _number(row, column) if row.get(column) else None


def _count(row: dict[str, str], column: str, at_least: int = 0) -> int:
    value = _number(row, column)
    if value != int(value) or value < at_least:
        raise ValueError(f"{column} is {value:g}, expected a whole number of at least {at_least}")
    return int(value)
