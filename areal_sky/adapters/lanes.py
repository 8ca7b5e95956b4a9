"""Calls that may hang, made in turn off the caller's thread: one that hangs holds up only itself.

All keys share one thread while they answer in time, since a thread each would cost a switch per call. A key that was
too slow once has threads of its own from then on.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Worker:
    """The common thread. Its locks are used as signals: bare ones cost least, and this runs ten times a second."""

    go: threading.Lock = field(default_factory=threading.Lock)
    finished: threading.Lock = field(default_factory=threading.Lock)
    over: bool = False


class Lanes(Generic[K, T]):
    """`call(key)` for many keys. `patience_s` is how long one call may hold up the others, once in its life.

    `call` must not raise. Used by one thread; what both sides touch here are single operations on dict and deque.
    """

    def __init__(self, call: Callable[[K], T], patience_s: float):
        self._call = call
        self._patience_s = patience_s
        self._since: dict[K, float] = {}  # calls that run now, and since when (monotonic)
        self._done: dict[K, T] = {}
        self._alone: set[K] = set()
        self._waiting: deque[K] = deque()
        self._worker = self._new_worker()

    def round(self, keys: Sequence[K]) -> dict[K, T]:
        """Call every key that no earlier call still holds; the results that have come, late ones included."""
        for key in keys:
            if key in self._since:
                continue
            if key in self._alone:
                self._since[key] = time.monotonic()
                threading.Thread(target=self._one, args=(key,), name="slow-call", daemon=True).start()
            else:
                self._waiting.append(key)
        self._worker.go.release()
        while not self._worker.finished.acquire(timeout=self._patience_s):
            now_s = time.monotonic()
            stuck = [k for k, s in list(self._since.items()) if now_s - s >= self._patience_s and k not in self._alone]
            if stuck:
                self._alone.update(stuck)
                self._worker.over = True  # it ends when its call does
                self._worker = self._new_worker()
                self._worker.go.release()
        done: dict[K, T] = {}
        while self._done:
            key, result = self._done.popitem()
            done[key] = result
        return done

    def held_s(self, key: K) -> float:
        """How long the call that now runs for that key has run; 0 when none does."""
        since = self._since.get(key)
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> bool:
        """End the thread. False when a call still hangs: it cannot be ended, and what it uses must stay."""
        if not self._worker.over:
            self._worker.over = True
            self._worker.go.release()
        return not self._since

    def _new_worker(self) -> _Worker:
        worker = _Worker()
        worker.go.acquire()
        worker.finished.acquire()
        threading.Thread(target=self._run, args=(worker,), name="calls", daemon=True).start()
        return worker

    def _run(self, worker: _Worker) -> None:
        while True:
            worker.go.acquire()
            while not worker.over:
                try:
                    key = self._waiting.popleft()
                except IndexError:
                    break
                self._since[key] = time.monotonic()
                self._done[key] = self._call(key)
                del self._since[key]
            if worker.over:
                return
            worker.finished.release()

    def _one(self, key: K) -> None:
        self._done[key] = self._call(key)
        del self._since[key]
