"""The last run of every benchmark, kept in last_run.json, and docs/benchmarks.md, which is made from it and the limits.

`python -m benchmarks.table` makes the document anew, after a limit has changed.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import yaml

HERE = Path(__file__).parent
LAST_RUN = HERE / "last_run.json"
BOUNDS = HERE / "bounds.yaml"
DOCUMENT = HERE.parent / "docs/benchmarks.md"
HEAD = """# What was measured

Made by `make bench` from its last run; limits are those of [bounds.yaml](../benchmarks/bounds.yaml). A figure without a
limit is there to be compared. Where no run is kept, the figure is the one beside the limit, and has no date.

| benchmark | figure | measured | limit | | when |
|---|---|---|---|---|---|
"""


def keep(name: str, report: Mapping[str, Any], today: datetime.date) -> None:
    """Takes in a run and writes the document anew."""
    runs = last_runs()
    runs[name] = {**report, "when": today.isoformat()}
    LAST_RUN.write_text(json.dumps(runs, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    DOCUMENT.write_text(document(), encoding="utf-8")


def last_runs() -> dict[str, dict[str, Any]]:
    return json.loads(LAST_RUN.read_text(encoding="utf-8")) if LAST_RUN.exists() else {}


def document() -> str:
    """The text of docs/benchmarks.md."""
    bounds: dict[str, dict[str, Any]] = yaml.safe_load(BOUNDS.read_text(encoding="utf-8"))
    runs, lines = last_runs(), list[str]()
    for name, limits in bounds.items():
        run = runs.get(name)
        measured = dict(flat(run)) if run else {figure: x["measured"] for figure, x in limits.items()}
        for figure, value in measured.items():
            limit = limits.get(figure, {})
            told = ", ".join(f"{word} {_number(limit[key])}" for key, word in (("min", "at least"), ("max", "at most"))
                             if key in limit)  # fmt: skip
            when = run["when"] if run else ""
            shown = "not measured" if value is None else _number(value)
            lines.append(f"| {name} | {figure} | {shown} | {told} | {_verdict(value, limit)} | {when} |")
    machines = sorted({run["machine"] for run in runs.values()})
    return HEAD + "\n".join(lines) + "\n" + "".join(f"\nMeasured on: {m}.\n" for m in machines)


def flat(figures: Mapping[str, Any], of: str = "") -> Iterator[tuple[str, float | None]]:
    """The numbers of a run, those within others included, by name."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from flat(cast("dict[str, Any]", value), f"{of}{name} ")
        elif value is None or isinstance(value, int | float):
            yield of + name, value


def _number(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _verdict(value: float | None, limit: Mapping[str, Any]) -> str:
    if value is None or not {"min", "max"} & set(limit):
        return ""
    if limit.get("min", -math.inf) <= value <= limit.get("max", math.inf):
        return "met"
    return f"missed: {limit['missed']}" if "missed" in limit else "missed"


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
