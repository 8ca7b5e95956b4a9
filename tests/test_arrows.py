"""Imports point only down: ui > api > run > adapters > core > spec > base; each foreign library has one door.

`base` is errors and units. The other top-level modules each belong to a layer: `alerts`, `cluster`, `task`, `telemetry`
are the public Python API (`api`: may use `run` and below, only `ui` may use them), `home` (state folders) and
`specfile` are of `run`, `data` (where shipped files lie) is of `adapters`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "areal_sky"
LAYERS = ("base", "spec", "core", "adapters", "run", "api", "ui")
TOP_LEVEL = {
    "errors": "base", "units": "base", "data": "adapters", "home": "run", "specfile": "run",
    "alerts": "api", "cluster": "api", "task": "api", "telemetry": "api", "__init__": "ui",
}  # fmt: skip
DOORS = {
    # the runner lives inside a Ray actor
    "ray": {"adapters/raycluster.py", "adapters/placementgroups.py", "adapters/raytenants.py", "run/runner.py"},
    "sky": {"adapters/skypilot/"},
    "pynvml": {"adapters/nvml.py"},
    "torch": {"adapters/torch_memory.py"},
    "boto3": {"adapters/aws.py"}, "matplotlib": {"adapters/figures.py"},
    "httpx": {"adapters/gateway_client.py"},
    "sqlite3": {"adapters/"},
    "psutil": {"adapters/"},
    "fastapi": {"ui/"}, "uvicorn": {"ui/"}, "rich": {"ui/"}, "click": {"ui/"},
}  # fmt: skip
# An allow-list: what is not here does I/O, reads a clock, starts threads or draws lots.
PURE = """__future__ abc array base64 bisect collections copy dataclasses datetime decimal difflib enum fractions
    functools hashlib heapq itertools json math operator pydantic pydantic_core re shlex statistics string
    struct textwrap types typing yaml areal_sky"""
IMPURE_BUILTINS = {"open", "input", "print", "__import__"}
CLOCK_READS = {"now", "utcnow", "today"}  # of datetime, whose types are welcome
MODULES = sorted(PACKAGE.rglob("*.py"), key=str)


def layer(parts: tuple[str, ...]) -> int:
    """The rank of `areal_sky.<parts>`; an unknown top-level module has none and fails here."""
    first = parts[0] if parts else "__init__"
    return LAYERS.index(first if first in LAYERS else TOP_LEVEL[first])


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write imports absolutely"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down_and_through_one_door(path: Path) -> None:
    file = str(path.relative_to(PACKAGE))
    mine = layer(path.relative_to(PACKAGE).with_suffix("").parts)
    tree = ast.parse(path.read_text())
    for line, name in imports(tree):
        top, _, rest = name.partition(".")
        if top == "areal_sky":
            assert layer(tuple(rest.split("."))) <= mine, f"{file}:{line}: {name} is above {LAYERS[mine]}"
        allowed = DOORS.get(top, {""})
        assert any(file.startswith(door) for door in allowed), f"{file}:{line}: {top} belongs in {allowed}"
        if LAYERS[mine] in ("core", "spec", "base"):
            assert top in PURE.split(), f"{file}:{line}: {top} is not pure, so not for {LAYERS[mine]}"
    if LAYERS[mine] in ("core", "spec", "base"):
        for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
            builtin, method = getattr(call.func, "id", ""), getattr(call.func, "attr", "")
            impure = builtin in IMPURE_BUILTINS or method in CLOCK_READS
            assert not impure, f"{file}:{call.lineno}: {builtin or method}() is not pure"


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("from areal_sky.ui.cli.main import cli; cli(['--help'], standalone_mode=False)",
         "ray sky torch pydantic httpx fastapi uvicorn rich yaml sqlite3"),
        ("import areal_sky.run.node, areal_sky.run.agent", "ray sky torch click rich fastapi"),
    ],
    ids=["help", "node"],
)  # fmt: skip
def test_heavy_imports_are_lazy(code: str, unwanted: str) -> None:
    probe = f"import sys; {code}; print(sorted(set({unwanted.split()!r}) & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr.strip() == "[]", done.stderr
