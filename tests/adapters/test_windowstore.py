"""The head's history on disk: fine for an hour, coarse for a week, never more than it may be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from areal_sky.adapters import windowstore
from areal_sky.adapters.windowstore import WindowStore
from areal_sky.core.telemetry import GpuWindow, Validity
from areal_sky.core.windowcodec import batch_of
from areal_sky.core.windowpack import pack

T = 1_800_000_000.0


def a_second(start_s: float, load: float | None, **more: Any) -> GpuWindow:
    known = Validity.UNKNOWN if load is None else Validity.KNOWN
    made = GpuWindow(0, "H100", start_s, start_s + 1, load, load, load, 10.0, 80.0, 60.0, 300.0, 1.0, known)
    return replace(made, **more)


def block(start_s: float, load: float, device: int = 0, seconds: int = 60) -> tuple[float, float, bytes]:
    windows = [
        a_second(start_s + i, load, device=device, utilization_max=1.0, memory_used_gib=10.0 + i)
        for i in range(seconds)
    ]
    return start_s, start_s + seconds, pack(start_s, batch_of(windows))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[WindowStore]:
    made = WindowStore(tmp_path / "windows.db")
    yield made
    made.close()


def test_seconds_of_the_last_hour_and_minutes_before(store: WindowStore) -> None:
    for minute in range(180):
        store.put("r", 0, *block(T + 60 * minute, minute / 200))
        if minute % 60 == 0:
            store.flush()
    store.put("other", 0, *block(T, 1.0))
    store.flush()
    kept = store.read("r", 0, 0.0, 2 * T)
    lengths = [round(k.end_s - k.start_s) for k in kept]
    assert 110 <= lengths.count(60) <= 125 and 3600 <= lengths.count(1) <= 3840
    assert all(a.end_s == pytest.approx(b.start_s, abs=0.02) for a, b in pairwise(kept))  # no gap
    assert (kept[0].utilization_mean, kept[-1].utilization_mean) == (0.0, pytest.approx(0.895, rel=1e-3))
    assert (kept[0].memory_used_gib, kept[0].sm_clock_mhz) == (69.0, None)  # the peak; never told is not 0
    assert store.read("r", 0, T + 10_000, T + 10_010)[0].start_s >= T + 9_999


def test_what_is_older_than_a_week_goes(store: WindowStore) -> None:
    store.put("r", 0, *block(T, 0.5))
    store.put("r", 0, *block(T + 3 * 86400, 0.5))
    store.flush()
    store.put("r", 0, *block(T + 8 * 86400, 0.5))
    store.flush()
    assert {round((k.start_s - T) / 86400) for k in store.read("r", 0, 0.0, 2 * T)} == {3, 8}


def test_the_file_is_bounded_and_the_newest_stays(tmp_path: Path) -> None:
    limit = 400_000
    store = WindowStore(tmp_path / "windows.db", max_bytes=limit)
    for minute in range(300):
        for device in range(8):
            store.put("r", device, *block(T + minute, 0.5))
    store.flush()
    assert limit / 2 < store.size_bytes() <= limit
    assert store.read("r", 0, 0.0, 2 * T)[-1].start_s >= T + 299
    store.close()


def test_it_survives_its_process(tmp_path: Path) -> None:
    first = WindowStore(tmp_path / "windows.db")
    first.put("r", 3, *block(T, 0.25))
    first.close()
    second = WindowStore(tmp_path / "windows.db")
    second.flush()
    assert len(second.read("r", 3, 0.0, 2 * T)) == 60
    second.close()


def test_a_damaged_file_costs_the_history_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "windows.db").write_bytes(b"not a database" * 1000)
    store = WindowStore(tmp_path / "windows.db")
    store.put("r", 0, *block(T, 0.5))
    store.flush()
    assert store.read("r", 0, 0.0, 2 * T) == [] and "no history of GPUs is kept" in caplog.text
    store.close()


def test_a_slow_disk_costs_the_oldest_not_memory(store: WindowStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windowstore, "QUEUED", 3)
    waiting = windowstore.deque([("r", 0, *block(T + i, 0.5)) for i in range(3)], maxlen=3)
    monkeypatch.setattr(store, "_queue", waiting)
    with store._wake:  # the writer waits for this
        for i in range(3, 9):
            store.put("r", 0, *block(T + 100 * i, 0.5, seconds=1))
    store.flush()
    assert [round(k.start_s - T) for k in store.read("r", 0, 0.0, 2 * T)] == [600, 700, 800]


def test_a_minute_in_which_little_was_known_is_not_known(store: WindowStore) -> None:
    known = [a_second(T + i, 0.5) for i in range(21)]
    lost = [a_second(T + i, None, validity=Validity.LOST) for i in range(21, 60)]
    rows = pack(T, batch_of(known + lost))
    store.put("r", 0, T, T + 60, rows)
    store.put("r", 0, *block(T + 7200, 0.5))
    store.flush()
    store.put("r", 0, *block(T + 7300, 0.5))
    store.flush()
    first = store.read("r", 0, 0.0, T + 100)[0]
    assert first.validity is Validity.LOST
