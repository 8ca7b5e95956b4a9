"""Alerts on disk: a row for every change of each, so that `why` can tell them and a new head knows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from areal_sky.adapters.database import Database
from areal_sky.core.alerts import Alert, from_json, to_json

KEEP_ROWS = 20_000
TABLES = """
CREATE TABLE alerts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, t_s REAL NOT NULL, number INTEGER NOT NULL, moved TEXT NOT NULL,
    tasks TEXT NOT NULL, body TEXT NOT NULL
);
CREATE INDEX alerts_by_number ON alerts (number, seq)
"""


class AlertStore:
    """The threads of one process may share it. Every method raises StateError."""

    def __init__(self, path: Path):
        self._db = Database(path, TABLES, 1)

    def append(self, t_s: float, moved: str, alert: Alert) -> None:
        """`moved`: raised, again, resolved, or what was done."""
        tasks = "".join(f" {t} " for t in alert.where.affected)
        row = (t_s, alert.number, moved, tasks, json.dumps(to_json(alert)))

        def change(db: Any) -> None:
            db.execute("INSERT INTO alerts (t_s, number, moved, tasks, body) VALUES (?, ?, ?, ?, ?)", row)
            db.execute("DELETE FROM alerts WHERE seq <= (SELECT max(seq) FROM alerts) - ?", (KEEP_ROWS,))

        self._db.write(change)

    def latest(self) -> list[Alert]:
        """The latest state of every alert, oldest first."""
        rows = self._db.read(
            "SELECT body FROM alerts WHERE seq IN (SELECT max(seq) FROM alerts GROUP BY number) ORDER BY seq"
        )
        return [from_json(json.loads(row[0])) for row in rows]

    def story(self, task_id: str) -> list[tuple[float, str]]:
        """(time, sentence) of what was raised about the task, and done."""
        rows = self._db.read(
            "SELECT t_s, moved, body FROM alerts WHERE tasks LIKE ? ORDER BY seq", (f"% {task_id} %",)
        )
        return [(t_s, sentence(moved, from_json(json.loads(body)))) for t_s, moved, body in rows]

    def close(self) -> None:
        self._db.close()


def sentence(moved: str, alert: Alert) -> str:
    """What has become of the alert, in one line."""
    about = f"{alert.kind} at {alert.where}"
    match moved:
        case "raised" | "again":
            back = " is back" if moved == "again" else ""
            return f"alert {alert.alert_id}{back}: {about}: {alert.what} ({alert.evidence})"
        case "resolved":
            return f"alert {alert.alert_id} is over: {about}"
        case _:
            return f"alert {alert.alert_id}: {moved}"
