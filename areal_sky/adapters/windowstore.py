"""The head's history of GPU windows on disk: each second of the last hour, each minute of the last week, bounded.

A block holds about a minute of one node. It is history for people to look at: no decision waits for it, a head that
is killed loses the minute that it had not yet written, and a full disk costs the history alone.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import zlib
from collections import deque
from pathlib import Path

from areal_sky.adapters.database import Database
from areal_sky.core.windowpack import Kept, rolled_up, unpack
from areal_sky.errors import StateError

log = logging.getLogger(__name__)

SECONDS_S = 3600.0
MINUTES_S = 7 * 86400.0
MAX_BYTES = 2**30  # about 1,000 nodes of 8 GPUs for an hour and two days; beyond, the oldest goes first
QUEUED = 4096  # blocks that wait for the disk, 13 kB each
WRITE_S = 1.0
PRUNE_S = 60.0
FORMAT = 1
TABLES = """
CREATE TABLE blocks (
    start_s REAL NOT NULL, end_s REAL NOT NULL, rolled INTEGER NOT NULL, replica TEXT NOT NULL, node INTEGER NOT NULL,
    data BLOB NOT NULL
);
CREATE INDEX blocks_by_node ON blocks (replica, node, rolled, start_s);
CREATE INDEX blocks_by_time ON blocks (rolled, start_s)
"""

Block = tuple[str, int, float, float, bytes]  # replica, node, start_s, end_s, packed windows


class WindowStore:
    """Writes in a thread of its own, which also opens the file. One that cannot be used says so in the log."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES):
        self._path = path
        self._max_bytes = max_bytes
        self._queue: deque[Block] = deque(maxlen=QUEUED)
        self._wake = threading.Condition()
        self._asked, self._written = 0, 0
        self._closing = False
        self._db: Database | None = None
        self._pruned_s = 0.0
        self._thread = threading.Thread(target=self._run, name="windows", daemon=True)
        self._thread.start()

    def put(self, replica: str, node: int, start_s: float, end_s: float, data: bytes) -> None:
        """Keep a block of packed windows (`core/windowpack.py`). Never waits; the oldest in the queue gives way."""
        self._queue.append((replica, node, start_s, end_s, data))

    def read(self, replica: str, node: int, since_s: float, until_s: float) -> list[Kept]:
        """Windows of a node in that time: each second where that is kept still, else each minute; oldest first."""
        db = self._db
        if db is None:
            return []
        query = "SELECT start_s, end_s, data FROM blocks WHERE replica = ? AND node = ? AND rolled = ? AND end_s > ?"
        query += " AND start_s < ? ORDER BY start_s"
        try:
            fine = db.read(query, (replica, node, 0, since_s, until_s))
            fine_from_s = min((b[0] for b in fine), default=until_s)
            coarse = db.read(query, (replica, node, 1, since_s, fine_from_s))
        except StateError as e:
            log.warning("no history of %s: %s", replica, e)
            return []
        found = [w for start_s, end_s, data in coarse if end_s <= fine_from_s + 1 for w in unpack(start_s, data)]
        found += [w for start_s, _, data in fine for w in unpack(start_s, zlib.decompress(data))]
        return [w for w in found if w.end_s > since_s and w.start_s < until_s]

    def flush(self) -> None:
        """Returns when all that was put before is on disk, or cannot be."""
        with self._wake:
            self._asked += 1
            mine = self._asked
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._written >= mine or not self._thread.is_alive(), timeout=30)

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(timeout=30)

    def size_bytes(self) -> int:
        """What the blocks take of the file."""
        if self._db is None:
            return 0
        pages, free, size = (
            self._db.read(f"PRAGMA {name}")[0][0] for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size

    # ------------------------------------------------------------ in the thread

    def _run(self) -> None:
        try:
            self._db = Database(self._path, TABLES, FORMAT)
        except StateError as e:
            log.warning("no history of GPUs is kept: %s", e)
        broken = ""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._asked > self._written, timeout=WRITE_S)
                asked, closing = self._asked, self._closing
            blocks: list[Block] = []
            with contextlib.suppress(IndexError):
                while True:
                    blocks.append(self._queue.popleft())
            try:
                if self._db is not None and blocks:
                    self._write(self._db, blocks)
                broken = ""
            except StateError as e:
                if str(e) != broken:
                    log.warning("history of GPUs is not kept now: %s", e)
                broken = str(e)
            with self._wake:
                self._written = asked
                self._wake.notify_all()
            if closing:
                if self._db is not None:
                    self._db.close()
                return

    def _write(self, db: Database, blocks: list[Block]) -> None:
        rows = [
            row
            for replica, node, start_s, end_s, data in blocks
            for row in (
                (start_s, end_s, 0, replica, node, zlib.compress(data, 1)),
                (start_s, end_s, 1, replica, node, rolled_up(start_s, data)),
            )
        ]
        newest_s = max(b[3] for b in blocks)

        def change(connection: sqlite3.Connection) -> None:
            connection.executemany("INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?)", rows)
            if abs(newest_s - self._pruned_s) >= PRUNE_S:
                self._pruned_s = newest_s
                for rolled, keep_s in ((0, SECONDS_S), (1, MINUTES_S)):
                    connection.execute(
                        "DELETE FROM blocks WHERE rolled = ? AND start_s < ?", (rolled, newest_s - keep_s - PRUNE_S)
                    )

        db.write(change)
        while (size := self.size_bytes()) > self._max_bytes and self._drop_oldest(db, size):
            pass

    def _drop_oldest(self, db: Database, size: int) -> bool:
        """Drop about as much as is too much, oldest first: seconds are mostly newer than minutes, so these go first."""
        (count,) = db.read("SELECT count(*) FROM blocks")[0]
        share = max(1, round(count * min(1.0, 1.1 * (size - self._max_bytes) / size)))
        dropped = db.write(
            lambda c: c.execute(
                "DELETE FROM blocks WHERE rowid IN (SELECT rowid FROM blocks ORDER BY start_s LIMIT ?)", (share,)
            ).rowcount
        )
        return dropped > 0
