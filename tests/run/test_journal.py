"""The task journal: what was written is there, what is unusable is refused and kept."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from areal_sky.core.model import Bundle
from areal_sky.core.taskevents import (
    Draining,
    Ended,
    Place,
    Placed,
    RankExited,
    Requeued,
    Started,
    Starting,
    Stopping,
    Submitted,
    TaskEvent,
)
from areal_sky.core.taskmodel import TaskSpec, TaskState
from areal_sky.errors import StateError
from areal_sky.run.journal import Journal

SPEC = TaskSpec(
    "train", command="python a.py", bundles=2, bundle=Bundle(0.5, 2, 8), envs={"A": "ü\n"}, accelerators=("H100",)
)
EVENTS = [
    TaskEvent(1.0, "t1", Submitted(1, SPEC)),
    TaskEvent(2.0, "t1", Placed(1, (Place("n1", "c-w-0", 0, ((0, 0.5),)), Place("n2", "c-w-1", 0, ((3, 0.5),))))),
    TaskEvent(3.0, "t1", Starting()),
    TaskEvent(3.5, "t1", Started()),
    TaskEvent(4.0, "t1", RankExited(1, None, "node died", "last words")),
    TaskEvent(4.5, "t1", Stopping("lost", "node c-w-1/0 died")),
    TaskEvent(5.0, "t1", Requeued("node c-w-1/0 died", False)),
    TaskEvent(6.0, "", Draining("c-w-0", ("n1",), 99.0, "idle")),
    TaskEvent(7.0, "t1", Ended(TaskState.CANCELLED, "by the user")),
]


def test_every_kind_of_event_reads_back_as_it_was(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    journal.append(EVENTS[:4])
    journal.append(EVENTS[4:])
    journal.close()
    again = Journal(tmp_path / "journal.db")
    assert again.read() == EVENTS
    assert again.read("t1") == [e for e in EVENTS if e.task_id == "t1"]
    assert (tmp_path / "journal.db").stat().st_mode & 0o777 == 0o600


def test_metrics_read_back_latest_last(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    journal.append_metrics([("t1", 1.0, 1, {"loss": 2.0}), ("t1", 2.0, 1, {"loss": 1.0}), ("t2", 3.0, 1, {"x": 0.0})])
    assert journal.metrics("t1") == [("t1", 1.0, 1, {"loss": 2.0}), ("t1", 2.0, 1, {"loss": 1.0})]
    assert journal.metrics(limit=1) == [("t2", 3.0, 1, {"x": 0.0})]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    with pytest.raises(StateError, match="in use by another head"):
        Journal(tmp_path / "journal.db")
    journal.close()
    Journal(tmp_path / "journal.db").close()


def test_an_append_survives_kill_9(tmp_path: Path) -> None:
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_journal import EVENTS
from areal_sky.run.journal import Journal
Journal(Path({str(tmp_path)!r}) / "journal.db").append(EVENTS)
os.kill(os.getpid(), {int(signal.SIGKILL)})
"""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert Journal(tmp_path / "journal.db").read() == EVENTS


def test_a_newer_journal_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(path)
    journal.append(EVENTS)
    journal.close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    before = path.read_bytes()
    with pytest.raises(StateError, match=r"newer areal_sky \(format 99.*journal\.db\.refused"):
        Journal(path)
    assert path.read_bytes() == before
    assert (tmp_path / "journal.db.refused").read_bytes() == before


@pytest.mark.parametrize("damage", ["garbage", "cut", "no version"])
def test_a_damaged_journal_is_refused_and_kept(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(path)
    journal.append(EVENTS * 50)
    journal.close()
    data = path.read_bytes()
    if damage == "garbage":
        path.write_bytes(b"not a database at all" * 500)
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        db = sqlite3.connect(path)
        db.execute("PRAGMA user_version = 0")
        db.commit()
        db.close()
    before = path.read_bytes()
    for _ in range(2):  # a restart loop tries again and must not pile up copies
        with pytest.raises(StateError, match=r"damaged.*left as it is.*move it away"):
            Journal(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.glob("*.refused")] == ["journal.db.refused"]


def test_a_row_of_the_future_is_an_error_not_a_guess(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    journal._db._db.execute("INSERT INTO events (t_s, task_id, kind, body) VALUES (1, 't1', 'Teleported', '{}')")
    with pytest.raises(StateError, match="Teleported"):
        journal.read()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot write beside the task journal"):
        Journal(tmp_path / "file" / "journal.db")


def test_a_failed_append_leaves_nothing_behind(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    journal._db._db.execute("PRAGMA max_page_count = 8")  # a full disk
    big = TaskEvent(1.0, "t1", Submitted(1, TaskSpec("train", command="x" * 60_000)))
    with pytest.raises(StateError, match="full"):
        journal.append([EVENTS[0], big])
    assert journal.read() == []
