"""What is printed reads back; what is ambiguous is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sky.errors import InvalidInput
from areal_sky.units import (
    format_duration,
    format_gib,
    format_usd,
    parse_duration_s,
    parse_gib,
    parse_usd,
    suggest_duration,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("100ms", 0.1), ("30s", 30), ("2m", 120), ("1h30m", 5400), ("2d", 172800), ("1.5h", 5400), ("0", 0), ("0s", 0),
     ("1d2h3m4s5ms", 93784.005), (" 2m ", 120)],
)  # fmt: skip
def test_durations_with_units_are_read(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "hint"),
    [("100 m", "100m"), ("2 minutes ago", None), ("90", "90s"), ("2 minutes", "2m"), ("1 hour 30 min", "1h30m"),
     ("1week", None), ("", None), ("s", None), ("-5s", None), ("5m5m", None), ("30s1h", None), ("1e3s", None),
     ("٣s", None), ("nan", None)],
)  # fmt: skip
def test_ambiguous_durations_are_refused_with_what_was_meant(text: str, hint: str | None) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_duration_s(text)
    if hint:
        assert f"did you mean `{hint}`?" in str(refused.value)
        parse_duration_s(hint)


def test_a_duration_in_words_is_understood_as_a_suggestion() -> None:
    assert suggest_duration("2 minutes ago") == "2m"


@given(st.integers(min_value=0, max_value=10**12))
def test_printed_durations_read_back_to_the_millisecond(millis: int) -> None:
    assert round(parse_duration_s(format_duration(millis / 1000)) * 1000) == millis


@pytest.mark.parametrize(
    ("seconds", "parts", "text"),
    [(0, None, "0s"), (0.1, None, "100ms"), (61.5, None, "1m1.5s"), (5400, None, "1h30m"), (-300, None, "-5m"),
     (11527, 2, "3h12m"), (59.9, 1, "59.9s"), (61.9, 2, "1m1s"), (3600.4, 2, "1h"), (0.0001, None, "0s")],
)  # fmt: skip
def test_durations_print_for_people(seconds: float, parts: int | None, text: str) -> None:
    assert format_duration(seconds, parts) == text


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf])
def test_no_duration_is_printed_for_what_is_none(seconds: float) -> None:
    with pytest.raises(InvalidInput):
        format_duration(seconds)


@pytest.mark.parametrize(
    ("text", "gib"),
    [
        ("32", 32),
        ("32GB", 32),
        ("32Gi", 32),
        ("32GiB", 32),
        ("512MB", 0.5),
        ("1.5TB", 1536),
        ("1048576kb", 1),
        ("8 GB", 8),
    ],
)
def test_sizes_are_binary_as_in_skypilot(text: str, gib: float) -> None:
    assert parse_gib(text) == pytest.approx(gib)


@pytest.mark.parametrize("text", ["", "GB", "32XB", "-1", "1e3", "32+", "nan", "3 2"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="expected a size"):
        parse_gib(text)


def test_sizes_print_for_people() -> None:
    assert [format_gib(g) for g in (0, 0.5, 80, 1.5, 1536)] == ["0 GiB", "512 MiB", "80 GiB", "1.5 GiB", "1.5 TiB"]


@given(st.integers(min_value=0, max_value=10**12))
def test_printed_money_reads_back_to_the_cent(cents: int) -> None:
    assert round(parse_usd(format_usd(cents / 100)) * 100) == cents


@pytest.mark.parametrize("text", ["", "€5", "1,2", "-5", "12,00.5", "nan", "5 dollars"])
def test_other_money_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="expected an amount in US dollars"):
        parse_usd(text)


def test_a_small_price_does_not_print_as_nothing() -> None:
    assert [format_usd(u) for u in (0, 0.0042, 0.5, 1234.5, -3)] == ["$0.00", "$0.0042", "$0.50", "$1,234.50", "-$3.00"]
