"""The task journal: every fact about tasks, in order, in sqlite (WAL). It is the truth; records are its fold.

An append is on disk when it returns, so a `kill -9` of the service at any point loses nothing that anyone was told.
A journal that is damaged or was written by a newer version is refused, never overwritten; a copy is put aside.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from areal_sky.core.taskevents import TaskEvent
from areal_sky.errors import StateError

SCHEMA = 1
_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, t_s REAL NOT NULL, task_id TEXT NOT NULL, kind TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX events_by_task ON events (task_id, seq);
CREATE TABLE metrics (task_id TEXT NOT NULL, t_s REAL NOT NULL, attempt INTEGER NOT NULL, body TEXT NOT NULL);
CREATE INDEX metrics_by_task ON metrics (task_id, t_s);
"""


class Journal:
    """One process at a time holds a journal open; its threads may share it."""

    def __init__(self, path: Path):
        """Opens or creates. Raises StateError, which says where the copy of an unusable journal lies."""
        self.path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._guard = path.with_name(path.name + ".lock").open("a")
            fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        except BlockingIOError:
            self._guard.close()
            raise StateError(f"{path} is in use by another head of this cluster") from None
        except OSError as e:
            raise StateError(f"cannot write the task journal {path}: {e.strerror or e}") from None
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                self._open()
            except BaseException:
                self._db.close()
                raise
        except sqlite3.DatabaseError as e:
            raise self._refuse(f"is damaged ({e})") from None
        except StateError:
            self._guard.close()
            raise

    def read(self, task_id: str | None = None) -> list[TaskEvent]:
        """All events in order, or those of one task. Raises StateError."""
        where, arguments = ("", ()) if task_id is None else (" WHERE task_id = ?", (task_id,))
        with self._lock:
            try:
                rows = self._db.execute(
                    f"SELECT t_s, task_id, kind, body FROM events{where} ORDER BY seq", arguments
                ).fetchall()
            except sqlite3.Error as e:
                raise StateError(f"cannot read the task journal {self.path}: {e}") from None
        return [TaskEvent.from_row(*row) for row in rows]

    def append(self, events: Sequence[TaskEvent]) -> None:
        """Writes all of them or none; on disk when it returns. Raises StateError (a full disk, say)."""
        rows = [e.to_row() for e in events]
        self._write("INSERT INTO events (t_s, task_id, kind, body) VALUES (?, ?, ?, ?)", rows)

    def append_metrics(self, rows: Iterable[tuple[str, float, int, Mapping[str, float]]]) -> None:
        """(task, time, attempt, values). Raises StateError."""
        self._write(
            "INSERT INTO metrics (task_id, t_s, attempt, body) VALUES (?, ?, ?, ?)",
            [(task_id, t_s, attempt, json.dumps(dict(values))) for task_id, t_s, attempt, values in rows],
        )

    def metrics(self, task_id: str | None = None, limit: int = 1000) -> list[tuple[str, float, int, dict[str, float]]]:
        """The latest rows, oldest of them first. Raises StateError."""
        where, arguments = ("", ()) if task_id is None else (" WHERE task_id = ?", (task_id,))
        with self._lock:
            try:
                rows = self._db.execute(
                    f"SELECT task_id, t_s, attempt, body FROM metrics{where} ORDER BY rowid DESC LIMIT ?",
                    (*arguments, limit),
                ).fetchall()
            except sqlite3.Error as e:
                raise StateError(f"cannot read the task journal {self.path}: {e}") from None
        return [(task, t_s, attempt, json.loads(body)) for task, t_s, attempt, body in reversed(rows)]

    def close(self) -> None:
        with self._lock:
            self._db.close()
            self._guard.close()

    def _open(self) -> None:
        db = self._db
        db.execute("PRAGMA busy_timeout = 5000")
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("BEGIN IMMEDIATE")
            for statement in _TABLES.split(";"):
                if statement.strip():
                    db.execute(statement)
            db.execute("INSERT INTO meta VALUES ('schema', ?)", (str(SCHEMA),))
            db.execute("COMMIT")
        if (found := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(found)
        row = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
        if row is None or not row[0].isdigit():
            raise sqlite3.DatabaseError("no schema version in it")
        if int(row[0]) > SCHEMA:
            raise self._refuse(
                f"was written by a newer areal_sky (schema {row[0]}, this one knows {SCHEMA}): use that version"
            )
        # FULL: an answered submit survives the power going off, not only our own end.
        db.execute("PRAGMA synchronous = FULL")

    def _write(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        if not rows:
            return
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    self._db.executemany(statement, rows)
                    self._db.execute("COMMIT")
                except sqlite3.Error:
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as e:
                raise StateError(f"cannot write the task journal {self.path}: {e}") from None

    def _refuse(self, why: str) -> StateError:
        """The journal stays as it is; one copy of it (the first) is kept aside."""
        aside = self.path.with_name(self.path.name + ".refused")
        try:
            if not aside.exists():
                shutil.copyfile(self.path, aside)
                aside.chmod(0o600)
            kept = f"it was left as it is, with a copy in {aside}"
        except OSError as e:
            kept = f"it was left as it is (no copy could be made: {e.strerror or e})"
        self._guard.close()
        return StateError(
            f"the task journal {self.path} {why}; {kept}. To go on without its tasks, move the file away."
        )
