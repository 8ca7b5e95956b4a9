"""Windows as columns and as bytes: what comes out is what went in, and damage is refused."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sky.core.gpuseries import Point, Series, in_slots
from areal_sky.core.telemetry import GpuWindow, Validity
from areal_sky.core.windowcodec import batch_of, read_windows, to_wire
from areal_sky.core.windowpack import pack, rolled_up, unpack

maybe = st.one_of(st.none(), st.floats(0, 1000).map(lambda v: round(v, 1)))
loads = st.floats(0, 1).map(lambda v: round(v, 4))


def _place(w: GpuWindow) -> tuple[int, float]:
    return w.device, w.end_s


@st.composite
def a_window(draw: st.DrawFn) -> GpuWindow:
    validity = draw(st.sampled_from([Validity.KNOWN, Validity.UNKNOWN, Validity.LOST, Validity.STALE]))
    load = draw(loads) if validity is Validity.KNOWN else None
    throttle = draw(st.one_of(st.none(), st.lists(st.sampled_from(["hw_thermal", "sw_power_cap"])).map(tuple)))
    end_s = draw(st.integers(1, 5)) + 0.5
    return GpuWindow(
        draw(st.one_of(st.integers(0, 2), st.just(255))), "H100", end_s - 1, end_s, load, load, load, draw(maybe),
        draw(maybe), draw(maybe),
        draw(maybe), draw(loads), validity, draw(st.sampled_from(["", "GPU is lost"])), "GPU-1", draw(maybe),
        draw(maybe), throttle, draw(st.one_of(st.none(), st.integers(0, 9))), None, draw(maybe), draw(maybe),
        draw(maybe), draw(st.one_of(st.none(), st.just(79))), draw(st.sampled_from([(), ((4242, 1.5),)])),
    )  # fmt: skip


@given(st.lists(a_window(), max_size=6, unique_by=_place))
def test_windows_arrive_as_they_left(sent: list[GpuWindow]):
    batch = read_windows(json.loads(json.dumps(to_wire(sent))), 7.0)
    sent.sort(key=_place)
    later = [replace(w, start_s=w.start_s + 7, end_s=w.end_s + 7) for w in sent]
    assert batch.windows() == [batch.window(i) for i in range(len(sent))] == later
    assert list(batch.sent_end_s) == [w.end_s for w in sent]
    objects = json.loads(json.dumps([asdict(w) for w in reversed([*sent, *sent])]))
    assert read_windows(objects, 7.0).windows() == later


def test_a_node_of_another_version_may_lack_fields_or_have_more():
    w = GpuWindow(3, "H100", 1.0, 2.0, 0.5, 0.5, 0.5, None, None, None, None, 1.0, Validity.KNOWN, uuid="GPU-9")
    wire = to_wire([w])
    del wire["same"]["uuid"]
    wire["same"]["new"] = wire["each"]["newer"] = "?"
    assert read_windows(wire, 0.0).windows() == [replace(w, uuid="")]


def test_eight_gpus_for_five_seconds_are_mostly_told_once():
    made = GpuWindow(0, "H100", 0.0, 1.0, 0.5, 0.5, 0.5, 10.0, 80.0, 60.0, 300.0, 1.0, Validity.KNOWN)
    sent = [
        replace(made, device=d, start_s=t, end_s=t + 1.0, uuid=f"GPU-{d}", utilization_mean=(8 * t + d) / 100)
        for t in range(5)
        for d in range(8)
    ]
    wire = to_wire(sent)
    assert list(wire["each"]) == ["device", "utilization_mean"] and list(wire["in_turn"]) == ["start_s", "end_s"]
    assert list(wire["per_device"]) == ["uuid"] and wire["same"]["memory_used_gib"] == 10.0
    assert read_windows(json.loads(json.dumps(wire)), 0.0).windows() == sorted(sent, key=_place)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=20, unique=True))
def test_what_was_seen_of_a_device_is_not_seen_again(told: list[tuple[int, int]]):
    made = GpuWindow(0, "H100", 0.0, 1.0, 0.5, 0.5, 0.5, None, None, None, None, 1.0, Validity.KNOWN)
    sent = [replace(made, device=d, end_s=float(t)) for d, t in told]
    fresh = sorted((w for w in sent if w.device or w.end_s > 4.0), key=_place)
    batch, seen = batch_of(sent), {0: 4.0}
    batch = batch.newer(seen, batch["end_s"])
    assert batch.windows() == fresh and len(batch) == len(fresh)
    assert {d: batch.windows()[at] for d, at in batch.places.items()} == {
        d: [w for w in fresh if w.device == d] for d in {w.device for w in fresh}
    }
    assert [batch["end_s"][i] for i in batch.in_time([0, 2])] == sorted(w.end_s for w in fresh if w.device in (0, 2))
    assert len(batch.newer(seen, batch["end_s"])) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("device", True), ("device", "0"), ("device", 256), ("end_s", None), ("end_s", float("nan")), ("validity", "fine"),
     ("temperature_celsius", "hot"), ("processes", [[1]]), ("processes", [["x", 1]]), ("throttle", "hot")],
)  # fmt: skip
def test_damaged_windows_are_refused(field: str, value: object):
    w = GpuWindow(0, "H100", 1.0, 2.0, 0.5, 0.5, 0.5, None, None, None, None, 1.0, Validity.KNOWN)
    for part in ("same", "per_device", "each"):
        wire = to_wire([w])
        wire[part][field] = value if part == "same" else [value]
        if field != "device" or part == "each":
            with pytest.raises((KeyError, TypeError, ValueError)):
                read_windows(wire, 0.0)
        wire = to_wire([w])
        if part != "same":
            wire[part]["power_watts"] = [1.0, 2.0]
            with pytest.raises(ValueError, match=r"2|longer"):
                read_windows(wire, 0.0)


def test_a_load_is_told_if_and_only_if_it_is_known():
    known, lost = Validity.KNOWN, Validity.LOST
    made = GpuWindow(0, "H100", 1.0, 2.0, 0.5, 0.5, 0.5, None, None, None, None, 1.0, known)
    sent = [made, replace(made, device=1, validity=lost), replace(made, device=2, utilization_mean=None)]
    told = [(w.validity, w.utilization_mean, w.utilization_max) for w in read_windows(to_wire(sent), 0.0).windows()]
    assert told == [(known, 0.5, 0.5), (lost, None, None), (Validity.UNKNOWN, None, None)]


@given(st.lists(st.tuples(st.integers(0, 7), loads, maybe), min_size=1, max_size=40))
def test_bytes_keep_three_digits_and_what_is_not_known(windows: list[tuple[int, float, float | None]]):
    windows.sort(key=lambda w: w[0])  # as a batch has them
    told = [
        GpuWindow(device, "", i, i + 1.0, load, load, load, gib, None, None, None, 1.0, Validity.KNOWN)
        for i, (device, load, gib) in enumerate(windows)
    ]
    data = pack(0.0, batch_of(told))
    kept = list(unpack(0.0, data))
    for k, (i, (device, load, gib)) in zip(kept, enumerate(windows), strict=True):
        assert (k.device, k.start_s, k.memory_total_gib) == (device, pytest.approx(i), None)
        assert k.utilization_mean == pytest.approx(load, rel=1e-3, abs=1e-4)
        assert (k.memory_used_gib is None) == (gib is None)
    for rolled in unpack(0.0, rolled_up(0.0, data)):
        mine = [k for k in kept if k.device == rolled.device]
        assert rolled.utilization_max == max(k.utilization_max for k in mine)
        assert rolled.utilization_mean == pytest.approx(sum(k.utilization_mean for k in mine) / len(mine), rel=1e-3)
        assert (rolled.start_s, rolled.end_s) == (pytest.approx(mine[0].start_s), pytest.approx(mine[-1].end_s))


def test_a_series_keeps_the_latest_and_tells_since_when():
    series = Series(10)
    for i in range(100):
        series.extend([i], [i + 1.0], [math.nan if i == 95 else i / 100])
    assert [p.end_s for p in series.since(0)] == list(range(91, 101))
    assert [p.utilization_mean for p in series.since(95.5)] == [None, 0.96, 0.97, 0.98, 0.99]
    assert [p.end_s for p in series.since(1e9)] == [100.0]


def test_a_long_time_in_a_few_slots_leaves_gaps_where_nothing_was_known():
    points = [Point(0, 50, 0.2), Point(50, 100, 0.6), Point(200, 300, None), Point(300, 400, 1.0)]
    assert in_slots(points, 4, 0.0, 400.0) == [pytest.approx(0.4), None, None, 1.0]
