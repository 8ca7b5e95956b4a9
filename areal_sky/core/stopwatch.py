"""How long something has lasted, by a clock that never jumps: a wall clock that is set forward ends no task."""

from __future__ import annotations

from collections.abc import Iterable


class Stopwatch:
    """What began before it was first asked about counts by the wall clock up to then. Reads no clock itself."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}  # (steady clock, seconds before that)
        self._steady_s = 0.0

    def look(self, steady_s: float) -> None:
        """What the steady clock shows now; call it often."""
        self._steady_s = steady_s

    def elapsed_s(self, what: str, since_s: float | None, now_s: float) -> float:
        """Seconds since `since_s` (Unix time, None: it has not begun)."""
        if since_s is None:
            return 0.0
        seen_s, before_s = self._seen.setdefault(what, (self._steady_s, max(0.0, now_s - since_s)))
        return before_s + self._steady_s - seen_s

    def forget(self, whats: Iterable[str]) -> None:
        for what in whats:
            self._seen.pop(what, None)
