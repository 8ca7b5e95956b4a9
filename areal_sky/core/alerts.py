"""From findings to alerts: raised once, resolved when over for good; and what is done about each, within limits."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from areal_sky.core.alertrules import words
from areal_sky.core.devicewatch import BROKEN_XIDS
from areal_sky.core.findings import Finding, Kind, Where
from areal_sky.errors import StateError
from areal_sky.spec.cluster import AlertSpec

CLEAR_S = 20.0  # a finding must be absent for this long for its alert to be over
QUIET_S = 300.0  # what comes back within this long after its end is the same alert again: nobody is told anew
REMEMBERED = 2000  # alerts that are over
MAX_ACTIVE = 5000

# What is done where no rule says otherwise; everything is notified. A device that fails will fail the next task too.
DEFAULT_ACTIONS: Mapping[str, tuple[str, ...]] = {
    Kind.LOST_GPU: ("cordon",), Kind.ECC: ("cordon",), Kind.STALL: ("sample_fast",),
    Kind.STRAGGLER: ("sample_fast",), Kind.HEAT: ("sample_fast",),
}  # fmt: skip

# A cordon is lifted when these are over; the others need a person, or a new node.
HEALING = frozenset({Kind.LOST_GPU, Kind.HEAT, Kind.RULE})

Moved = Literal["raised", "again", "resolved"]


@dataclass(frozen=True, slots=True)
class Alert:
    """`since_s`: when what it tells of began; `raised_s`, `resolved_s`: when that was found, and found to be over.

    `times` counts how often it came back. `done`: what was done about it, in words.
    """

    number: int
    kind: str
    where: Where
    name: str
    what: str
    evidence: str
    since_s: float
    raised_s: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    resolved_s: float | None = None
    times: int = 1
    done: tuple[str, ...] = ()

    @property
    def alert_id(self) -> str:
        return f"a{self.number}"

    @property
    def key(self) -> tuple[str, Where, str]:
        return self.kind, self.where, self.name

    @property
    def active(self) -> bool:
        return self.resolved_s is None

    def __str__(self) -> str:
        acts = f"; {', '.join(self.done)}" if self.done else ""
        return f"{self.kind} at {self.where}: {self.what} ({self.evidence}){acts}"


class Change(NamedTuple):
    """An alert that was raised, has come back (`again`), or is over."""

    moved: Moved
    alert: Alert


class AlertBook:
    """The alerts that are active, and the latest that are over."""

    def __init__(self, known: Iterable[Alert] = (), now_s: float = 0.0):
        """`known`: those of an earlier process, the latest state of each; what is still wrong will be found again."""
        self._active: dict[tuple[str, Where, str], Alert] = {}
        self._seen_s: dict[tuple[str, Where, str], float] = {}
        self._over: OrderedDict[tuple[str, Where, str], Alert] = OrderedDict()
        self._number = 1
        for alert in known:
            self._number = max(self._number, alert.number + 1)
            if alert.active:
                self._active[alert.key] = alert
                self._seen_s[alert.key] = now_s
            else:
                self._over[alert.key] = alert

    def update(self, findings: Iterable[Finding], now_s: float) -> list[Change]:
        """What has changed with these findings, which are all that there are now."""
        changes: list[Change] = []
        for f in findings:
            key = f.key
            if key in self._active:
                self._seen_s[key] = now_s
                old = self._active[key]
                self._active[key] = replace(old, evidence=f.evidence, what=f.what, metrics=dict(f.metrics))
            elif len(self._active) < MAX_ACTIVE:
                changes.append(self._raise(f, now_s))
        for key in [k for k in self._active if now_s - self._seen_s[k] >= CLEAR_S]:
            changes.append(Change("resolved", self.resolve(key, now_s)))
        return changes

    def note(self, alert: Alert, done: Sequence[str]) -> Alert:
        """What was done about it."""
        alert = replace(self._active.get(alert.key, alert), done=tuple(dict.fromkeys((*alert.done, *done))))
        if alert.key in self._active:
            self._active[alert.key] = alert
        return alert

    def resolve(self, key: tuple[str, Where, str], now_s: float) -> Alert:
        """It is over."""
        alert = replace(self._active.pop(key), resolved_s=now_s)
        del self._seen_s[key]
        self._over[key] = alert
        self._over.move_to_end(key)
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)
        return alert

    def active(self) -> list[Alert]:
        """Latest first."""
        return sorted(self._active.values(), key=lambda a: -a.raised_s)

    def over(self, limit: int) -> list[Alert]:
        """The latest that are over, latest first."""
        return [a for a, _ in zip(reversed(self._over.values()), range(limit), strict=False)]

    def _raise(self, f: Finding, now_s: float) -> Change:
        before = self._over.get(f.key)
        self._seen_s[f.key] = now_s
        if before is not None and now_s - (before.resolved_s or 0.0) <= QUIET_S:
            del self._over[f.key]
            alert = replace(
                before, resolved_s=None, times=before.times + 1, what=f.what, evidence=f.evidence, since_s=f.since_s,
                metrics=dict(f.metrics),
            )  # fmt: skip
            self._active[f.key] = alert
            return Change("again", alert)
        alert = Alert(
            self._number, f.kind.value, f.where, f.name, f.what, f.evidence, f.since_s, now_s, dict(f.metrics)
        )
        self._number += 1
        self._active[f.key] = alert
        return Change("raised", alert)


def actions_for(alert: Alert, rules: Iterable[AlertSpec]) -> tuple[tuple[str, ...], bool]:
    """(what is done beside telling, whether the user's own rule says so)."""
    for rule in rules:
        if (rule.op is None and rule.when == alert.kind) or (alert.kind == Kind.RULE and words(rule) == alert.name):
            return tuple(a for a in rule.then if a not in ("notify", "ignore")), True
    if alert.kind == Kind.XID:
        return (("cordon",) if alert.metrics.get("gpu_xid") in BROKEN_XIDS else ()), False
    return DEFAULT_ACTIONS.get(alert.kind, ()), False


class Limit:
    """How often something may be done: at most `most` times in `span_s`, and not within `apart_s` of the last."""

    def __init__(self, most: int, span_s: float, apart_s: float = 0.0):
        self._most, self._span_s, self._apart_s = most, span_s, apart_s
        self._done: OrderedDict[object, deque[float]] = OrderedDict()

    def take(self, subject: object, now_s: float) -> bool:
        """Whether it may be done to the subject now; if so it counts as done."""
        times = self._done.setdefault(subject, deque(maxlen=self._most))
        self._done.move_to_end(subject)
        while len(self._done) > 10_000:
            self._done.popitem(last=False)
        full = len(times) == self._most and now_s - times[0] < self._span_s
        if full or (times and now_s - times[-1] < self._apart_s):
            return False
        times.append(now_s)
        return True


def to_json(alert: Alert) -> dict[str, Any]:
    """As JSON values, with its id and its place in words."""
    told = {"alert_id": alert.alert_id, "place": str(alert.where), "active": alert.active}
    return {**asdict(alert), **told, "done": list(alert.done)}


def from_json(raw: Mapping[str, Any]) -> Alert:
    """The inverse of to_json. Raises StateError."""
    rest = {k: v for k, v in raw.items() if k not in ("alert_id", "place", "active", "where", "done")}
    try:
        place: dict[str, Any] = raw["where"]
        where = replace(Where(**place), tasks=tuple(place["tasks"]))
        return Alert(where=where, done=tuple(raw["done"]), **rest)
    except (KeyError, TypeError) as e:
        raise StateError(f"an alert that cannot be read: {e}") from None
