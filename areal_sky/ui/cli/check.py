"""`areal-sky check`: are these specs right? Nothing else is loaded or asked."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click

from areal_sky.errors import EXIT_WRONG_INPUT, SpecError
from areal_sky.spec import ClusterSpec
from areal_sky.specfile import read_spec


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per run.")
def check(files: tuple[str, ...], as_json: bool) -> None:
    """Check spec files and print every mistake at once.

    Each mistake stands on a line of its own as file:line:column: what. Nothing is launched, no cloud is asked.
    `-` reads standard input. Ends with 2 if there is a mistake in any file.
    """
    reports = [_report(file) for file in files]
    wrong = any(not r["ok"] for r in reports)
    if as_json:
        click.echo(json.dumps({"ok": not wrong, "files": reports}, indent=2))
    else:
        for report in reports:
            click.echo(_as_text(report), err=not report["ok"])
    if wrong:
        sys.exit(EXIT_WRONG_INPUT)


def _report(file: str) -> dict[str, Any]:
    try:
        spec = read_spec(file, now_s=time.time())
    except SpecError as e:
        mistakes = [{"line": m.line, "column": m.column, "what": m.what} for m in e.mistakes]
        return {"file": e.mistakes[0].file, "ok": False, "mistakes": mistakes}
    groups = [_group(spec, g.name) for g in spec.groups]
    return {"file": "<stdin>" if file == "-" else file, "ok": True, "name": spec.name, "infra": spec.infra,
            "groups": groups, "guesses": list(spec.guesses)}  # fmt: skip


def _group(spec: ClusterSpec, name: str) -> dict[str, Any]:
    group = spec.group(name)
    assert group is not None
    return {"name": name, "elastic": group.elastic, "min_replicas": group.min_replicas,
            "max_replicas": group.max_replicas, "nodes_per_replica": group.nodes_per_replica,
            "market": group.market}  # fmt: skip


def _as_text(report: dict[str, Any]) -> str:
    if not report["ok"]:
        return "\n".join(f"{report['file']}:{m['line']}:{m['column']}: {m['what']}" for m in report["mistakes"])
    groups = report["groups"]
    sizes = ", ".join(f"{g['name']} {_size(g)}" for g in groups)
    where = f", on {report['infra']}" if report["infra"] else ""
    return f"{report['file']}: ok ({report['name']}, {len(groups)} group{'s' * (len(groups) != 1)}: {sizes}{where})"


def _size(group: dict[str, Any]) -> str:
    """`2 nodes`, or `1..16 x 2 nodes` for an elastic group."""
    nodes = group["nodes_per_replica"]
    plural = f"{nodes} node{'s' * (nodes != 1)}"
    return f"{group['min_replicas']}..{group['max_replicas']} x {plural}" if group["elastic"] else plural
