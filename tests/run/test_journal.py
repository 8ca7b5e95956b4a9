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
    Checkpointed,
    Draining,
    Ended,
    NodeAvoided,
    PhaseChanged,
    Place,
    Placed,
    RankExited,
    Requeued,
    Shrinking,
    Shrunk,
    Started,
    Starting,
    Stopping,
    Submitted,
    TaskEvent,
    Warned,
)
from areal_sky.core.tasklife import fold
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
    TaskEvent(6.1, "", NodeAvoided("n1", "c-w-0/0", 99.0, "bad")),
    TaskEvent(6.2, "t1", Placed(2, (Place("n1", "c-w-0", 0, ((0, 1.0),), 8.0, 64.0, ("3", "GPU-ü"), "t4.1"),))),
    TaskEvent(6.3, "t1", Shrinking((1, 2), "for t9")),
    TaskEvent(6.4, "t1", Shrunk((1, 2))),
    TaskEvent(6.5, "t1", Checkpointed()),
    TaskEvent(6.6, "t1", PhaseChanged("eval", True)),
    TaskEvent(6.7, "t1", Warned("its deadline was 5 s ago")),
    TaskEvent(6.8, "t1", Requeued("oom", True, 77.5, Bundle(1, 2, 16), ("H200",))),
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


OLD_TABLES = """
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, t_s REAL NOT NULL, task_id TEXT NOT NULL, kind TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX events_by_task ON events (task_id, seq);
CREATE TABLE metrics (task_id TEXT NOT NULL, t_s REAL NOT NULL, attempt INTEGER NOT NULL, body TEXT NOT NULL);
CREATE INDEX metrics_by_task ON metrics (task_id, t_s);
PRAGMA user_version = 1;
"""
OLD_SPEC = (
    '{"kind":"train","command":"x","payload":null,"name":"grpo","model":null,"model_type":null,"bundles":1,'
    '"bundle":{"gpus":1,"cpus":1,"memory_gib":0.0},"priority":5.0,"group":null,"accelerators":[],"envs":{},'
    '"max_retries":1,"deadline_s":null,"submit_key":"k"}'
)
OLD_PLACE = '{"node_id":"n1","replica":"c-w-0","index":0,"devices":[[0,1.0]]}'
# Rows as the first version wrote them.
OLD_ROWS = [
    (1.0, "t1", "Submitted", f'{{"number":1,"spec":{OLD_SPEC}}}'),
    (2.0, "t1", "Placed", f'{{"attempt":1,"places":[{OLD_PLACE}]}}'),
    (3.0, "t1", "Starting", "{}"),
    (4.0, "t1", "Started", "{}"),
    (5.0, "t1", "RankExited", '{"rank":0,"code":1,"lost":"","tail":"boom"}'),
    (6.0, "t1", "Stopping", '{"kind":"failed","reason":"why"}'),
    (7.0, "t1", "Requeued", '{"reason":"why","counted":true}'),
    (7.5, "", "Draining", '{"replica":"c-w-0","node_ids":["n1"],"deadline_s":99.0,"reason":"idle"}'),
    (8.0, "t2", "Submitted", '{{"number":2,"spec":{}}}'.format(OLD_SPEC.replace('"k"', "null"))),
    (9.0, "t2", "Ended", '{"state":"CANCELLED","reason":"by the user"}'),
]


def test_a_journal_of_the_first_version_is_taken_over(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "journal.db") as db:
        db.executescript(OLD_TABLES)
        db.executemany("INSERT INTO events (t_s, task_id, kind, body) VALUES (?, ?, ?, ?)", OLD_ROWS)
    db.close()
    for _ in range(2):
        journal = Journal(tmp_path / "journal.db")
        records, nodes = fold(journal.read())
        assert (records["t1"].state, records["t1"].retries, records["t1"].spec.backoff_s) == (TaskState.QUEUED, 1, 5.0)
        assert len(nodes) == 1
        assert (journal.last_number(), journal.find(submit_key="k"), journal.find(name="grpo")) == (2, "t1", "t2")
        assert (journal.state(1), journal.state(2), journal.state(3)) == (TaskState.QUEUED, TaskState.CANCELLED, None)
        assert journal.latest_ended(5) == ["t2"]
        assert {e.task_id for e in journal.read_live()} == {"t1", ""}
        assert {e.task_id for e in journal.read_live(ended_since_s=8.5)} == {"t1", "t2", ""}
        journal.close()


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
