"""Any sequence of crashes, lost and doubled calls, partitions and reclaims: every invariant holds at every step."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_sky.run.journal import Journal
from areal_sky.run.simulation.histories import WORDS, Step, live, random_history, shrunk

steps = st.builds(Step, st.sampled_from(sorted(WORDS)), st.integers(0, 9_999))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # what fails on purpose is logged by both processes
    yield
    logging.disable(logging.NOTSET)


@settings(max_examples=12, deadline=None)
@given(st.lists(steps, max_size=25))
def test_every_invariant_holds_in_every_history(history: list[Step]) -> None:
    assert live(history).violation == ""


def test_a_history_is_the_same_again() -> None:
    history = random_history(6)
    assert history == random_history(6) != random_history(8)
    outcome = live(history)
    assert outcome == live(history) and outcome.faults > 0


def test_what_is_broken_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal that says "written" of what it has not written."""
    monkeypatch.setattr(Journal, "append", lambda self, events: None)
    words = ("wait", "wish", "submit", "cancel", "fault", "head_dies", "wait", "controller_dies")
    history = [Step(word, 101 + i) for i, word in enumerate(words)]
    assert "accepted and lost" in live(history).violation
    assert [s.word for s in shrunk(history)][1:] == ["submit", "head_dies"]  # before that the head has to come up
