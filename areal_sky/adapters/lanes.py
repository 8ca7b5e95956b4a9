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
    """`call(key, now_s)` for many keys, at a monotonic time. It must not raise, and may be given up after `patience_s`,
    once in its key's life. `round` is for one thread; when `relieve` has said so, for another.
    """

    def __init__(self, call: Callable[[K, float], T], patience_s: float):
        self._call = call
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._common: list[tuple[K, float]] = []  # the call in the common thread, if any, and since when (monotonic)
        self._apart: set[K] = set()
        self._held: dict[K, float] = {}  # calls that run in other threads, and since when
        self._late: dict[K, T] = {}  # what came of them

    def round(self, keys: Sequence[K]) -> dict[K, T]:
        """Call every key that no earlier call still holds; the results that have come, late ones included.

        Raises Relieved when a call was given up.
        """
        if self._apart:
            keys = self._begin_apart(keys)
        # Little runs between two calls: after each the caches are cold, and that is most of what the agent costs.
        self._common = common = list[tuple[K, float]]()  # this round's own: an earlier one may still hang
        call, monotonic, begins, ends = self._call, time.monotonic, common.append, common.pop
        done: dict[K, T] = {}
        for key in keys:
            now_s = monotonic()
            begins((key, now_s))
            result = call(key, now_s)
            try:
                ends()
            except IndexError:  # `relieve` was faster
                self._keep(key, result)
                raise Relieved from None
            done[key] = result
        while self._late:
            key, result = self._late.popitem()
            done[key] = result
        return done

    def relieve(self) -> bool:
        """Whether `round` hangs; then it is given up, and another thread should begin a new one. For any one thread."""
        common = self._common
        try:
            if time.monotonic() - common[0][1] < self._patience_s:
                return False
            with self._lock:
                key, since_s = common.pop()
                self._apart.add(key)
                self._held[key] = since_s
        except IndexError:  # no call, or it has just returned
            return False
        return True

    def held_s(self, key: K) -> float:
        """How long the call that was given up or made apart for that key has run; 0 when there is none."""
        since_s = self._held.get(key)
        return 0.0 if since_s is None else time.monotonic() - since_s

    def idle(self) -> bool:
        """Whether no call runs. One that hangs cannot be ended, and what it uses must stay."""
        return not self._common and not self._held

    def _begin_apart(self, keys: Sequence[K]) -> list[K]:
        """Those keys that are not called apart."""
        for key in keys:
            if key in self._apart and key not in self._held:
                self._held[key] = now_s = time.monotonic()
                threading.Thread(target=self._call_apart, args=(key, now_s), name="slow-call", daemon=True).start()
        return [key for key in keys if key not in self._apart]

    def _call_apart(self, key: K, now_s: float) -> None:
        self._keep(key, self._call(key, now_s))

    def _keep(self, key: K, result: T) -> None:
        with self._lock:
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
