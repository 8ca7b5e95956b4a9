"""What is usual is what most values say, whatever the others are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sky.core.baseline import Series, trend, usual

VALUES = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(st.floats(9.0, 11.0), min_size=11, max_size=40), st.lists(VALUES, max_size=10))
def test_less_than_half_of_odd_values_move_nothing_out_of_the_rest(fine: list[float], odd: list[float]) -> None:
    found = usual([*fine, *odd[: (len(fine) - 1) // 2]])
    assert 9.0 <= found.median <= 11.0
    assert found.sigma <= 1.4826 * 2.0


@given(VALUES, st.floats(0.01, 100.0), st.integers(4, 20))
def test_the_trend_of_a_line_is_its_slope(start: float, slope: float, n: int) -> None:
    found = trend([(float(t), start + slope * t) for t in range(n)])
    assert found.slope == pytest.approx(slope, rel=1e-3, abs=1e-6 * abs(start))
    assert found.rising == 1.0


def test_one_jump_is_no_trend() -> None:
    found = trend([(float(t), 10.0 if t < 10 else 12.0) for t in range(20)])
    assert found.late_slope == 0.0 and found.rising < 0.6


@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=300))
def test_a_series_is_bounded_and_in_order(gaps: list[float]) -> None:
    series, t_s = Series(span_s=20.0, every_s=1.0), 0.0
    for gap_s in gaps:
        t_s += gap_s
        series.add(t_s, t_s)
    assert len(series.points) <= 21
    times = [t for t, _ in series.points]
    assert times == sorted(times) and times[0] >= times[-1] - 20.0
    assert series.before(t_s + 1) == times and series.since(times[0]) == times[::-1]
