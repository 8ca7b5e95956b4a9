"""Calls that hang hold up nobody but themselves."""

from __future__ import annotations

import threading
import time

import pytest

from areal_sky.adapters import lanes as lanes_module
from areal_sky.adapters.lanes import Lanes, Relieved, in_relays


class Calls:
    """Answers in capitals; calls of those in `hang` return when `release` is set."""

    def __init__(self):
        self.hang, self.release = set(), threading.Event()
        self.made: list[str] = []

    def __call__(self, key: str, now_s: float) -> str:
        self.made.append(key)
        if key in self.hang:
            self.release.wait(30)
        return key.upper()


@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    monkeypatch.setattr(lanes_module, "LOOK_S", 0.01)


def until(happened) -> None:
    end_s = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_one_that_hangs_is_called_apart_from_then_on():
    calls = Calls()
    calls.hang = {"b"}
    lanes = Lanes(calls, patience_s=0.05)
    relieved: list[str] = []

    def work(keys: str) -> dict[str, str]:
        try:
            return lanes.round(keys)
        except Relieved:
            relieved.append(keys)
            raise

    def read(keys: str) -> dict[str, str]:
        return in_relays(lambda: work(keys), lanes.relieve)

    assert read("ac") == {"a": "A", "c": "C"} and lanes.idle()
    assert read("abc") == {"a": "A", "c": "C"}  # in a second thread; what the first had by then is read anew
    assert lanes.held_s("b") >= 0.05 and lanes.held_s("a") == 0
    for _ in range(3):
        assert read("abc") == {"a": "A", "c": "C"}  # not called a second time while it hangs
    assert calls.made.count("b") == 1 and relieved == []
    assert not lanes.idle()  # what it uses must stay
    calls.release.set()
    until(lambda: relieved == ["abc"] and lanes.held_s("b") == 0)  # the first thread ends, and its result is kept
    assert read("ac") == {"a": "A", "b": "B", "c": "C"}
    found: dict[str, str] = {}
    until(lambda: found.update(read("abc")) or "b" in found)
    assert calls.made.count("b") >= 2
    calls.release.clear()
    count = calls.made.count("b")
    until(lambda: read("abc") and calls.made.count("b") > count)  # it hangs again, but apart
    assert relieved == ["abc"] and not lanes.relieve()


def test_several_that_hang_hold_up_the_others_once_each():
    calls = Calls()
    calls.hang = {"a", "b"}
    lanes = Lanes(calls, patience_s=0.02)
    threads: list[str] = []

    def work() -> dict[str, str]:
        threads.append(threading.current_thread().name)
        return lanes.round("abc")

    assert in_relays(work, lanes.relieve) == {"c": "C"} and len(threads) == 3
    assert in_relays(work, lanes.relieve) == {"c": "C"} and len(threads) == 4
    calls.release.set()


def test_one_that_comes_back_while_another_is_called_does_not_disturb_it():
    first, second, entered = threading.Event(), threading.Event(), threading.Event()
    ended: list[str] = []

    def call(key: str, now_s: float) -> str:
        if key == "a":
            first.wait(30)
        if key == "b":
            entered.set()
            second.wait(30)
        return key.upper()

    lanes = Lanes(call, patience_s=0.0)

    def work(name: str) -> None:
        try:
            ended.append(f"{name} {lanes.round('ab' if name == '1' else 'b')}")
        except Relieved:
            ended.append(f"{name} relieved")

    threads = [threading.Thread(target=work, args=(name,)) for name in "12"]
    threads[0].start()
    until(lanes.relieve)
    threads[1].start()
    assert entered.wait(10)
    first.set()
    threads[0].join(10)
    assert ended == ["1 relieved"]
    second.set()
    threads[1].join(10)
    assert ended[1] == "2 {'b': 'B', 'a': 'A'}" and lanes.idle()


def test_what_takes_its_time_within_patience_is_waited_for():
    lanes = Lanes(lambda key, now_s: time.sleep(0.1) or key, patience_s=30.0)
    assert in_relays(lambda: lanes.round("ab"), lanes.relieve) == {"a": "a", "b": "b"}
    assert not lanes.relieve()


def test_what_the_work_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        in_relays(lambda: 1 // 0, lambda: False)
