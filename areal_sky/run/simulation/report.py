"""Results side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from areal_sky.run.simulation.result import SimResult


def table(results: Sequence[SimResult]) -> str:
    """One line per result."""
    return "\n".join(f"{r.policy:<24} {len(r.tasks)} tasks" for r in results)


def write(results: Sequence[SimResult], out: Path) -> tuple[Path, ...]:
    """Writes to a folder; the paths."""
    return ()
