"""docs/benchmarks.md is what the last run gave."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from benchmarks import table


def test_the_document_is_the_one_of_the_last_run() -> None:
    assert table.DOCUMENT.read_text() == table.document(), "run `python -m benchmarks.table`"


def test_a_run_replaces_the_one_before_and_says_what_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "LAST_RUN", tmp_path / "last.json")
    monkeypatch.setattr(table, "DOCUMENT", tmp_path / "doc.md")
    monkeypatch.setattr(table, "BOUNDS", tmp_path / "bounds.yaml")
    (tmp_path / "bounds.yaml").write_text(
        "a: {x: {max: 5, measured: 1}, y: {min: 2, measured: 1, missed: it is slow}}\nb: {z: {max: 1, measured: 0.5}}\n"
    )
    for x in (9.0, 3.0):
        table.keep("a", {"x": x, "y": 1.0, "by": {"us": None}, "machine": "m"}, datetime.date(2026, 1, 2))
    text = (tmp_path / "doc.md").read_text()
    for line in (
        "| a | x | 3 | at most 5 | met | 2026-01-02 |", "| a | y | 1 | at least 2 | missed: it is slow | 2026-01-02 |",
        "| a | by us | not measured |  |  | 2026-01-02 |", "| b | z | 0.5 | at most 1 | met |  |",
    ):  # fmt: skip
        assert line in text
