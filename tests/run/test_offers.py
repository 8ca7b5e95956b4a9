"""Where the offers of a plan come from, and what is said about what they leave open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from areal_sky.adapters.catalog import shipped_offers
from areal_sky.adapters.skypilot import offers as skypilot
from areal_sky.adapters.skypilot.offers import Answer, Ask, GroupAnswer
from areal_sky.core.model import NodeShape, Offer
from areal_sky.core.offers import Known
from areal_sky.errors import StateError, Unreachable
from areal_sky.run.offers import from_dict, known_for, offers_for, to_dict
from areal_sky.spec import load_text
from areal_sky.spec.cluster import ClusterSpec

H100 = Offer("aws", "r", "z", "p5", NodeShape(8, 192, 2048, "H100", 80), "spot", 10.0, "SkyPilot catalog aws")


def spec(infra: str = "aws") -> ClusterSpec:
    return load_text(f"infra: {infra}\nresources: {{accelerators: H100:8}}\nnum_nodes: 2\n", "s.yaml")


def group(offers: int = 1, **said: Any) -> GroupAnswer:
    plain: dict[str, Any] = {"hints": {}, "near": (), "not_enabled": (), "wrong": "", "asked": ("aws", "gcp")}
    return GroupAnswer(offers=offers, **(plain | said))


@pytest.fixture
def sky(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """SkyPilot as told: answers (or errors) are popped from the list; what was asked is appended to `asked`."""
    answers: list[Any] = []

    def ask(asks: Sequence[Ask], *, offline: bool = False, deadline_s: float = 0) -> Answer:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        assert [a.group for a in asks] == ["head", "main"] and [a.nodes for a in asks] == [1, 2]
        return found

    monkeypatch.setattr(skypilot, "installed", lambda: True)
    monkeypatch.setattr(skypilot, "ever_checked", lambda: True)
    monkeypatch.setattr(skypilot, "ask", ask)
    return answers


def answer(main: GroupAnswer, head: GroupAnswer | None = None, failed: dict[str, str] | None = None) -> Answer:
    return Answer(("aws", "gcp"), (H100,), {"head": head or group(), "main": main}, failed or {})


def test_skypilots_offers_where_it_is_set_up(sky: list[Any]) -> None:
    sky.append(answer(group()))
    assert known_for(spec()) == Known((H100,))


def test_a_local_cluster_asks_nobody(sky: list[Any]) -> None:
    assert known_for(spec("local")) == Known(shipped_offers())


def test_without_skypilot_the_table_and_what_it_cannot_know(sky: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "SkyPilot was not asked" in known_for(spec(), sky=False).unknowns[0]
    monkeypatch.setattr(skypilot, "ever_checked", lambda: False)
    known = known_for(spec())
    assert known.offers == shipped_offers() and known.no_cloud == "no cloud is enabled: `sky check` was never run here"
    assert known.no_cloud in known.unknowns[0] and "is not known" in known.unknowns[0]
    monkeypatch.setattr(skypilot, "installed", lambda: False)
    offers, unknowns = offers_for(spec())
    assert offers == shipped_offers() and "SkyPilot is not installed: pip install" in unknowns[0]


def test_no_cloud_enabled(sky: list[Any]) -> None:
    sky.append(Answer((), (), {}, {}))
    known = known_for(spec())
    assert known.offers == shipped_offers() and known.no_cloud == "no cloud is enabled: `sky check` says why"
    assert known.refusals == ()  # a plan may still be shown


def test_too_slow_online_is_asked_again_offline(sky: list[Any]) -> None:
    sky += [Unreachable("slow"), answer(group())]
    assert known_for(spec()).offers == (H100,)
    sky += [Unreachable("slow"), Unreachable("SkyPilot's catalogs gave no answer within 30 s")]
    known = known_for(spec())
    assert known.offers == shipped_offers() and "no answer within 30 s; prices are from" in known.unknowns[0]
    sky += [Unreachable("slow"), "not reached"]
    assert known_for(spec(), offline=True).offers == shipped_offers() and sky == ["not reached"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (group(0, near=("H100:4",)), "main: no machine with H100:8 on aws, gcp; there is H100:4"),
        (group(0, hints={"aws": "no ports"}, asked=("aws",)), "main: no machine with H100:8 on aws; aws: no ports"),
        (
            group(0, not_enabled=("azure",), asked=()),
            "main: azure is not enabled (`sky check azure` says why)",
        ),
        (group(0, wrong="Invalid disk tier"), "main: SkyPilot cannot use its resources: Invalid disk tier"),
    ],
)
def test_a_group_that_can_be_had_nowhere_is_refused_with_the_reason(
    sky: list[Any], said: GroupAnswer, words: str
) -> None:
    sky.append(answer(said))
    assert len(known_for(spec()).refusals) == 1
    sky.append(answer(said))
    assert words in known_for(spec()).refusals[0]


def test_a_cloud_that_could_not_be_asked_leaves_the_question_open(sky: list[Any]) -> None:
    sky.append(answer(group(0), failed={"gcp": "no catalog"}))
    known = known_for(spec())
    assert known.refusals == () and known.unknowns == ("gcp is enabled but could not be looked at: no catalog",)


def test_what_a_cluster_was_planned_with_is_kept_as_it_was() -> None:
    known = Known((H100, *shipped_offers()[:3]), ("u",), ("r",), "why")
    assert from_dict(to_dict(known)) == known
    with pytest.raises(StateError, match="saved offers"):
        from_dict({"offers": [{"cloud": "aws"}]})
