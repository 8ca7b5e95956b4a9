"""One sqlite file (WAL): opened safely, written in whole transactions, never overwritten when it cannot be trusted.

What was written survives `kill -9` of anything and a power cut. A file that is damaged, or was made by a newer
version, is left as it is with a copy beside it, and the error says where.
"""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from areal_sky.errors import StateError

T = TypeVar("T")
DAMAGE = ("not a database", "malformed", "disk image", "file is encrypted")


class Database:
    """Several processes may have the same file open; the threads of one may share an instance."""

    def __init__(
        self,
        path: Path,
        tables: str,
        version: int,
        upgrade: Callable[[sqlite3.Connection, int], None] | None = None,
        durable: bool = True,
    ):
        """Opens the file, or creates it with `tables` (SQL) at that format version. Raises StateError.

        `upgrade(db, found)` brings a file of an older format to this one, in one transaction. Not `durable`: a power
        cut may take the latest writes, for virtual worlds, where nobody pulls the plug.
        """
        self.path = path
        self._version = version
        self._upgrade = upgrade
        self._durable = durable
        self._lock = threading.RLock()
        with self._translated():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            # Autocommit: each statement is its own transaction unless `write` opens one.
            self._db = sqlite3.connect(path, timeout=10.0, isolation_level=None, check_same_thread=False)
            try:
                self._open(tables)
            except BaseException:
                self._db.close()
                raise

    def read(self, sql: str, arguments: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query. Raises StateError."""
        with self._lock, self._translated():
            return self._db.execute(sql, arguments).fetchall()

    def write(self, change: Callable[[sqlite3.Connection], T]) -> T:
        """Runs `change` in one transaction that nobody else writes in; all of it happens, or none.

        Raises StateError (a full disk, say), and what `change` raises.
        """
        with self._lock, self._translated():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                result = change(self._db)
                self._db.execute("COMMIT")
                return result
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _open(self, tables: str) -> None:
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        if found > self._version:
            raise StateError(
                f"{self.path} was written by a newer areal_sky (format {found}, this one reads {self._version}); "
                f"{self._set_aside()}: upgrade areal_sky to go on"
            )
        if (check := self._db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(f"malformed: {check}")
        self._db.execute("PRAGMA journal_mode=WAL")
        # An intent must survive a power cut.
        self._db.execute(f"PRAGMA synchronous={'FULL' if self._durable else 'OFF'}")
        if found == 0:
            self.write(lambda db: self._create(db, tables))
        elif found < self._version and self._upgrade is not None:
            self.write(lambda db: self._bring_up(db, self._upgrade))

    def _create(self, db: sqlite3.Connection, tables: str) -> None:
        if db.execute("PRAGMA user_version").fetchone()[0]:
            return  # another process was faster
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise sqlite3.DatabaseError("malformed: no format version in it")
        for statement in filter(str.strip, tables.split(";")):
            db.execute(statement)
        db.execute(f"PRAGMA user_version={self._version}")

    def _bring_up(self, db: sqlite3.Connection, upgrade: Callable[[sqlite3.Connection, int], None] | None) -> None:
        found = db.execute("PRAGMA user_version").fetchone()[0]
        if upgrade is not None and found < self._version:  # else another process was faster
            upgrade(db, found)
            db.execute(f"PRAGMA user_version={self._version}")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as e:
            if any(word in str(e) for word in DAMAGE):
                raise StateError(
                    f"{self.path} is damaged ({e}); {self._set_aside()}. "
                    "Restore it from a backup, or move it away to start anew"
                ) from None
            raise StateError(f"cannot use {self.path}: {e} (is the disk full or read-only?)") from None
        except OSError as e:
            raise StateError(f"cannot use {self.path}: {e.strerror or e}") from None

    def _set_aside(self) -> str:
        copy = self.path.with_name(self.path.name + ".refused")
        try:
            if not copy.exists():
                shutil.copyfile(self.path, copy)
                copy.chmod(0o600)
        except OSError as e:
            return f"it was left as it is (no copy could be made: {e.strerror or e})"
        return f"it was left as it is, with a copy at {copy}"
