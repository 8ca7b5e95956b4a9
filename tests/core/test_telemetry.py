"""Windows and loads: unknown stays unknown, N/A is never 0, the worst device decides."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sky.core.telemetry import (
    MIN_VALID_FRAC,
    GpuSample,
    GpuWindow,
    Validity,
    freshness,
    replica_load,
    window,
    windows,
)

K, U, S, L = Validity.KNOWN, Validity.UNKNOWN, Validity.STALE, Validity.LOST


def sample(load: float | None, device: int = 0, validity: Validity | None = None, **more) -> GpuSample:
    fields = {
        "name": "H100", "memory_used_gib": 10.0, "memory_total_gib": 80.0, "temperature_celsius": 60.0,
        "power_watts": 300.0, "error": "",
    } | more  # fmt: skip
    validity = validity or (U if load is None else K)
    return GpuSample(device=device, t_s=0.5, utilization_frac=load, validity=validity, **fields)


def made(load: float | None, end_s: float = 100.0, device: int = 0, validity: Validity = K) -> GpuWindow:
    return GpuWindow(
        device, "H100", end_s - 1, end_s, load, load, load, 1.0, 80.0, 50.0, 100.0, 1.0 if load is not None else 0.0,
        validity,
    )  # fmt: skip


def test_a_window_summarises_its_samples():
    loads = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    w = window(
        [
            sample(x, memory_used_gib=10 + i, temperature_celsius=60 + i, power_watts=100 + i)
            for i, x in enumerate(loads)
        ],
        5.0, 6.0, expected=10,
    )  # fmt: skip
    assert (w.device, w.name, w.start_s, w.end_s, w.validity, w.valid_frac) == (0, "H100", 5.0, 6.0, K, 1.0)
    assert w.utilization_mean == pytest.approx(0.55)
    assert (w.utilization_p95, w.utilization_max) == (1.0, 1.0)
    assert (w.memory_used_gib, w.temperature_celsius, w.power_watts) == (19, 69, 104.5)  # peak, peak, mean
    assert w.error == ""


def test_p95_leaves_out_a_single_outlier_of_many():
    w = window([sample(0.2)] * 39 + [sample(1.0)], 0, 1, expected=40)
    assert (w.utilization_p95, w.utilization_max) == (0.2, 1.0)


def test_na_is_left_out_of_the_mean_not_counted_as_zero():
    w = window([sample(0.8), sample(None), sample(0.6), sample(None)], 0, 1, expected=4)
    assert w.utilization_mean == pytest.approx(0.7)
    assert (w.valid_frac, w.validity) == (0.5, K)


def test_a_device_that_tells_no_utilization_is_unknown_but_its_memory_is_told():
    w = window([sample(None, error="utilization: Not Supported")] * 10, 0, 1, expected=10)
    assert (w.utilization_mean, w.utilization_p95, w.utilization_max) == (None, None, None)
    assert (w.validity, w.valid_frac, w.memory_used_gib) == (U, 0.0, 10.0)
    assert w.error == "utilization: Not Supported"


def test_too_few_samples_tell_nothing():
    w = window([sample(0.9)] * 4, 0, 1, expected=10)
    assert (w.utilization_mean, w.validity) == (None, U)
    assert w.error == "only 4 of 10 samples were known"


def test_a_device_lost_at_the_end_of_the_window_is_lost():
    gone = sample(None, validity=L, error="GPU is lost", memory_used_gib=None)
    w = window([sample(0.9)] * 9 + [gone], 0, 1, expected=10)
    assert (w.validity, w.utilization_mean, w.error) == (L, None, "GPU is lost")


def test_a_device_that_came_back_is_judged_by_its_known_samples():
    gone = sample(None, validity=L, error="GPU is lost")
    assert window([gone] * 2 + [sample(0.5)] * 8, 0, 1, expected=10).validity is K


def test_a_window_is_of_one_device_and_of_some_sample():
    with pytest.raises(ValueError, match="two devices"):
        window([sample(0.1, device=0), sample(0.1, device=1)], 0, 1, 2)
    with pytest.raises(ValueError, match="at least one"):
        window([], 0, 1, 1)


def test_windows_keep_devices_apart():
    samples = [sample(0.1, device=1), sample(0.9, device=0), sample(None, device=2, validity=L), sample(0.3, device=1)]
    assert [(w.device, w.utilization_mean, w.validity) for w in windows(samples, 0, 1, 2)] == [
        (0, 0.9, K), (1, pytest.approx(0.2), K), (2, None, L),
    ]  # fmt: skip


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=30), st.integers(1, 30))
def test_a_window_never_makes_up_a_load(loads: list[float | None], expected: int):
    w = window([sample(x) for x in loads], 0, 1, expected)
    known = [x for x in loads if x is not None]
    assert 0 <= w.valid_frac <= 1
    assert (w.validity is K) == (bool(known) and w.valid_frac >= MIN_VALID_FRAC)
    if w.validity is K:
        assert min(known) - 1e-9 <= w.utilization_mean <= max(known) + 1e-9
        assert w.utilization_p95 in known and w.utilization_max == max(known)
    else:
        assert w.utilization_mean is w.utilization_p95 is w.utilization_max is None


def test_the_load_of_a_replica_is_the_mean_over_its_gpus():
    reading = replica_load([[made(0.2, 99), made(0.4, 100)], [made(0.9, 99.5, device=1)]], now_s=101)
    assert reading.utilization_mean == pytest.approx(0.6)
    assert (reading.validity, reading.age_s) == (K, 1.5)


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ([], U),  # a GPU that was never heard of
        ([made(None, validity=U)], U),
        ([made(None, validity=L)], L),
        ([made(0.5, end_s=60)], S),
    ],
)
def test_one_gpu_in_doubt_makes_the_whole_replica_so(second: list[GpuWindow], expected: Validity):
    reading = replica_load([[made(0.5)], second], now_s=101)
    assert (reading.utilization_mean, reading.validity) == (None, expected)


def test_no_gpu_is_no_idle_gpu():
    assert replica_load([], now_s=0) == (None, U, None)


def test_a_task_that_has_ended_no_longer_shows():
    device = [made(1.0, 50), made(1.0, 94), made(0.2, 99), made(0.4, 100)]
    assert replica_load([device], now_s=100).utilization_mean == pytest.approx(0.3)
    assert replica_load([device], now_s=108).utilization_mean == 0.4  # the latest at least


@given(st.floats(0, 1e6), st.sampled_from(list(Validity)))
def test_only_age_makes_stale(age_s: float, validity: Validity):
    w = made(0.5 if validity is K else None, end_s=0.0, validity=validity)
    assert freshness(w, now_s=age_s, stale_after_s=10) is (S if age_s > 10 else validity)
    assert not math.isnan(age_s)
