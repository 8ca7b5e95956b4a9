"""Durable lists of JSON records in sqlite (WAL): a cluster's events, the head's task journal.

Several processes may append to one file; a record that was appended survives `kill -9` of anything. A file that
cannot be read, or was written by a newer version, is never overwritten: the error says where it is.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areal_sky.core.events import Event, Record, decode, encode
from areal_sky.errors import StateError

SCHEMA_VERSION = 1
Row = tuple[int, float, str, dict[str, Any]]  # seq, Unix time, name, fields


class RecordLog:
    """An append-only list of (time, name, fields), numbered from 1 without gaps."""

    def __init__(self, path: Path):
        """Opens or creates the file. Raises StateError when that is not possible."""
        self._path = path
        with self._translated():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            # Autocommit: each statement below is its own transaction unless it says BEGIN.
            self._db = sqlite3.connect(path, timeout=10.0, isolation_level=None, check_same_thread=False)
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA_VERSION:
                raise StateError(
                    f"{path} was written by a newer areal_sky (format {version}, this one reads {SCHEMA_VERSION}); "
                    "it was left as it is: upgrade areal_sky to go on"
                )
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")  # an intent must survive a power cut
            if version == 0:
                self._db.execute(
                    "CREATE TABLE IF NOT EXISTS log"
                    " (seq INTEGER PRIMARY KEY, t_s REAL NOT NULL, name TEXT NOT NULL, fields TEXT NOT NULL)"
                )
                self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def append(self, t_s: float, entries: list[tuple[str, dict[str, Any]]]) -> list[Row]:
        """Adds all entries or none. Returns them with their numbers. Raises StateError (full disk, read-only)."""
        return self.append_if(t_s, entries, expected_seq=None) or []

    def append_if(
        self, t_s: float, entries: list[tuple[str, dict[str, Any]]], expected_seq: int | None
    ) -> list[Row] | None:
        """Like append, but only while the last number still is `expected_seq`; None when somebody was faster."""
        with self._translated():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                last = self._db.execute("SELECT coalesce(max(seq), 0) FROM log").fetchone()[0]
                if expected_seq is not None and last != expected_seq:
                    self._db.execute("ROLLBACK")
                    return None
                rows: list[Row] = [(last + i, t_s, name, data) for i, (name, data) in enumerate(entries, 1)]
                self._db.executemany(
                    "INSERT INTO log VALUES (?, ?, ?, ?)",
                    [(seq, t, name, json.dumps(data)) for seq, t, name, data in rows],
                )
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            return rows

    def read(self, after_seq: int = 0) -> list[Row]:
        """All records with a number above `after_seq`, in order."""
        with self._translated():
            found = self._db.execute(
                "SELECT seq, t_s, name, fields FROM log WHERE seq > ? ORDER BY seq", (after_seq,)
            ).fetchall()
            return [(seq, t_s, name, json.loads(data)) for seq, t_s, name, data in found]

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as e:
            if _is_damage(e):
                raise StateError(self._set_aside(e)) from None
            raise StateError(f"cannot use {self._path}: {e} (is the disk full or read-only?)") from None
        except (OSError, json.JSONDecodeError) as e:
            raise StateError(f"cannot use {self._path}: {e}") from None

    def _set_aside(self, error: sqlite3.DatabaseError) -> str:
        copy = self._path.with_name(self._path.name + ".damaged")
        if not copy.exists():
            try:
                shutil.copy2(self._path, copy)
            except OSError as e:
                return f"{self._path} is damaged ({error}); it was left as it is (no copy could be made: {e})"
        return (
            f"{self._path} is damaged ({error}); it was left as it is, with a copy at {copy}. "
            "Restore it from a backup, or move it away to start anew"
        )


class EventStore:
    """A cluster's events, as values."""

    def __init__(self, path: Path):
        """Raises StateError."""
        self._log = RecordLog(path)

    def append(self, t_s: float, *events: Event) -> list[Record]:
        """Adds the events, all or none. Raises StateError."""
        return [_record(row) for row in self._log.append(t_s, [encode(e) for e in events])]

    def append_if(self, t_s: float, expected_seq: int, *events: Event) -> list[Record] | None:
        """Adds them only while nothing was added after `expected_seq`; else None."""
        rows = self._log.append_if(t_s, [encode(e) for e in events], expected_seq)
        return None if rows is None else [_record(row) for row in rows]

    def read(self, after_seq: int = 0) -> list[Record]:
        """Events after that number, in order. Raises StateError."""
        return [_record(row) for row in self._log.read(after_seq)]

    def close(self) -> None:
        self._log.close()


def _record(row: Row) -> Record:
    seq, t_s, name, data = row
    return Record(seq=seq, t_s=t_s, event=decode(name, data))


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    text = str(error)
    return "not a database" in text or "malformed" in text or "disk image" in text
