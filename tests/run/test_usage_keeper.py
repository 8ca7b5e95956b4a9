from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_sky.core.usage import Hold, Usage, usage_to_json
from areal_sky.errors import Unreachable
from areal_sky.home import ClusterHome
from areal_sky.run.usage import EVERY_S, UsageKeeper, read_usage, usage_file


def hold(task: str, until_s: float | None) -> Hold:
    return Hold(task, 1, "", "train", "c-w-0", 0, 1, 1, 8, 16, 1.0, until_s)


class Head:
    """Answers with what it is given, as a gateway's client does."""

    def __init__(self) -> None:
        self.answer: Usage | None = None
        self.asked: list[float] = []

    def usage(self, since_s: float = 0.0) -> Usage:
        self.asked.append(since_s)
        if self.answer is None:
            raise Unreachable("no head")
        return self.answer


@pytest.fixture
def cluster(private_home: Path) -> ClusterHome:
    home = ClusterHome("c")
    home.create("{}")
    return home


def test_what_the_head_tells_is_kept_over_controllers_and_the_clusters_end(cluster: ClusterHome) -> None:
    head = Head()
    keeper = UsageKeeper(cluster)
    keeper.beat(head, 100.0)  # type: ignore[arg-type]
    assert read_usage(cluster) == Usage()
    head.answer = Usage(110.0, (hold("t1", 50.0), hold("t2", None)))
    keeper.beat(head, 110.0)  # type: ignore[arg-type]
    assert read_usage(cluster) == head.answer
    assert usage_file(cluster).stat().st_mode & 0o077 == 0
    keeper.beat(head, 110.0 + EVERY_S / 2)  # type: ignore[arg-type]
    assert head.asked == [0.0, 0.0]
    head.answer = Usage(120.0, (hold("t2", 115.0), hold("t3", None)))
    UsageKeeper(cluster).beat(head, 120.0)  # type: ignore[arg-type]
    assert head.asked[-1] == 110.0
    assert read_usage(cluster) == Usage(120.0, (hold("t1", 50.0), hold("t2", 115.0), hold("t3", None)))


def test_a_damaged_file_is_said_and_asked_for_anew(cluster: ClusterHome, caplog: pytest.LogCaptureFixture) -> None:
    usage_file(cluster).write_text(json.dumps(usage_to_json(Usage(9.0, (hold("t1", 5.0),))))[:-9])
    head = Head()
    head.answer = Usage(10.0, (hold("t1", 5.0),))
    UsageKeeper(cluster).beat(head, 10.0)  # type: ignore[arg-type]
    assert "cannot read" in caplog.text
    assert head.asked == [0.0] and read_usage(cluster) == head.answer


def test_a_full_disk_loses_nothing(cluster: ClusterHome, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space")

    head = Head()
    head.answer = Usage(10.0, (hold("t1", 5.0),))
    keeper = UsageKeeper(cluster)
    with monkeypatch.context() as patch:
        patch.setattr("areal_sky.run.usage.write_private", full)
        keeper.beat(head, 10.0)  # type: ignore[arg-type]
    assert read_usage(cluster) == Usage()
    head.answer = Usage(20.0)
    keeper.beat(head, 20.0)  # type: ignore[arg-type]
    assert read_usage(cluster) == Usage(20.0, (hold("t1", 5.0),))
