"""The task journal: every fact about tasks, in order. It is the truth; records are its fold.

An append is on disk when it returns, so a `kill -9` of the service at any point loses nothing that anyone was told.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_sky.adapters.database import Database
from areal_sky.core.taskevents import TaskEvent
from areal_sky.errors import StateError

FORMAT = 1
TABLES = """
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, t_s REAL NOT NULL, task_id TEXT NOT NULL, kind TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX events_by_task ON events (task_id, seq);
CREATE TABLE metrics (task_id TEXT NOT NULL, t_s REAL NOT NULL, attempt INTEGER NOT NULL, body TEXT NOT NULL);
CREATE INDEX metrics_by_task ON metrics (task_id, t_s)
"""


class Journal:
    """One process at a time holds a journal open; its threads may share it."""

    def __init__(self, path: Path):
        """Opens or creates. Raises StateError: damaged, newer, not writable, or in use by another head."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._guard = path.with_name(path.name + ".lock").open("a")
        except OSError as e:
            raise StateError(f"cannot write beside the task journal {path}: {e.strerror or e}") from None
        try:
            fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._db = Database(path, TABLES, FORMAT)
        except BlockingIOError:
            self._guard.close()
            raise StateError(f"{path} is in use by another head of this cluster") from None
        except StateError:
            self._guard.close()
            raise

    def read(self, task_id: str | None = None) -> list[TaskEvent]:
        """All events in order, or those of one task. Raises StateError."""
        where, arguments = _of(task_id)
        rows = self._db.read(f"SELECT t_s, task_id, kind, body FROM events{where} ORDER BY seq", arguments)
        return [TaskEvent.from_row(*row) for row in rows]

    def append(self, events: Sequence[TaskEvent]) -> None:
        """Writes all of them or none; on disk when it returns. Raises StateError (a full disk, say)."""
        self._insert("INSERT INTO events (t_s, task_id, kind, body) VALUES (?, ?, ?, ?)", [e.to_row() for e in events])

    def append_metrics(self, rows: Iterable[tuple[str, float, int, Mapping[str, float]]]) -> None:
        """(task, time, attempt, values). Raises StateError."""
        self._insert(
            "INSERT INTO metrics (task_id, t_s, attempt, body) VALUES (?, ?, ?, ?)",
            [(task_id, t_s, attempt, json.dumps(dict(values))) for task_id, t_s, attempt, values in rows],
        )

    def metrics(self, task_id: str | None = None, limit: int = 1000) -> list[tuple[str, float, int, dict[str, float]]]:
        """The latest rows, oldest of them first. Raises StateError."""
        where, arguments = _of(task_id)
        rows = self._db.read(
            f"SELECT task_id, t_s, attempt, body FROM metrics{where} ORDER BY rowid DESC LIMIT ?", (*arguments, limit)
        )
        return [(task, t_s, attempt, json.loads(body)) for task, t_s, attempt, body in reversed(rows)]

    def close(self) -> None:
        self._db.close()
        self._guard.close()

    def _insert(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        if rows:
            self._db.write(lambda db: db.executemany(statement, rows))


def _of(task_id: str | None) -> tuple[str, tuple[str, ...]]:
    return ("", ()) if task_id is None else (" WHERE task_id = ?", (task_id,))
