"""The head's watch: telemetry and reports in, alerts out, and what is done about them.

Heartbeats and reports are put down by the gateway's threads, which may not wait, and taken up by a thread of its own,
which looks twice a second, and at once when a GPU is lost or something else cannot wait.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from areal_sky.adapters.notices import Notices
from areal_sky.core.alertrules import RuleWatch
from areal_sky.core.alerts import HEALING, Alert, AlertBook, Change, Limit, actions_for, to_json
from areal_sky.core.anomaly import Detector
from areal_sky.core.findings import Finding, Kind, Where
from areal_sky.core.heartbeat import Heartbeat
from areal_sky.core.nodeenv import HeadEnv
from areal_sky.core.telemetry import Validity
from areal_sky.errors import ArealSkyError, InvalidInput, StateError
from areal_sky.run.alertstore import AlertStore
from areal_sky.run.tasks import TaskService
from areal_sky.run.tending import Running

log = logging.getLogger(__name__)
LOOK_S = 0.5
MANUAL_S = 60.0  # an alert that a program raises is over this long after it was raised last
MAX_MANUAL = 1000
NOTICES = (30, 600.0)  # at most so many people-facing notices within so many seconds
REQUEUES = (3, 86400.0, 600.0)  # of one task: at most 3 a day, 10 minutes apart
SAMPLING_S = 600.0  # how long a node is sampled faster or slower for an alert
DRAIN_S = 60.0
INBOX = 50_000  # heartbeats and reports that wait to be looked at; older ones are dropped
NodeKey = tuple[str, int]


class Report(NamedTuple):
    """What a task, or one rank of it, has told of itself."""

    task_id: str
    attempt: int
    values: Mapping[str, float]
    t_s: float
    rank: int | None


class Watch:
    """One per head. Its own lock is never held while the service is asked for anything."""

    def __init__(
        self,
        service: TaskService,
        store: AlertStore,
        env: HeadEnv,
        notices: Notices | None = None,
        clock: Callable[[], float] = time.time,
    ):
        """Raises StateError when the alerts of an earlier process cannot be read."""
        self._service, self._store, self._clock, self._notices = service, store, clock, notices
        self._specs = env.alerts
        self._lock = threading.Lock()
        self._inbox: deque[Heartbeat | Report] = deque(maxlen=INBOX)
        self._detector = Detector()  # used by the looking thread alone, as are the rules
        self._rules = RuleWatch(env.alerts)
        self._book = AlertBook(store.latest(), clock())
        self._manual: dict[Where | tuple[Where, str], tuple[Finding, float]] = {}
        self._sampling: dict[object, tuple[str, float]] = {}  # by node (replica, index)
        self._notice_limit = Limit(*NOTICES)
        self._requeue_limit = Limit(*REQUEUES)
        self._raised = Counter[str]()
        self._urgent = threading.Event()
        service.on_report = self.reported
        service.alert_lines = store.story
        if notices is not None:
            notices.told = self.told

    # ------------------------------------------------------------ what is told, by any thread

    def heard(self, beat: Heartbeat, now_s: float) -> str | None:
        """A heartbeat that the hub has taken. The sampling that the node shall go over to: fast, slow or None."""
        self._inbox.append(beat)
        if Validity.LOST in beat.windows["validity"]:
            self._urgent.set()
        wanted, until_s = self._sampling.get((beat.replica, beat.index), (None, 0.0))
        return wanted if now_s <= until_s else None

    def reported(
        self, task_id: str, attempt: int, values: Mapping[str, float], t_s: float, rank: int | None = None
    ) -> None:
        """Values that a task tells of itself."""
        self._inbox.append(Report(task_id, attempt, values, t_s, rank))
        if not all(map(math.isfinite, values.values())):
            self._urgent.set()

    def trigger(self, message: str, metrics: Mapping[str, float], task_id: str = "") -> dict[str, Any]:
        """An alert that a program raises; the same words at the same place are the same alert, active for MANUAL_S.

        {"alert_id", "new"}. Raises InvalidInput for an empty message or too many alerts at once.
        """
        words = " ".join(message.split())[:500]
        if not words:
            raise InvalidInput("message: expected some words")
        now_s, where = self._clock(), Where(task_id)
        evidence = ", ".join(f"{k} {v:.6g}" for k, v in metrics.items()) or "told by a program"
        numbers = {k: v for k, v in metrics.items() if math.isfinite(v)}
        finding = Finding(Kind.MANUAL, where, now_s, words, evidence, words, numbers)
        with self._lock:
            if (where, words) not in self._manual and len(self._manual) >= MAX_MANUAL:
                raise InvalidInput(f"more than {MAX_MANUAL} alerts at once: put what changes into `metrics`")
            self._manual[where, words] = (finding, now_s + MANUAL_S)
            changes = self._book.update([finding], now_s)
            alert = next(a for a in self._book.active() if a.key == finding.key)
        self._follow(changes, now_s)
        return {"alert_id": alert.alert_id, "new": any(c.moved == "raised" for c in changes)}

    def told(self, number: int, words: str) -> None:
        """Somebody was told of the alert, or could not be."""
        with self._lock:
            alert = next((a for a in self._book.active() if a.number == number), None)
            if alert is None:
                return
            alert = self._book.note(alert, [words])
        self._keep(self._clock(), words, alert)

    def uncordon(self, replica: str, index: int) -> str:
        """A person lifts a cordon. Raises NotFound, StateError."""
        return self._service.uncordon(replica, index, "a person says so")

    def listed(self, limit: int = 20) -> dict[str, Any]:
        """{"active": [...], "over": [the latest `limit`]}, latest first, as JSON values."""
        with self._lock:
            active, over = self._book.active(), self._book.over(limit)
        return {"t_s": self._clock(), "active": [to_json(a) for a in active], "over": [to_json(a) for a in over]}

    def counts(self) -> tuple[Counter[str], Counter[str]]:
        """By kind: the alerts that are active, and all that this process has raised."""
        with self._lock:
            return Counter(a.kind for a in self._book.active()), Counter(self._raised)

    # ------------------------------------------------------------ the look, by one thread

    def run(self, stop: threading.Event) -> None:
        """Looks until `stop`."""
        while not stop.is_set():
            self._urgent.wait(LOOK_S)
            self._urgent.clear()
            try:
                self.look()
            except ArealSkyError as e:
                log.warning("watch: %s", e)
            except Exception:
                log.exception("the watch failed; it goes on")
                stop.wait(1.0)

    def look(self) -> list[Change]:
        """Finds what is wrong now, and does what is to be done about it. Raises StateError."""
        now_s = self._clock()
        running = self._service.running()
        found = self._find(running, now_s)
        with self._lock:
            changes = self._book.update(found, now_s)
        self._follow(changes, now_s)
        return changes

    def _find(self, running: list[Running], now_s: float) -> list[Finding]:
        self._detector.run([r.run for r in running], now_s)
        while self._inbox:
            self._take(self._inbox.popleft())
        with self._lock:
            self._manual = {k: v for k, v in self._manual.items() if now_s <= v[1]}
            manual = [f for f, _ in self._manual.values()]
            self._sampling = {k: v for k, v in self._sampling.items() if now_s <= v[1]}
        metrics = {r.run.task_id: r.metrics for r in running}
        return [
            *self._rules.allowed(self._detector.findings(now_s), now_s),
            *self._rules.find(self._detector.devices(), metrics, now_s),
            *manual,
        ]

    def _take(self, news: Heartbeat | Report) -> None:
        if isinstance(news, Report):
            self._detector.reported(news.task_id, news.attempt, news.values, news.t_s, news.rank)
        elif news.leaving:
            self._detector.left(news.replica, news.index)
        else:
            self._detector.heard(news.replica, news.index, news.running, news.windows, news.memory)

    # ------------------------------------------------------------ what is done

    def _follow(self, changes: list[Change], now_s: float) -> None:
        for moved, alert in changes:
            if moved == "resolved":
                done = self._end(alert)
            else:
                done = self._act(alert, now_s)
                with self._lock:
                    alert = self._book.note(alert, done)
            log.log(logging.WARNING if moved != "resolved" else logging.INFO, "%s %s: %s", alert.alert_id, moved, alert)
            self._keep(now_s, moved, alert)
            for words in done:
                self._keep(now_s, words, alert)
            if moved == "raised":
                self._raised[alert.kind] += 1
            if moved == "raised" and self._notices is not None:
                if self._notice_limit.take("all", now_s):
                    self._notices.send(alert.number, str(alert), to_json(alert))
                else:
                    log.warning("%s is told nobody: there are too many", alert.alert_id)

    def _keep(self, now_s: float, moved: str, alert: Alert) -> None:
        try:
            self._store.append(now_s, moved, alert)
        except StateError as e:  # the alert stands all the same
            log.error("%s", e)

    def _act(self, alert: Alert, now_s: float) -> list[str]:
        """Does what the rules say, or what is usual; in words what was done, or why it was not."""
        names, wanted = actions_for(alert, self._specs)
        done: list[str] = []
        for name in names:
            try:
                done += self._do(name, alert, wanted, now_s)
            except ArealSkyError as e:
                done.append(f"{name}: {e}")
        return done

    def _do(self, name: str, alert: Alert, wanted: bool, now_s: float) -> list[str]:
        reason = f"alert {alert.alert_id}: {alert.what}"
        nodes, tasks = self._nodes(alert), alert.where.affected
        match name:
            case "cordon":
                done = [self._service.cordon(*node, reason, wanted=wanted) for node in nodes]
            case "drain":
                for replica in {replica for replica, _ in nodes}:
                    self._service.drain_replica(replica, reason, now_s + DRAIN_S)
                done = [f"replica {r} is drained within {DRAIN_S:.0f} s" for r in sorted({r for r, _ in nodes})]
            case "requeue":
                done = [
                    self._service.requeue(t, reason) if self._requeue_limit.take(t, now_s)
                    else f"{t} is not queued again: that was done {REQUEUES[0]} times today, or just now"
                    for t in tasks
                ]  # fmt: skip
            case "shrink":
                node = nodes[0] if nodes else ("", 0)
                done = [self._service.give_up_ranks(t, node, alert.where.rank, reason) for t in tasks]
            case _:
                with self._lock:
                    self._sampling |= dict.fromkeys(nodes, (name.removeprefix("sample_"), now_s + SAMPLING_S))
                pace = "faster" if name == "sample_fast" else "slower"
                done = [f"{', '.join(f'{r}/{i}' for r, i in nodes)} sampled {pace}"] if nodes else []
        return done or [f"{name}: there is no {'task' if name in ('requeue', 'shrink') else 'node'} to do it to"]

    def _nodes(self, alert: Alert) -> tuple[NodeKey, ...]:
        """The node of the alert, or those of its task."""
        if alert.where.replica:
            return ((alert.where.replica, alert.where.index),)
        return tuple(node for t in alert.where.affected for node in self._service.nodes_of(t))

    def _end(self, alert: Alert) -> list[str]:
        """What is over: cordons of what heals are lifted, unless another alert holds the node."""
        cordoned = any("takes no new work" in words for words in alert.done)
        if not cordoned or alert.kind not in HEALING:
            return []
        with self._lock:
            active = self._book.active()
        others = {node for a in active for node in self._nodes(a)}
        done: list[str] = []
        for node in self._nodes(alert):
            if node not in others:
                try:
                    done.append(self._service.uncordon(*node, f"alert {alert.alert_id} is over"))
                except ArealSkyError as e:
                    done.append(str(e))
        return done
