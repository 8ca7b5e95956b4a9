"""YAML -> a frozen, typed spec; every mistake at once, with its place.

`load_text` is the door; `areal_sky.specfile.read_spec` reads it from a file. No I/O, no clock in here.
"""

from __future__ import annotations

from areal_sky.spec.cluster import ClusterSpec
from areal_sky.spec.load import load_text

__all__ = ["ClusterSpec", "load_text"]
