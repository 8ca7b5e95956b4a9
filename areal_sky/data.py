"""Where the shipped data is: `policies/`, `task_yamls/`, `examples/`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from areal_sky.errors import StateError

DataName = Literal["policies", "task_yamls", "examples"]
NAMES: tuple[DataName, ...] = ("policies", "task_yamls", "examples")


def data_dir(name: DataName) -> Path:
    """The folder of that name: in a wheel inside the package, in a checkout (editable install) at its root.

    Raises StateError when the installation lacks it.
    """
    package = Path(__file__).resolve().parent
    for place in (package / "_shipped" / name, package.parent / name):
        if place.is_dir():
            return place
    raise StateError(f"this installation lacks its `{name}` folder: install areal-sky again")
