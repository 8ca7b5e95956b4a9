"""A cluster's events on disk, as values. Several processes append to one file: the controller and the command line."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from areal_sky.adapters.database import Database
from areal_sky.core.events import Event, Record, decode, encode
from areal_sky.errors import StateError

FORMAT = 1
TABLES = """
CREATE TABLE events (seq INTEGER PRIMARY KEY, t_s REAL NOT NULL, name TEXT NOT NULL, fields TEXT NOT NULL)
"""


class EventStore:
    """An append-only list of events, numbered from 1 without gaps."""

    def __init__(self, path: Path, durable: bool = True):
        """Opens or creates the file. Raises StateError."""
        self._db = Database(path, TABLES, FORMAT, durable=durable)

    def append(self, t_s: float, *events: Event) -> list[Record]:
        """Adds the events, all or none. Raises StateError."""
        return self._append(t_s, events, None) or []

    def append_if(self, t_s: float, expected_seq: int, *events: Event) -> list[Record] | None:
        """Adds them only while nothing was added after `expected_seq`; None when somebody was faster."""
        return self._append(t_s, events, expected_seq)

    def read(self, after_seq: int = 0) -> list[Record]:
        """Events after that number, in order. Raises StateError."""
        rows = self._db.read("SELECT seq, t_s, name, fields FROM events WHERE seq > ? ORDER BY seq", (after_seq,))
        try:
            return [Record(seq, t_s, decode(name, json.loads(fields))) for seq, t_s, name, fields in rows]
        except (ValueError, TypeError) as e:
            raise StateError(f"{self._db.path} holds an event that cannot be read: {e}") from None

    def close(self) -> None:
        self._db.close()

    def _append(self, t_s: float, events: tuple[Event, ...], expected_seq: int | None) -> list[Record] | None:
        def change(db: sqlite3.Connection) -> list[Record] | None:
            last = db.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()[0]
            if expected_seq is not None and last != expected_seq:
                return None
            records = [Record(last + i, t_s, event) for i, event in enumerate(events, 1)]
            encoded = [(r.seq, r.t_s, *encode(r.event)) for r in records]
            db.executemany(
                "INSERT INTO events VALUES (?, ?, ?, ?)", [(s, t, name, json.dumps(f)) for s, t, name, f in encoded]
            )
            return records

        return self._db.write(change)
