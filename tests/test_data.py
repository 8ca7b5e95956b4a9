"""Shipped data is found in a checkout and in a wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_sky import data
from areal_sky.errors import StateError

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["policies", "task_yamls", "examples"])
def test_in_a_checkout_it_is_at_the_root(name):
    assert data.data_dir(name) == ROOT / name


def test_in_a_wheel_it_is_inside_the_package_and_goes_first(tmp_path, monkeypatch):
    package = tmp_path / "areal_sky"
    (package / "_shipped" / "policies").mkdir(parents=True)
    (tmp_path / "policies").mkdir()  # a stranger's folder in site-packages
    monkeypatch.setattr(data, "__file__", str(package / "data.py"))
    assert data.data_dir("policies") == package / "_shipped" / "policies"
    with pytest.raises(StateError, match="lacks its `examples` folder"):
        data.data_dir("examples")
