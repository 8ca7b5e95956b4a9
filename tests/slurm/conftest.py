"""Fixtures of the tests on the Slurm testbed. All of them are slow, so they share one testbed per run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.testbed import testbed as beds
from tests.testbed.testbed import Testbed


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever lies in this folder is marked `slurm`, and may take ten minutes with the testbed's start."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("slurm")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def testbed() -> Iterator[Testbed]:
    """A Slurm cluster with SkyPilot's API server: a new one, or the one up already in the folder AREAL_SKY_TESTBED."""
    if reason := beds.why_not():
        pytest.skip(reason)
    with beds.running() as bed:
        bed.sky("check", "slurm")  # as every user of SkyPilot does once
        yield bed


@pytest.fixture
def clean_testbed(testbed: Testbed) -> Iterator[Testbed]:
    """The testbed, every node of it up and idle; what the test leaves behind is its failure, and is cleared."""
    yield testbed
    left = testbed.clear()
    assert not left, f"left behind: {left}"


@pytest.fixture
def sky_cli(testbed: Testbed) -> Callable[..., str]:
    """`sky_cli("status", "-r")`: runs `sky` as the testbed's client; its output. Fails when it fails."""
    return testbed.sky
