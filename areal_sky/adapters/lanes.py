"""Calls that may hang, made in turn by the thread that wants the answers: to hand each to another thread and to wait
for it would be a tenth of what the agent costs. When one hangs, its thread is given up: another does its work from then
on (`in_relays`), and what hung has threads of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")

LOOK_S = 0.25  # how often it is asked whether something hangs


class Relieved(BaseException):
    """Another thread has taken over the work of this one. No `Exception`: nobody may go on who catches these."""


class Lanes(Generic[K, T]):
    """`call(key, now_s)` for many keys, `now_s` being monotonic. A call of more than `patience_s` may be given up, once in its key's life.

    `call` must not raise. `round` is for one thread; when `relieve` has said so, for another.
    """

    def __init__(self, call: Callable[[K, float], T], patience_s: float):
        self._call = call
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._current: tuple[K, float] | None = None  # the call in the common thread, and since when (monotonic)
        self._apart: set[K] = set()
        self._held: dict[K, float] = {}  # calls that run in other threads, and since when
        self._late: dict[K, T] = {}  # what came of them

    def round(self, keys: Sequence[K]) -> dict[K, T]:
        """Call every key that no earlier call still holds; the results that have come, late ones included.

        Raises Relieved when a call was given up.
        """
        for key in self._apart.intersection(keys).difference(self._held) if self._apart else ():
            self._held[key] = now_s = time.monotonic()
            threading.Thread(target=self._call_apart, args=(key, now_s), name="slow-call", daemon=True).start()
        done: dict[K, T] = {}
        for key in keys:
            if key in self._apart:
                continue
            now_s = time.monotonic()
            self._current = current = (key, now_s)
            result = self._call(key, now_s)
            with self._lock:
                relieved = self._current is not current
                if not relieved:
                    self._current = None
            if relieved:
                self._keep(key, result)
                raise Relieved
            done[key] = result
        while self._late:
            key, result = self._late.popitem()
            done[key] = result
        return done

    def relieve(self) -> bool:
        """Whether `round` hangs; then it is given up, and another thread should begin a new one. For any one thread."""
        current = self._current
        if current is None or time.monotonic() - current[1] < self._patience_s:
            return False
        with self._lock:
            if self._current is not current:  # it has just returned
                return False
            self._current = None
            key, since = current
            self._held[key] = since
            self._apart.add(key)
            return True

    def held_s(self, key: K) -> float:
        """How long the call that was given up or made apart for that key has run; 0 when there is none."""
        since = self._held.get(key)
        return 0.0 if since is None else time.monotonic() - since

    def idle(self) -> bool:
        """Whether no call runs. One that hangs cannot be ended, and what it uses must stay."""
        return self._current is None and not self._held

    def _call_apart(self, key: K, now_s: float) -> None:
        self._keep(key, self._call(key, now_s))

    def _keep(self, key: K, result: T) -> None:
        self._late[key] = result
        del self._held[key]


def in_relays(work: Callable[[], T], relieve: Callable[[], bool]) -> T:
    """What `work` returns or raises, done in a thread; begun anew in another one whenever `relieve()` says so.

    `relieve` must see to it that the thread before raises Relieved.
    """
    outcome: Future[T] = Future()
    ended = threading.Lock()  # a bare one costs least to wait for, and this is looked at all the time
    ended.acquire()

    def turn() -> None:
        try:
            outcome.set_result(work())
        except Relieved:
            return
        except BaseException as e:
            outcome.set_exception(e)
        ended.release()

    def begin() -> None:
        threading.Thread(target=turn, name="relay", daemon=True).start()

    begin()
    while not ended.acquire(timeout=LOOK_S):
        if relieve():
            begin()
    return outcome.result()
