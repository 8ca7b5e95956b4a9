"""Alerts: raised once, over when over for good, acted on as the rules say, within limits."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sky.core.alertrules import RuleWatch
from areal_sky.core.alerts import CLEAR_S, QUIET_S, AlertBook, Limit, actions_for, from_json, to_json
from areal_sky.core.findings import Finding, Kind, Where
from areal_sky.core.telemetry import GpuWindow, Validity
from areal_sky.errors import StateError
from areal_sky.spec.load import load_text

T = 1000.0
GPU = Where("", None, "c-w-0", 1, 3, ("t5",))


def found(kind: Kind = Kind.HEAT, where: Where = GPU, name: str = "", **metrics: float) -> Finding:
    return Finding(kind, where, T - 5, "it is hot", "95 °C", name, metrics)


def rules(*lines: str):
    return load_text("alerts:\n" + "".join(f"  - {json.dumps(x)}\n" for x in lines) + "resources: {}\n", "x").alerts


def gpu(end_s: float, celsius: float | None = 60.0, validity: Validity = Validity.KNOWN, **more) -> GpuWindow:
    return GpuWindow(0, "H100", end_s - 1, end_s, 0.5, 0.5, 0.5, 40.0, 80.0, celsius, 300.0, 1.0, validity, **more)


def test_raised_once_and_over_only_after_a_while() -> None:
    book = AlertBook()
    ((moved, alert),) = book.update([found()], T)
    assert (moved, alert.alert_id, str(alert.where), alert.since_s, alert.raised_s) == (
        "raised", "a1", "c-w-0/1 GPU 3", T - 5, T
    )  # fmt: skip
    assert book.update([found()], T + 1) == []
    assert book.update([], T + CLEAR_S) == []
    assert book.update([found()], T + CLEAR_S) == []  # it flickers: the same alert goes on
    assert book.update([], T + 2 * CLEAR_S - 1) == []
    ((moved, alert),) = book.update([], T + 2 * CLEAR_S)
    assert (moved, alert.resolved_s) == ("resolved", T + 2 * CLEAR_S)
    assert book.active() == [] and book.over(5) == [alert]


def test_what_comes_back_soon_is_the_same_alert_and_later_a_new_one() -> None:
    book = AlertBook()
    book.update([found()], T)
    (over,) = book.update([], T + CLEAR_S)
    ((moved, alert),) = book.update([found()], T + CLEAR_S + QUIET_S)
    assert (moved, alert.number, alert.times) == ("again", over.alert.number, 2)
    book.update([], T + 2 * CLEAR_S + QUIET_S)
    ((moved, alert),) = book.update([found()], T + 3 * CLEAR_S + 3 * QUIET_S)
    assert (moved, alert.number, alert.times) == ("raised", 2, 1)


@given(st.lists(st.tuples(st.sets(st.integers(0, 3)), st.floats(0.5, 60.0)), max_size=60))
def test_whatever_flickers_every_alert_is_raised_before_it_is_over(looks: list[tuple[set[int], float]]) -> None:
    book, now_s, open_ = AlertBook(), T, set[int]()
    for devices, pause_s in looks:
        now_s += pause_s
        for moved, alert in book.update([found(where=Where("", None, "r", 0, d)) for d in devices], now_s):
            assert (alert.where.device in open_) == (moved == "resolved")
            (open_.discard if moved == "resolved" else open_.add)(alert.where.device or 0)
        assert {a.where.device for a in book.active()} == open_ >= devices


def test_a_new_process_goes_on_where_the_old_one_stopped() -> None:
    book = AlertBook()
    book.update([found(), found(Kind.ECC)], T)
    kept = [from_json(json.loads(json.dumps(to_json(a)))) for a in book.active()]
    assert sorted(kept, key=lambda a: a.number) == sorted(book.active(), key=lambda a: a.number)
    again = AlertBook(kept, T + 500)
    assert again.update([found()], T + 501) == []  # neither raised anew nor over yet
    ((moved, alert),) = again.update([found()], T + 500 + CLEAR_S)
    assert (moved, alert.kind) == ("resolved", "ecc")
    ((_, alert),) = again.update([found(), found(Kind.XID)], T + 522)
    assert alert.number == 3
    with pytest.raises(StateError, match="cannot be read"):
        from_json({"number": 1})


def test_what_is_done_about_an_alert() -> None:
    def acts(f: Finding, *lines: str) -> tuple[tuple[str, ...], bool]:
        return actions_for(AlertBook().update([f], T)[0].alert, rules(*lines))

    assert acts(found(Kind.LOST_GPU)) == (("cordon",), False)
    assert acts(found(Kind.XID, gpu_xid=79)) == (("cordon",), False)
    assert acts(found(Kind.XID, gpu_xid=31)) == ((), False)  # a program's doing
    assert acts(found(Kind.LOST_GPU), "lost_gpu then notify") == ((), True)
    assert acts(found(Kind.STALL), "stall then requeue, sample_fast") == (("requeue", "sample_fast"), True)
    rule = "gpu_temperature_celsius > 88 for 30s then cordon"
    assert acts(found(Kind.RULE, name="gpu_temperature_celsius > 88 for 30s"), rule) == (("cordon",), True)


@given(st.lists(st.floats(0.0, 50.0), max_size=60))
def test_a_limit_is_never_passed(gaps: list[float]) -> None:
    limit, now_s, taken = Limit(3, 100.0, 10.0), 0.0, list[float]()
    for gap_s in gaps:
        now_s += gap_s
        if limit.take("t1", now_s):
            taken.append(now_s)
    assert all(b - a >= 10.0 for a, b in itertools.pairwise(taken))
    assert all(d - a >= 100.0 for a, d in zip(taken, taken[3:], strict=False))
    assert limit.take("t2", now_s)


# ---------------------------------------------------------------- rules


def test_a_rule_must_hold_for_its_time_and_what_is_unknown_changes_nothing() -> None:
    watch = RuleWatch(rules("gpu_temperature_celsius > 88 for 30s then cordon"))

    def at(second: float, celsius: float | None) -> list[Finding]:
        return watch.find([(GPU, gpu(T + second, celsius))], {}, T + second)

    assert at(0, 90) == [] and at(29, 91) == []
    ((rule),) = at(30, 92)
    assert (rule.kind, rule.since_s, rule.evidence) == (Kind.RULE, T, "gpu_temperature_celsius is 92")
    assert rule.what == "gpu_temperature_celsius > 88 for 30s"
    assert len(at(35, None)) == 1  # a reading is missing
    assert at(36, 80) == [] and at(37, 95) == []  # and so it starts anew
    assert at(50, None) == [] and at(68, 95) == []  # unknown for too long


def test_a_window_that_is_old_says_nothing() -> None:
    watch = RuleWatch(rules("gpu_temperature_celsius > 88"))
    assert len(watch.find([(GPU, gpu(T, 95))], {}, T + 5)) == 1
    assert watch.find([(GPU, gpu(T, 95))], {}, T + 30) == []


@pytest.mark.parametrize(
    ("rule", "window", "holds"),
    [
        ("gpu_lost == 1", gpu(T, validity=Validity.LOST), True),
        ("gpu_lost == 1", gpu(T), False),
        ("gpu_memory_used_frac >= 0.5", gpu(T), True),
        ("gpu_throttled == 1", gpu(T, throttle=("sw_power_cap",)), False),
        ("gpu_throttled == 1", gpu(T, throttle=("hw_thermal",)), True),
        ("gpu_sm_clock_mhz < 1000", gpu(T, sm_clock_mhz=900.0), True),
        ("gpu_sm_clock_mhz < 1000", gpu(T), False),  # not known, not 0
        ("gpu_xid == 79", gpu(T, xid=79), True),
    ],
)
def test_what_a_rule_on_gpus_reads(rule: str, window: GpuWindow, holds: bool) -> None:
    assert bool(RuleWatch(rules(rule)).find([(GPU, window)], {}, T)) == holds


def test_rules_on_what_tasks_report_and_on_what_is_found_anyway() -> None:
    watch = RuleWatch(rules("queue_depth > 100 for 10s", "straggler then ignore", "heat for 20s then cordon"))
    tasks = {"t1": {"queue_depth": 200.0}, "t2": {"queue_depth": 5.0}, "t3": {"reward": 1.0}}
    assert watch.find([], tasks, T) == []
    ((depth),) = watch.find([], tasks, T + 10)
    assert depth.where == Where("t1")

    def kinds(fs: Iterable[Finding], now_s: float) -> list[str]:
        return [f.kind.value for f in watch.allowed(fs, now_s)]

    all_three = [found(), found(Kind.STRAGGLER), found(Kind.STALL)]
    assert kinds(all_three, T) == ["stall"]
    assert kinds(all_three, T + 20) == ["heat", "stall"]
    assert kinds([], T + 21) == [] and kinds(all_three, T + 22) == ["stall"]
