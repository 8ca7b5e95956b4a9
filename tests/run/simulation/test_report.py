"""Reports of simulated runs: the right figures, and a page that needs nothing else."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sky.adapters.figures import curves, frontier
from areal_sky.errors import Refused
from areal_sky.run.simulation import report
from areal_sky.run.simulation.result import Point, SimResult, TaskRow

HOUR = 3600.0


def row(
    n: int, ended_h: float | None, tenant: str = "a", deadline_h: float | None = None, lost_h: float = 0.0
) -> TaskRow:
    return TaskRow(
        f"t{n}", tenant, "m", "train", 2.0, 0.0, 0.0, None if ended_h is None else ended_h * HOUR, HOUR,
        None if deadline_h is None else deadline_h * HOUR, lost_h * HOUR, 0, 0,
        "succeeded" if ended_h is not None else "unfinished",
    )  # fmt: skip


def point(t_h: float, busy: float, idle: float, usd: float) -> Point:
    gpus = {"busy": busy, "idle": idle, "starting": 0.0, "draining": 0.0}
    return Point(t_h * HOUR, gpus, {"spot": busy, "on_demand": idle}, 1, 4 - busy, usd, {"spot": usd})


def result(policy: str, *rows: TaskRow, usd: float = 10.0) -> SimResult:
    points = (point(0, 2, 2, 0), point(1, 4, 0, 4), point(4, 0, 0, usd))
    return SimResult("w", policy, 0, 1.0, rows, points, 9, 3, 4, 1)


def test_the_figures_of_a_run() -> None:
    rows = (row(1, 1), row(2, 3, "b", deadline_h=2, lost_h=0.5), row(3, None, deadline_h=9), row(4, 2, deadline_h=2))
    s = report.summary(result("p", *rows))
    assert (s.done, s.tasks, s.missed, s.with_deadline, s.reclaims) == (3, 4, 2, 3, 3)
    assert s.mean_s == s.p50_s == 2 * HOUR and s.p99_s == s.makespan_s == 3 * HOUR
    assert s.utilization == pytest.approx((2 + 4 * 3) / (4 + 4 * 3))
    assert s.lost_gpu_h == pytest.approx(1.0) and s.cost_usd == 10
    assert s.fairness == pytest.approx((1.5 + 3) ** 2 / (2 * (1.5**2 + 3**2)))


def test_what_is_not_known_is_na_and_the_best_did_all_the_work() -> None:
    lazy, good, dear = result("lazy", row(1, None), row(2, 1)), *(
        result(p, row(1, 3), row(2, 2), usd=usd) for p, usd in (("good", 20.0), ("dear", 30.0))
    )  # fmt: skip
    head, _, *lines = report.table([lazy, good, dear], width=200).splitlines()
    at = head.split().index("cost")
    assert [line.split()[at] for line in lines] == ["$10.00", "$20.00*", "$30.00"]
    assert "late" not in head and "tokens/s" not in head
    narrow = report.table([lazy, good, dear], width=50)
    assert max(map(len, narrow.splitlines())) <= 50, "what has no room goes on below"
    words = [w for block in narrow.split("\n\n") for w in block.splitlines()[0].split()[1:]]
    assert words == head.split()[1:] and narrow.count("lazy") == narrow.count("\n\n") + 1
    assert report.table([result("none", row(1, None))]).splitlines()[2].split()[2] != "0s"


def test_the_page_needs_nothing_else_and_is_the_same_again(tmp_path: Path) -> None:
    results = [result(p, row(1, 1 + n), row(2, 3), usd=10.0 - n) for n, p in enumerate(("a", "<b>"))]
    first, again = (report.write(results, tmp_path / x) for x in "xy")
    drawn = ["gpus.png", "cost.png", "queue.png", "pareto.png"]
    assert [p.name for p in first] == ["results.jsonl", "report.html", *drawn]
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in again]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in first[2:])
    page = first[1].read_text()
    assert page.count("<figure>") == 4 and "<b>" not in page and "&lt;b&gt;" in page
    assert not re.search(r"(?:src|href)=[\"'](?!data:|#)", page)
    assert [json.loads(line)["policy"] for line in first[0].read_text().splitlines()] == ["a", "<b>"]


def test_without_matplotlib_all_but_the_pictures_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Refused, match=r"pip install 'areal-sky\[report\]'"):
        report.write([result("a", row(1, 1))], tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "results.jsonl"]


@given(st.dictionaries(st.text(max_size=3), st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1))
def test_the_frontier_is_what_nothing_beats(points: dict[str, tuple[float, float]]) -> None:
    best = frontier(points)
    assert best
    for name, (x, y) in points.items():
        beaten = any(points[b][0] <= x and points[b][1] <= y and points[b] != (x, y) for b in best)
        assert beaten != (name in best)


def test_a_curve_without_points_is_no_trouble() -> None:
    assert curves({"none": ((), ()), "one": ((0.0,), (1.0,))}, "x", "y", "{:.0f}", bins=3).png
