from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import stat
from pathlib import Path

import pytest

from areal_sky.adapters.store import EventStore
from areal_sky.core.events import ClusterCreated, GroupDesired, ReplicaReady
from areal_sky.errors import StateError


def test_events_come_back_as_they_were(tmp_path: Path) -> None:
    store = EventStore(tmp_path / "events.db")
    wish = GroupDesired("rollout", 2, "because", "user", victims=("c-rollout-0",))
    store.append(1.5, ClusterCreated("c"), wish)
    store.append(2.5, ReplicaReady("c-rollout-1"))
    records = EventStore(tmp_path / "events.db").read()
    assert [(r.seq, r.t_s) for r in records] == [(1, 1.5), (2, 1.5), (3, 2.5)]
    assert records[1].event == wish
    assert [r.seq for r in store.read(2)] == [3]


def test_append_if_lets_only_the_first_win(tmp_path: Path) -> None:
    a, b = EventStore(tmp_path / "e.db"), EventStore(tmp_path / "e.db")
    assert a.append_if(0.0, 0, ClusterCreated("c")) is not None
    assert b.append_if(0.0, 0, ClusterCreated("c")) is None
    assert len(a.read()) == 1


def test_files_are_private(tmp_path: Path) -> None:
    EventStore(tmp_path / "e.db").append(0.0, ClusterCreated("c"))
    modes = {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
    assert modes == {0o600}


def test_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "e.db"
    EventStore(path).append(0.0, ClusterCreated("c"))
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=99")
    with pytest.raises(StateError, match="newer areal_sky"):
        EventStore(path)
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM events").fetchone() == (1,)


def test_unknown_event_is_refused(tmp_path: Path) -> None:
    EventStore(tmp_path / "e.db").close()
    with sqlite3.connect(tmp_path / "e.db") as db:
        db.execute("INSERT INTO events VALUES (1, 0.0, 'FromTheFuture', '{}')")
    with pytest.raises(StateError, match="FromTheFuture"):
        EventStore(tmp_path / "e.db").read()


def test_damaged_file_is_copied_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "e.db"
    path.write_bytes(b"not a database at all, but long enough to look like one" * 40)
    before = path.read_bytes()
    with pytest.raises(StateError, match="damaged") as caught:
        EventStore(path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before
    assert (tmp_path / "e.db.refused").read_bytes() == before


def test_damage_in_the_middle_is_found_on_reading(tmp_path: Path) -> None:
    path = tmp_path / "e.db"
    store = EventStore(path)
    for i in range(300):
        store.append(float(i), GroupDesired("rollout", i, "x" * 100, "user"))
    store.close()
    data = bytearray(path.read_bytes())
    data[8192:40000] = os.urandom(40000 - 8192)
    path.write_bytes(data)
    with pytest.raises(StateError, match=r"damaged|cannot use"):
        EventStore(path).read()


def test_full_disk_is_said_and_appends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "e.db"
    store = EventStore(path)
    store.append(0.0, ClusterCreated("c"))
    store._db._db.execute("PRAGMA max_page_count=3")  # sqlite then answers as on a full disk
    with pytest.raises(StateError, match="full"):
        for _ in range(50):
            store.append(0.0, GroupDesired("rollout", 1, "x" * 4000, "user"))
    seqs = [r.seq for r in store.read()]
    assert seqs == list(range(1, len(seqs) + 1))


def test_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot use"):
        EventStore(tmp_path / "file" / "below" / "e.db")


def _append_until_killed(path: str) -> None:
    store = EventStore(Path(path))
    for i in range(100_000):
        store.append(float(i), GroupDesired("rollout", i, "", "user"), ReplicaReady(f"r{i}"))


def test_kill_9_while_appending_keeps_whole_batches(tmp_path: Path) -> None:
    path = tmp_path / "e.db"
    process = multiprocessing.get_context("spawn").Process(target=_append_until_killed, args=(str(path),))
    process.start()
    store = EventStore(path)
    while len(store.read()) < 40:
        assert process.is_alive()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    records = store.read()
    assert [r.seq for r in records] == list(range(1, len(records) + 1))
    assert len(records) % 2 == 0
