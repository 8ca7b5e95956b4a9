"""The task journal: every fact about tasks, in order. It is the truth; records are its fold.

An append is on disk when it returns, so a `kill -9` of the service at any point loses nothing that anyone was told.
Beside the events, `tasks` has one row per task (how it is called, how it ended), written in the same transactions:
so a task that ended long ago is found without reading everything.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_sky.adapters.database import Database
from areal_sky.core.taskevents import Ended, Submitted, TaskEvent
from areal_sky.core.taskmodel import TaskState
from areal_sky.errors import StateError

FORMAT = 2
_INDEX = """
CREATE TABLE tasks (
    number INTEGER PRIMARY KEY, task_id TEXT NOT NULL, name TEXT NOT NULL, submit_key TEXT, state TEXT, ended_s REAL
);
CREATE INDEX tasks_by_id ON tasks (task_id);
CREATE INDEX tasks_by_name ON tasks (name) WHERE name != '';
CREATE INDEX tasks_by_key ON tasks (submit_key) WHERE submit_key IS NOT NULL;
CREATE INDEX tasks_by_end ON tasks (ended_s)
"""
TABLES = f"""
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, t_s REAL NOT NULL, task_id TEXT NOT NULL, kind TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX events_by_task ON events (task_id, seq);
CREATE TABLE metrics (task_id TEXT NOT NULL, t_s REAL NOT NULL, attempt INTEGER NOT NULL, body TEXT NOT NULL);
CREATE INDEX metrics_by_task ON metrics (task_id, t_s);
{_INDEX}
"""


class Journal:
    """One process at a time holds a journal open; its threads may share it."""

    def __init__(self, path: Path, durable: bool = True):
        """Opens or creates. Raises StateError: damaged, newer, not writable, or in use by another head."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._guard = path.with_name(path.name + ".lock").open("a")
        except OSError as e:
            raise StateError(f"cannot write beside the task journal {path}: {e.strerror or e}") from None
        try:
            fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._db = Database(path, TABLES, FORMAT, _upgrade, durable)
        except BlockingIOError:
            self._guard.close()
            raise StateError(f"{path} is in use by another head of this cluster") from None
        except StateError:
            self._guard.close()
            raise

    def read(self, task_id: str | None = None) -> list[TaskEvent]:
        """All events in order, or those of one task. Raises StateError."""
        where, arguments = _of(task_id)
        return self._events(f"SELECT t_s, task_id, kind, body FROM events{where} ORDER BY seq", arguments)

    def read_live(self, ended_since_s: float | None = None) -> list[TaskEvent]:
        """Events of the tasks that have not ended (or not before `ended_since_s`), and of nodes, in order."""
        late, arguments = ("", ()) if ended_since_s is None else (" OR t.ended_s >= ?", (ended_since_s,))
        return self._events(
            "SELECT e.t_s, e.task_id, e.kind, e.body FROM events e LEFT JOIN tasks t ON t.task_id = e.task_id"
            f" WHERE e.task_id = '' OR t.ended_s IS NULL{late} ORDER BY e.seq",
            arguments,
        )

    def append(self, events: Sequence[TaskEvent]) -> None:
        """Writes all of them or none; on disk when it returns. Raises StateError (a full disk, say)."""
        if events:
            self._db.write(lambda db: _append(db, events))

    # -- what is known of tasks without reading all of their events; all raise StateError

    def last_number(self) -> int:
        """The number of the latest submit; 0 before the first."""
        return int(self._db.read("SELECT coalesce(max(number), 0) FROM tasks")[0][0])

    def latest_ended(self, limit: int) -> list[str]:
        """Ids of the tasks that ended last, the latest last."""
        rows = self._db.read(
            "SELECT task_id FROM tasks WHERE ended_s IS NOT NULL ORDER BY ended_s DESC, number DESC LIMIT ?", (limit,)
        )
        return [row[0] for row in reversed(rows)]

    def state(self, number: int) -> TaskState | None:
        """How the task with that number ended; QUEUED as long as it has not; None when there is none."""
        rows = self._db.read("SELECT state FROM tasks WHERE number = ?", (number,))
        return TaskState(rows[0][0] or TaskState.QUEUED) if rows else None

    def find(self, *, name: str | None = None, submit_key: str | None = None) -> str | None:
        """The id of the latest task of that name, or of the first with that submit key."""
        if submit_key is not None:
            rows = self._db.read(
                "SELECT task_id FROM tasks WHERE submit_key = ? ORDER BY number LIMIT 1", (submit_key,)
            )
        else:
            rows = self._db.read(
                "SELECT task_id FROM tasks WHERE name = ? AND name != '' ORDER BY number DESC LIMIT 1", (name,)
            )
        return rows[0][0] if rows else None

    # -- metrics

    def append_metrics(self, rows: Iterable[tuple[str, float, int, Mapping[str, float | None]]]) -> None:
        """(task, time, attempt, values); None: it was no number. Raises StateError."""
        values = [(task_id, t_s, attempt, json.dumps(dict(values))) for task_id, t_s, attempt, values in rows]
        statement = "INSERT INTO metrics (task_id, t_s, attempt, body) VALUES (?, ?, ?, ?)"
        if values:
            self._db.write(lambda db: db.executemany(statement, values))

    def trim_metrics(self, keep: int) -> None:
        """Forgets all but the latest so many reports. Raises StateError."""
        self._db.write(
            lambda db: db.execute("DELETE FROM metrics WHERE rowid <= (SELECT max(rowid) FROM metrics) - ?", (keep,))
        )

    def metrics(
        self, task_id: str | None = None, limit: int = 1000
    ) -> list[tuple[str, float, int, dict[str, float | None]]]:
        """The latest rows, oldest of them first. Raises StateError."""
        where, arguments = _of(task_id)
        rows = self._db.read(
            f"SELECT task_id, t_s, attempt, body FROM metrics{where} ORDER BY rowid DESC LIMIT ?", (*arguments, limit)
        )
        return [(task, t_s, attempt, json.loads(body)) for task, t_s, attempt, body in reversed(rows)]

    def close(self) -> None:
        self._db.close()
        self._guard.close()

    def _events(self, sql: str, arguments: Sequence[Any]) -> list[TaskEvent]:
        return [TaskEvent.from_row(*row) for row in self._db.read(sql, arguments)]


def _append(db: Any, events: Sequence[TaskEvent]) -> None:
    db.executemany(
        "INSERT INTO events (t_s, task_id, kind, body) VALUES (?, ?, ?, ?)", (e.to_row() for e in events)
    )
    db.executemany(
        "INSERT OR REPLACE INTO tasks (number, task_id, name, submit_key) VALUES (?, ?, ?, ?)",
        (
            (e.fact.number, e.task_id, e.fact.spec.name, e.fact.spec.submit_key)
            for e in events
            if isinstance(e.fact, Submitted)
        ),
    )
    db.executemany(
        "UPDATE tasks SET state = ?, ended_s = ? WHERE task_id = ?",
        ((e.fact.state.value, e.t_s, e.task_id) for e in events if isinstance(e.fact, Ended)),
    )


def _upgrade(db: Any, found: int) -> None:
    """Format 1 had no `tasks`: they are read out of the events."""
    for statement in filter(str.strip, _INDEX.split(";")):
        db.execute(statement)
    db.execute(
        "INSERT INTO tasks (number, task_id, name, submit_key)"
        " SELECT json_extract(body, '$.number'), task_id, coalesce(json_extract(body, '$.spec.name'), ''),"
        " json_extract(body, '$.spec.submit_key') FROM events WHERE kind = 'Submitted'"
    )
    db.execute(
        "UPDATE tasks SET (state, ended_s) = (SELECT json_extract(body, '$.state'), t_s FROM events"
        " WHERE events.task_id = tasks.task_id AND kind = 'Ended')"
    )


def _of(task_id: str | None) -> tuple[str, tuple[str, ...]]:
    return ("", ()) if task_id is None else (" WHERE task_id = ?", (task_id,))
