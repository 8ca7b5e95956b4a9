"""The testbed itself. What SkyPilot makes of it is shown by the tests beside this one."""

from __future__ import annotations

from collections.abc import Callable

from tests.testbed.testbed import Testbed


def test_every_node_is_up_with_its_gpus(testbed: Testbed) -> None:
    rows = testbed.on("login", "sinfo", "-h", "-N", "-p", "gpu", "-o", "%N %T %G").splitlines()
    assert [row.split()[0] for row in rows] == list(testbed.nodes)
    assert all(f"gpu:v100:{testbed.gpus_per_node}" in row and "down" not in row for row in rows), rows
    names = {testbed.on(node, "hostname").strip() for node in testbed.nodes}
    assert names == set(testbed.nodes)


def test_nodes_have_ray_and_neither_areal_sky_nor_skypilot(testbed: Testbed) -> None:
    import ray

    node = testbed.nodes[0]
    find = "from importlib.util import find_spec; print(*(bool(find_spec(m)) for m in ('ray', 'areal_sky', 'sky')))"
    assert testbed.on(node, "sh", "-c", f'cd / && python3 -c "{find}"').split() == ["True", "False", "False"]
    assert ray.__version__ in testbed.on(node, "ray", "--version")


def test_sky_check_enables_slurm(sky_cli: Callable[..., str]) -> None:
    assert "Slurm: enabled" in sky_cli("check", "slurm")


def test_a_crashed_node_comes_back(clean_testbed: Testbed) -> None:
    bed = clean_testbed
    node = bed.nodes[-1]
    bed.crash(node)
    bed.start(node)
    assert bed.on(node, "hostname").strip() == node
