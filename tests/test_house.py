"""The house keeps itself: small files, nothing of one machine, nothing unfinished, one ADR per decision."""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
MAX_LINES = 350
# Put together here so that this file does not hold what it looks for.
MACHINE_PATH = r"(?<![\w.~$}])/(?:wo" + r"rk|ro" + r"ot|tmp/w)/"
UNFINISHED = r"\b(?:TO" + r"DO|FIX" + r"ME)\b"
UNWANTED = re.compile(f"{MACHINE_PATH}|{UNFINISHED}")


def tracked() -> list[Path]:
    """Files of the repository: those git tracks or would track; in an archive without git, all but hidden ones."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if listed.returncode == 0:
        found = [ROOT / name for name in listed.stdout.splitlines()]
    else:
        found = [p for p in ROOT.rglob("*") if not any(part.startswith(".") for part in p.relative_to(ROOT).parts)]
    return [p for p in found if p.is_file()]


def test_no_file_has_outgrown_one_idea() -> None:
    long = {
        str(p.relative_to(ROOT)): n
        for p in tracked()
        if p.suffix == ".py" and "tests" not in p.relative_to(ROOT).parts
        if (n := len(p.read_text().splitlines())) > MAX_LINES
    }
    assert not long, f"over {MAX_LINES} lines, find the seam: {long}"


def test_nothing_of_one_machine_and_nothing_unfinished() -> None:
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in tracked()
        if path.suffix not in (".csv", ".gz", ".png")
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if UNWANTED.search(line)
    ]
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize("adr", sorted((ROOT / "docs/adr").glob("*.md")), ids=lambda p: p.stem)
def test_an_adr_says_context_decision_and_consequence(adr: Path) -> None:
    text = adr.read_text()
    assert re.match(r"# ADR \d{4}: ", text) and adr.name[:4] == text[6:10]
    for heading in ("## Context", "## Decision", "## Consequences"):
        assert heading in text, f"{adr.name} lacks {heading!r}"


def test_adrs_are_numbered_without_gaps() -> None:
    numbers = [int(p.name[:4]) for p in sorted((ROOT / "docs/adr").glob("*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))


def test_every_bound_belongs_to_a_benchmark_and_holds_for_what_was_measured() -> None:
    from benchmarks.__main__ import BENCHMARKS

    bounds = yaml.safe_load((ROOT / "benchmarks/bounds.yaml").read_text())
    assert set(bounds) == set(BENCHMARKS)
    for name, figures in bounds.items():
        for figure, bound in figures.items():
            met = bound.get("min", -math.inf) <= bound["measured"] <= bound.get("max", math.inf)
            assert met != bool(bound.get("missed")), f"{name}.{figure}: `missed` must say why, and only then"


def test_links_in_the_documents_lead_somewhere() -> None:
    broken = [
        f"{doc.relative_to(ROOT)}: {target}"
        for doc in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", doc.read_text())
        if not (doc.parent / target).exists()
    ]
    assert not broken, broken
