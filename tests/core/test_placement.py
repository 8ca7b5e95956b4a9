"""fit(): never over-commits, all or nothing, deterministic, and says why not."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sky.core.model import Bundle, NodeShape
from areal_sky.core.nodeenv import GroupShape
from areal_sky.core.permitted import could_ever_fit
from areal_sky.core.placement import (
    EPS,
    Ask,
    Held,
    NodeRoom,
    NoFit,
    Placement,
    empty_room,
    fit,
    occupy,
    room_of,
)
from areal_sky.errors import InvalidInput

GPU4 = NodeShape(gpus=4, cpus=16, memory_gib=64, accelerator="H100")
CPU8 = NodeShape(gpus=0, cpus=8, memory_gib=32)


def rooms(n: int, shape: NodeShape = GPU4, group: str = "w") -> list[NodeRoom]:
    return [empty_room(f"{group}{i}", group, shape) for i in range(n)]


def placed(ask: Ask, where: list[NodeRoom]) -> Placement:
    found = fit(ask, where)
    assert isinstance(found, Placement), found
    return found


def refused(ask: Ask, where: list[NodeRoom]) -> str:
    found = fit(ask, where)
    assert isinstance(found, NoFit), found
    return str(found)


def test_a_gang_shares_a_node_when_it_can() -> None:
    found = placed(Ask(Bundle(2), 2), rooms(3))
    assert found.node_ids == ("w0", "w0")
    assert found.devices == (((0, 1.0), (1, 1.0)), ((2, 1.0), (3, 1.0)))


def test_a_gang_takes_the_tightest_hole() -> None:
    free = rooms(2)
    tight = room_of("w9", "w", GPU4, (2, 8, 32), [])
    assert placed(Ask(Bundle(2), 1), [*free, tight]).node_ids == ("w9",)


def test_a_gang_that_needs_more_than_is_free_gets_nothing() -> None:
    assert "2 of 3 fit now" in refused(Ask(Bundle(4), 3), rooms(2))


def test_cpu_work_keeps_off_gpu_nodes_while_others_have_room() -> None:
    both = [*rooms(2), *rooms(1, CPU8, "cpu")]
    assert placed(Ask(Bundle(0, 4), 2), both).node_ids == ("cpu0", "cpu0")
    assert set(placed(Ask(Bundle(0, 4), 3), both).node_ids) == {"w0"}  # more than the CPU node has


def test_cpu_work_in_a_mixed_group_prefers_its_cpu_nodes() -> None:
    mixed = [*rooms(1, GPU4, "w"), empty_room("x-cpu", "w", CPU8)]
    assert placed(Ask(Bundle(0, 1), 1), mixed).node_ids == ("x-cpu",)


def test_two_half_free_devices_are_not_one_gpu() -> None:
    half = NodeRoom("n", "w", (0.5, 0.5), 8, 8, "H100", is_gpu_node=True)
    assert isinstance(fit(Ask(Bundle(1), 1), [half]), NoFit)
    assert placed(Ask(Bundle(0.5), 2), [half]).devices == (((0, 0.5),), ((1, 0.5),))


def test_fractions_fill_up_the_fullest_device_first() -> None:
    assert placed(Ask(Bundle(0.5, 1), 3), rooms(1)).devices == (((0, 0.5),), ((0, 0.5),), ((1, 0.5),))


def test_constraints_hold() -> None:
    a100 = NodeShape(4, 16, 64, "A100-80GB")
    both = [*rooms(1), *rooms(1, a100, "a")]
    assert placed(Ask(Bundle(1), 1, accelerators=("a100-80gb",)), both).node_ids == ("a0",)
    assert placed(Ask(Bundle(1), 1, group="w"), both).node_ids == ("w0",)
    assert refused(Ask(Bundle(1), 1, group="w", accelerators=("A100-80GB",)), both)
    assert "no node with L40S" in refused(Ask(Bundle(1), 1, accelerators=("L40S",)), both)


def test_a_gang_stays_in_one_group_and_on_one_accelerator_where_it_can() -> None:
    assert refused(Ask(Bundle(4), 2), [*rooms(1, GPU4, "a"), *rooms(1, GPU4, "b")])
    a100 = NodeShape(4, 16, 64, "A100")
    mixed = [empty_room("a0", "w", a100), empty_room("h0", "w", GPU4), empty_room("h1", "w", GPU4)]
    assert placed(Ask(Bundle(4), 2), mixed).node_ids == ("h0", "h1")
    assert len(placed(Ask(Bundle(4), 3), mixed).node_ids) == 3


def test_the_head_takes_only_what_asks_for_it() -> None:
    head = empty_room("h", "head", CPU8)
    assert refused(Ask(Bundle(0, 1), 1), [head])
    assert placed(Ask(Bundle(0, 1), 1, group="head"), [head]).node_ids == ("h",)


def test_foreign_work_is_placed_around() -> None:
    """Ray gives away 1 of 4 GPUs while we hold one: two are somebody else's."""
    room = room_of("n", "w", GPU4, (1.0, 16, 64), [Held(Bundle(1, 0), ((0, 1.0),))])
    assert room.free_gpus == 1.0
    assert isinstance(fit(Ask(Bundle(2), 1), [room]), NoFit)


def test_what_ray_does_not_count_yet_is_counted() -> None:
    room = room_of("n", "w", GPU4, (4.0, 16, 64), [Held(Bundle(3, 10, 60), ((0, 1), (1, 1), (2, 1)), reserved=False)])
    assert (room.free_gpus, room.cpus, room.memory_gib) == (1.0, 6.0, 4.0)


def test_ray_figures_that_lag_behind_a_reservation_free_nothing() -> None:
    room = room_of("n", "w", GPU4, (4.0, 16, 64), [Held(Bundle(4, 4), tuple((i, 1.0) for i in range(4)))])
    assert room.free_gpus == 0


GROUPS = (GroupShape("w", GPU4, 1, 1, 3), GroupShape("gang", GPU4, 2, 1, 1))


def test_what_could_fit_one_day_is_not_refused() -> None:
    assert could_ever_fit(Ask(Bundle(4), 3), GROUPS) is None
    assert could_ever_fit(Ask(Bundle(4), 2, group="gang"), GROUPS) is None
    assert could_ever_fit(Ask(Bundle(400), 3), ()) is None  # nothing is known of the cluster


def test_an_elastic_gang_is_judged_by_its_least_and_markets_are_not_judged() -> None:
    assert could_ever_fit(Ask(Bundle(4), 9), GROUPS) is not None
    assert could_ever_fit(Ask(Bundle(4), 9, market="spot"), GROUPS, least=3) is None


def test_the_first_accelerator_of_an_order_that_fits_is_taken() -> None:
    a100 = NodeShape(4, 16, 64, "A100")
    both = [*rooms(2), *rooms(1, a100, "a")]
    asked = Ask(Bundle(1), 1, accelerators=("A100", "H100"), ordered=True)
    assert placed(asked, both).node_ids == ("a0",)
    assert placed(Ask(Bundle(4), 2, accelerators=("A100", "H100"), ordered=True), both).node_ids == ("w0", "w1")


def test_spread_takes_as_many_nodes_as_it_can() -> None:
    assert placed(Ask(Bundle(1), 3, strategy="spread"), rooms(3)).node_ids == ("w0", "w1", "w2")
    assert placed(Ask(Bundle(1), 5, strategy="spread"), rooms(2)).node_ids == ("w0", "w0", "w0", "w1", "w1")


def test_nodes_and_markets_can_be_named() -> None:
    both = [*rooms(2), empty_room("s", "w", GPU4, "spot-1", "spot")]
    assert placed(Ask(Bundle(1), 1, market="spot"), both).node_ids == ("s",)
    assert placed(Ask(Bundle(1), 1, nodes=("w1",)), both).node_ids == ("w1",)
    assert placed(Ask(Bundle(1), 1, nodes=("spot-1",)), both).node_ids == ("s",)
    assert "no node named nope" in refused(Ask(Bundle(1), 1, nodes=("nope",)), both)


def test_a_share_breaks_no_whole_device_where_another_has_room() -> None:
    broken = NodeRoom("z", "w", (1.0, 1.0, 1.0, 0.5), 8, 8, "H100", is_gpu_node=True)
    whole = NodeRoom("a", "w", (1.0,), 8, 8, "H100", is_gpu_node=True)
    assert placed(Ask(Bundle(0.5), 1), [broken, whole]).node_ids == ("z",)


@pytest.mark.parametrize("room", [(float("nan"),), (float("inf"),)])
def test_a_room_that_is_no_amount_is_refused(room: tuple[float, ...]) -> None:
    with pytest.raises(InvalidInput, match="not a number"):
        fit(Ask(Bundle(1), 1), [NodeRoom("n", "w", room, 8, 8, "H100", is_gpu_node=True)])


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (Ask(Bundle(4), 4), "group w takes at most 3 of them (3 nodes of 4 GPUs, 16 CPUs, 64 GiB)"),
        (Ask(Bundle(8), 1), "one bundle is more than a whole node of group w"),
        (Ask(Bundle(1), 1, accelerators=("B200",)), "group w has H100, not B200"),
        (Ask(Bundle(1), 1, group="nope"), "no group 'nope' (known: gang, w)"),
        (Ask(Bundle(0, 1, 65), 1), "group gang (4 GPUs, 16 CPUs, 64 GiB)"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_nearest_fit(ask: Ask, words: str) -> None:
    reason = could_ever_fit(ask, GROUPS)
    assert reason is not None
    assert words in reason


asks = st.builds(
    Ask,
    st.builds(
        Bundle,
        st.sampled_from([0.0, 0.25, 0.5, 0.7, 1.0, 2.0, 4.0]),
        st.sampled_from([0.5, 1.0, 4.0]),
        st.sampled_from([0.0, 8.0]),
    ),
    st.integers(1, 6),
)
shapes = st.lists(
    st.builds(
        NodeShape, st.sampled_from([0.0, 1.0, 4.0, 8.0]), st.sampled_from([1.0, 8.0]), st.sampled_from([8.0, 64.0])
    ),
    min_size=1,
    max_size=5,
)


@given(shapes, st.lists(asks, max_size=12))
def test_no_series_of_placements_ever_over_commits(nodes: list[NodeShape], series: list[Ask]) -> None:
    free = {f"n{i}": empty_room(f"n{i}", f"g{i % 2}", s) for i, s in enumerate(nodes)}
    used: dict[str, list[Bundle]] = {i: [] for i in free}
    device_use: Counter[tuple[str, int]] = Counter()
    for ask in series:
        found = fit(ask, free.values())
        if isinstance(found, NoFit):
            assert found.reasons
            continue
        assert len(found.node_ids) == len(found.devices) == ask.count  # all or nothing
        assert len({free[n].group for n in found.node_ids}) == 1
        occupy(free, ask, found)
        for node_id, shares in zip(found.node_ids, found.devices, strict=True):
            used[node_id].append(ask.bundle)
            assert sum(s for _, s in shares) == pytest.approx(ask.bundle.gpus)
            for device, share in shares:
                device_use[node_id, device] += share  # type: ignore[assignment]
    for i, shape in enumerate(nodes):
        bundles = used[f"n{i}"]
        assert sum(b.gpus for b in bundles) <= shape.gpus + EPS
        assert sum(b.cpus for b in bundles) <= shape.cpus + EPS
        assert sum(b.memory_gib for b in bundles) <= shape.memory_gib + EPS
    for (node_id, device), use in device_use.items():
        assert use <= 1 + EPS
        assert device < nodes[int(node_id[1:])].gpus


@given(shapes, asks, st.randoms())
def test_the_answer_does_not_depend_on_the_order_of_nodes(nodes: list[NodeShape], ask: Ask, random: object) -> None:
    free = [empty_room(f"n{i}", f"g{i % 2}", s) for i, s in enumerate(nodes)]
    shuffled = list(free)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert fit(ask, free) == fit(ask, shuffled)


@given(shapes, asks)
def test_what_does_not_fit_the_whole_cluster_fits_no_part_of_it(nodes: list[NodeShape], ask: Ask) -> None:
    free = [empty_room(f"n{i}", "g", s) for i, s in enumerate(nodes)]
    if isinstance(fit(ask, free), NoFit):
        assert all(isinstance(fit(ask, free[:n]), NoFit) for n in range(len(free)))
