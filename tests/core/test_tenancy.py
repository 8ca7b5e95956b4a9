"""Drivers and strangers: nothing is promised twice, nothing counted twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sky.core.gangs import NoFit, Placement
from areal_sky.core.model import Bundle
from areal_sky.core.room import NodeRoom
from areal_sky.core.tenancy import NOTHING, Foreign, ForeignUse, driver_need, fit_driver, make_good, settle, total
from areal_sky.errors import InvalidInput


def g(gpus: float, cpus: float = 0.0) -> Bundle:
    return Bundle(gpus, cpus, 0.0)


def use(node: str, gpus: float, task: str | None = None) -> ForeignUse:
    return ForeignUse(node, g(gpus), task)


CLAIM = {"t1": {"a": g(8), "b": g(4)}}


@pytest.mark.parametrize(
    ("uses", "left", "taken"),
    [
        ([], {"a": 8, "b": 4}, {}),  # admitted, nothing made yet: all of it is kept for it
        ([use("a", 8, "t1")], {"b": 4}, {"a": 8}),  # its first group: of the claim as much less
        ([use("a", 8, "t1"), use("b", 4, "t1")], {}, {"a": 8, "b": 4}),
        ([use("c", 4, "t1")], {"a": 8}, {"c": 4}),  # Ray chose another node: the claim shrinks where least is left
        ([use("c", 6, "t1")], {"a": 6}, {"c": 6}),
        ([use("b", 2)], {"a": 8, "b": 4}, {"b": 2}),  # a stranger's: the claim stays
        ([use("b", 2, "t9")], {"a": 8, "b": 4}, {"b": 2}),  # of a task without a claim
        ([use("a", 8, "t1"), use("b", 8, "t1")], {}, {"a": 8, "b": 8}),  # more than it was admitted for
        ([use("a", 0.5, "t1")] * 4, {"a": 6, "b": 4}, {"a": 2}),
    ],
)
def test_a_claim_shrinks_by_what_the_driver_took(
    uses: list[ForeignUse], left: dict[str, float], taken: dict[str, float]
) -> None:
    found = settle(CLAIM, Foreign(tuple(uses)))
    assert {n: b.gpus for n, b in found.left.get("t1", {}).items()} == left
    assert {n: b.gpus for n, b in found.taken.items()} == taken


def test_use_that_no_table_lists_is_the_drivers_unless_a_stranger_runs() -> None:
    """A Ray task with GPUs, or a group made since the tables were read."""
    held = {"a": g(3), "c": g(1)}
    alone = settle(CLAIM, Foreign(), held)
    assert alone.left["t1"]["a"].gpus == 5 and alone.taken == held
    for others in (Foreign(strangers=True), Foreign(gangs=frozenset({"t1", "t2"}))):
        crowded = settle(CLAIM, others, held)
        assert crowded.left["t1"]["a"].gpus == 8 and crowded.gone("a").gpus == 11


def test_what_the_tables_list_is_not_added_to_what_ray_gave_away() -> None:
    found = settle(CLAIM, Foreign((use("a", 4, "t1"),)), {"a": g(4)})
    assert found.taken["a"].gpus == 4 and found.gone("a").gpus == 8


def test_what_a_stranger_took_of_a_claim_is_kept_elsewhere() -> None:
    settled = settle(CLAIM, Foreign((use("a", 3),), strangers=True))
    free = {"a": 8.0 - 3 - 8, "b": 8.0 - 4, "c": 2.0}
    found = make_good(settled, free)
    assert {n: b.gpus for n, b in found.left["t1"].items()} == {"a": 5, "b": 7}
    nowhere = make_good(settled, {"a": -3.0, "b": 1.0})
    assert {n: b.gpus for n, b in nowhere.left["t1"].items()} == {"a": 7, "b": 5}
    assert make_good(settled, {"a": 0.0, "b": 1.0}).left == settled.left


def test_resources_are_settled_apart() -> None:
    found = settle({"t1": {"a": g(2, 8)}}, Foreign((ForeignUse("a", g(2, 2), "t1"),)))
    assert found.left["t1"]["a"] == g(0, 6)


NODES = st.sampled_from("abc")
AMOUNTS = st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
CLAIMS = st.dictionaries(st.sampled_from(["t1", "t2"]), st.dictionaries(NODES, AMOUNTS.map(g), min_size=1), max_size=2)
USES = st.lists(st.builds(use, NODES, AMOUNTS, st.sampled_from([None, "t1", "t2", "t3"])), max_size=8)


@given(CLAIMS, USES, st.dictionaries(NODES, AMOUNTS.map(g)), st.booleans())
def test_nothing_is_lost_and_nothing_counted_twice(
    claims: dict[str, dict[str, Bundle]], uses: list[ForeignUse], held: dict[str, Bundle], strangers: bool
) -> None:
    found = settle(claims, Foreign(tuple(uses), strangers=strangers), held)
    for n in "abc":  # all that anybody holds is taken
        listed = sum(u.bundle.gpus for u in uses if u.node_id == n)
        assert found.taken.get(n, NOTHING).gpus == pytest.approx(max(listed, held.get(n, NOTHING).gpus))
    for t, claim in claims.items():
        promised = total(claim.values()).gpus
        own = sum(u.bundle.gpus for u in uses if u.owner == t)
        left = total(found.left.get(t, {}).values()).gpus
        assert 0 <= left <= promised
        if not held or strangers:  # exactly what it has not taken is still kept for it
            assert left == pytest.approx(max(0.0, promised - own))
        else:
            assert left <= max(0.0, promised - own) + 1e-9
        for n, b in found.left.get(t, {}).items():
            assert b.gpus <= claim[n].gpus


@pytest.mark.parametrize(
    ("backends", "gpus", "shapes"),
    [
        ("sglang:d4t2+megatron:d2p2t4", 24, [(2, 4), (1, 16)]),
        (["vllm:d8", "fsdp:d8"], 16, [(1, 8), (1, 8)]),
        ("sglang:d1t8p2+fsdp:d4", 20, [(8, 2), (1, 4)]),  # an instance over two nodes
        ("sglang:d2t4p3", 24, [(8, 2), (4, 2)]),
        ("vllm:d4t2|fsdp:d4", 8, [(2, 4)]),  # on the same GPUs
    ],
)
def test_a_driver_needs_the_sum_of_its_backends(
    backends: str | list[str], gpus: int, shapes: list[tuple[float, int]]
) -> None:
    need = driver_need(backends)
    assert need.gpus == gpus and [(b.gpus, n) for b, n in need.shapes] == shapes
    bundle, count = need.uniform
    assert gpus <= bundle.gpus * count < gpus + bundle.gpus


def room(name: str, group: str, gpus: int, free: int | None = None) -> NodeRoom:
    devices = tuple(float(i < (gpus if free is None else free)) for i in range(gpus))
    return NodeRoom(name, group, devices, 64, 256, "H100", True, name)


def test_a_driver_may_lie_on_several_groups_and_its_large_bundles_stay_whole() -> None:
    need = driver_need("sglang:d2t4+fsdp:d8")
    found = fit_driver(need, [room("a", "train", 8), room("b", "roll", 8, 7), room("c", "roll", 8, 2)])
    assert isinstance(found, Placement) and len(found.node_ids) == 16
    assert all(len(shares) == 1 and shares[0][1] == 1.0 for shares in found.devices)
    assert len(set(zip(found.node_ids, found.devices, strict=True))) == 16  # no device twice
    rooms = [room("a", "train", 8, 3), room("b", "roll", 8, 3), room("c", "roll", 8, 6), room("d", "x", 8, 3)]
    none = fit_driver(need, rooms)
    assert isinstance(none, NoFit) and "of its 16 GPUs" in str(none)
    assert isinstance(fit_driver(need, [room("a", "head", 16)]), NoFit)  # the head keeps the cluster
    assert isinstance(fit_driver(need, [room("a", "g", 16)], "other"), NoFit)
    assert isinstance(fit_driver(need, [room("a", "g", 16)], None, ("A100",)), NoFit)


def test_cpus_and_memory_come_with_the_gpus() -> None:
    need = driver_need("sglang:d2t4+fsdp:d2", cpus_per_gpu=4, memory_gib_per_gpu=32)
    assert need.shapes[0] == (Bundle(4, 16, 128), 2) and need.uniform == (Bundle(4, 16, 128), 3)


@pytest.mark.parametrize("backends", [[], "cpu", ["ssh:d8"], "fsdp"])
def test_a_driver_without_backends_is_refused(backends: str | list[str]) -> None:
    with pytest.raises(InvalidInput, match=r"expected|takes no GPUs"):
        driver_need(backends)
