"""Calls that hang hold up nobody but themselves."""

from __future__ import annotations

import threading

from areal_sky.adapters.lanes import Lanes


def test_one_that_hangs_is_called_apart_from_then_on():
    hang, release, calls = {"b"}, threading.Event(), []

    def call(key: str) -> str:
        calls.append((key, threading.current_thread().name))
        if key in hang:
            release.wait(30)
        return key.upper()

    lanes = Lanes(call, patience_s=0.05)
    assert lanes.round("ac") == {"a": "A", "c": "C"}
    assert lanes.round("abc") == {"a": "A", "c": "C"}
    assert lanes.held_s("b") > 0 and lanes.held_s("a") == 0
    assert lanes.round("abc") == {"a": "A", "c": "C"}  # not called a second time while it hangs
    assert [key for key, _ in calls].count("b") == 1
    assert not lanes.close()  # what it uses must stay
    lanes = Lanes(call, patience_s=0.05)
    lanes.round("b")
    release.set()
    hang.clear()
    found: dict[str, str] = {}
    for _ in range(1000):
        found |= lanes.round("ab")
        if "b" in found and lanes.held_s("b") == 0:
            break
    assert found == {"a": "A", "b": "B"}
