"""A shipped double of what lies between two processes: calls that get lost, lose their answers, arrive twice, or are
the last thing that their caller does.

A `Wire` stands before any port. Nothing happens by itself: faults are armed from outside, each for one call to come.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from areal_sky.adapters.fake_ray import Crash
from areal_sky.errors import ArealSkyError, Unreachable


class Fault(StrEnum):
    LOST = "lost"  # the call never arrives
    UNANSWERED = "unanswered"  # it is carried out, its answer is lost
    TWICE = "twice"  # it is carried out twice
    REPEATED = "repeated"  # the answer is the one that the same call had before
    CRASH_BEFORE = "crash before"
    CRASH_AFTER = "crash after"


@dataclass(slots=True)
class Faults:
    """What is armed: per wire the fault, and in how many calls it strikes. `struck` counts those that did."""

    armed: dict[str, tuple[Fault, int]] = field(default_factory=dict[str, tuple[Fault, int]])
    struck: int = 0

    def arm(self, wire: str, fault: Fault, in_calls: int = 1) -> None:
        self.armed[wire] = (fault, in_calls)

    def take(self, wire: str, possible: Collection[Fault]) -> Fault | None:
        """The fault of this call. One that cannot befall it waits for a call that it can."""
        fault, left = self.armed.get(wire, (None, 0))
        if fault is None or (left <= 1 and fault not in possible):
            return None
        if left > 1:
            self.armed[wire] = (fault, left - 1)
            return None
        del self.armed[wire]
        self.struck += 1
        return fault


class Wire:
    """`target` as it is seen over a wire: the methods in `calls` may meet with the faults named there."""

    def __init__(
        self, target: Any, name: str, faults: Faults, calls: dict[str, Collection[Fault]],
        error: type[ArealSkyError] = Unreachable,
    ):  # fmt: skip
        self._target, self._name, self._faults, self._calls, self._error = target, name, faults, calls, error
        self._answers: dict[str, Any] = {}

    def __getattr__(self, method: str) -> Any:
        real = getattr(self._target, method)
        if method not in self._calls:
            return real
        return lambda *args, **kwargs: self._call(method, lambda: real(*args, **kwargs))

    def _call(self, method: str, call: Callable[[], Any]) -> Any:
        fault = self._faults.take(self._name, self._calls[method])
        if fault is Fault.LOST:
            raise self._error(f"{self._name}: {method} got no answer")
        if fault is Fault.CRASH_BEFORE:
            raise Crash
        if fault is Fault.REPEATED and method in self._answers:
            return self._answers[method]
        answer = call()
        if fault is Fault.TWICE:
            answer = call()
        self._answers[method] = answer
        if fault is Fault.UNANSWERED:
            raise self._error(f"{self._name}: {method} got no answer")
        if fault is Fault.CRASH_AFTER:
            raise Crash
        return answer
