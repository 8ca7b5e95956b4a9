"""Results side by side: a table, pictures, and one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import html
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from areal_sky.adapters import figures
from areal_sky.errors import Refused
from areal_sky.run.simulation.result import STATES, Point, SimResult, TaskRow
from areal_sky.units import format_duration


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in figures. Times are seconds, from submit to end, of tasks that succeeded; None: there is none.

    `utilization`: busy GPU time over all GPU time paid for. `lost_gpu_h`: work done twice. `fairness`: Jain's index
    (Jain, Chiu and Hawe, DEC-TR-301, 1984) of the mean slowdowns of the tenants, of the models' where there is one
    tenant, of the tasks' where there is one model: 1 is alike for all.
    """

    policy: str
    done: int
    tasks: int
    mean_s: float | None
    p50_s: float | None
    p99_s: float | None
    makespan_s: float | None
    utilization: float | None
    cost_usd: float
    missed: int
    with_deadline: int
    reclaims: int
    lost_gpu_h: float
    fairness: float | None


def summary(result: SimResult) -> Summary:
    """The figures of a run."""
    rows = result.tasks
    done = [r for r in rows if r.outcome == "succeeded" and r.ended_s is not None]
    took = sorted(r.ended_s - r.submitted_s for r in done if r.ended_s is not None)
    dated = [r for r in rows if r.deadline_s is not None]
    missed = sum(1 for r in dated if r.ended_s is None or r.deadline_s is None or r.ended_s > r.deadline_s + 1e-6)
    ends = [r.ended_s for r in rows if r.ended_s is not None]
    return Summary(
        policy=result.policy, done=len(done), tasks=len(rows), mean_s=statistics.fmean(took) if took else None,
        p50_s=_percentile(took, 0.5), p99_s=_percentile(took, 0.99),
        makespan_s=max(ends) - min(r.submitted_s for r in rows) if ends else None,
        utilization=_utilization(result.points), cost_usd=result.points[-1].cost_usd if result.points else 0.0,
        missed=missed, with_deadline=len(dated), reclaims=result.reclaims,
        lost_gpu_h=sum(r.lost_work_s * r.gpus for r in rows) / 3600, fairness=_fairness(done),
    )  # fmt: skip


def table(results: Sequence[SimResult], width: int = 80) -> str:
    """One line per result, with the best of each column where less or more is better marked by `*`.

    Columns for which a line of `width` has no room go on in a block below, again with the names.
    """
    cells = _cells(results)
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    blocks: list[str] = []
    columns = list(range(1, len(widths)))
    while columns:
        fit = widths[0]
        here = [c for c in columns if (fit := fit + 2 + widths[c]) <= width] or columns[:1]
        columns = columns[len(here) :]
        lines = [f"{row[0]:<{widths[0]}}" + "".join(f"  {row[c]:>{widths[c]}}" for c in here) for row in cells]
        blocks.append("\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]]))
    return "\n\n".join(blocks)


def write(results: Sequence[SimResult], out: Path) -> tuple[Path, ...]:
    """`results.jsonl`, `report.html` and its pictures as PNG, into a folder that is made; returns the paths.

    Raises OSError, and Refused without matplotlib, when all but the pictures is written.
    """
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / "results.jsonl", out / "report.html"]
    paths[0].write_text("".join(r.to_json() + "\n" for r in results), encoding="utf-8")
    try:
        drawn = pictures(results)
    except Refused:
        paths[1].write_text(page(results, {}), encoding="utf-8")
        raise
    paths[1].write_text(page(results, drawn), encoding="utf-8")
    for name, picture in drawn.items():
        paths.append(out / f"{name}.png")
        paths[-1].write_bytes(picture.png)
    return tuple(paths)


def pictures(results: Sequence[SimResult]) -> dict[str, figures.Picture]:
    """By name. Raises Refused without matplotlib."""
    length_s = max((r.points[-1].t_s for r in results if r.points), default=0.0)
    unit, unit_s = ("days", 86400.0) if length_s > 3 * 86400 else ("hours", 3600.0)
    named = {_name(r, results): r for r in results}
    times = {name: [p.t_s / unit_s for p in r.points] for name, r in named.items()}
    drawn = {
        "gpus": figures.stacks(
            {n: (_by_state(times[n], r.points), _by_market(times[n], r.points)) for n, r in named.items()},
            ("GPUs by state", "GPUs by market"), unit, "GPUs",
        ),
        "cost": figures.curves(
            {n: (times[n], [p.cost_usd for p in r.points]) for n, r in named.items()},
            unit, "dollars so far", "${:,.0f}",
        ),
        "queue": figures.curves(
            {n: (times[n], [p.waiting_gpus for p in r.points]) for n, r in named.items()},
            unit, "GPUs waited for, mean", bins=BINS,
        ),
    }  # fmt: skip
    sums = {name: summary(r) for name, r in named.items()}
    points = {n: (s.cost_usd, s.mean_s / 3600) for n, s in sums.items() if s.mean_s is not None}
    if len(points) > 1:
        drawn["pareto"] = figures.trade_off(points, list(named), "dollars", "hours from submit to end, mean")
    return drawn


def page(results: Sequence[SimResult], drawn: Mapping[str, figures.Picture]) -> str:
    """One HTML page, pictures inside."""
    first = results[0]
    head, *rows = _cells(results)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    parts = [f"<h2>{CAPTIONS[name]}</h2><figure>{_inside(name, picture)}</figure>" for name, picture in drawn.items()]
    columns = "".join(f"<th title='{html.escape(TOLD.get(c, ''))}'>{html.escape(c)}</th>" for c in head)
    told = "".join(f"<dt>{html.escape(k)}<dd>{html.escape(v)}" for k, v in TOLD.items() if k in head)
    title = f"{first.name or 'simulation'}: {len(results)} {'policy' if len(results) == 1 else 'policies'}"
    days = f"{max(r.days for r in results):.1f} virtual days"
    return PAGE.format(
        title=html.escape(title), days=days, seed=first.seed, columns=columns, rows=body, pictures="\n".join(parts),
        told=told,
    )  # fmt: skip


def _cell(text: str) -> str:
    return f"<td{' class=best' if text.endswith('*') else ''}>{html.escape(text.rstrip('*'))}</td>"


def _inside(name: str, picture: figures.Picture) -> str:
    if len(picture.svg) <= MOST_SVG:
        return picture.svg[picture.svg.index("<svg") :]
    data = base64.b64encode(picture.png).decode("ascii")
    return f"<img alt='{CAPTIONS[name]}' src='data:image/png;base64,{data}'>"


# ---------------------------------------------------------------- the table

BINS = 120  # of the picture of the queue
MOST_SVG = 200_000  # characters: beyond that the PNG is smaller

TOLD = {
    "done": "tasks that succeeded, of all that were submitted",
    "mean": "from submit to end, mean over tasks that succeeded",
    "p50": "the same, median",
    "p99": "the same, 99th percentile",
    "makespan": "from the first submit to the last end",
    "util": "GPU time in which tasks ran, of all GPU time that machines were there or starting",
    "cost": "dollars, the whole run",
    "late": "tasks that missed their deadline, of those that had one",
    "reclaims": "machines that the cloud took back",
    "lost": "GPU hours of work that had to be done again, restarts included",
    "fair": "Jain's index of the mean slowdowns of tenants (else models, else tasks): 1 is alike for all",
    "tokens/s": "tokens trained on per second of the RL runs' time",
    "stale": "policy versions that a trajectory was behind when it was trained on, mean",
    "idle": "part of their time that rollout replicas waited",
}
CAPTIONS = {
    "gpus": "GPUs over time", "cost": "Cost over time", "queue": "The queue", "pareto": "Cost against time",
}  # fmt: skip


def _cells(results: Sequence[SimResult]) -> list[list[str]]:
    """Rows of text, the first the heads. Columns in which nothing is known are left out."""
    sums = [summary(r) for r in results]
    columns: list[tuple[str, list[float | None], Callable[[float], str], int]] = [
        ("mean", [s.mean_s for s in sums], _span, -1),
        *(c for c in (
            ("p50", [s.p50_s for s in sums], _span, -1), ("p99", [s.p99_s for s in sums], _span, -1),
            ("makespan", [s.makespan_s for s in sums], _span, -1),
        ) if max(s.tasks for s in sums) > 1),
        ("util", [s.utilization for s in sums], "{:.0%}".format, 1), ("cost", [s.cost_usd for s in sums], _dollars, -1),
        ("late", [float(s.missed) if s.with_deadline else None for s in sums],
         lambda n: f"{n:.0f}/{max(s.with_deadline for s in sums)}", -1),
        ("reclaims", [float(s.reclaims) for s in sums], "{:.0f}".format, 0),
        ("lost", [s.lost_gpu_h for s in sums], "{:,.1f}".format, -1),
        ("fair", [s.fairness for s in sums], "{:.2f}".format, 1),
        ("tokens/s", [r.metrics.get("tokens_per_s") for r in results], "{:,.0f}".format, 1),
        ("stale", [r.metrics.get("staleness") for r in results], "{:.2f}".format, 0),
        ("idle", [r.metrics.get("rollout_idle_frac") for r in results], "{:.0%}".format, -1),
    ]  # fmt: skip
    shown = [c for c in columns if any(v is not None for v in c[1])]
    rows = [["policy", "done", *(c[0] for c in shown)]]
    # Who has done less work is no model of speed or thrift.
    most = max(s.done for s in sums)
    for i, s in enumerate(sums):
        row = [_name(results[i], results), f"{s.done}/{s.tasks}"]
        for _, values, words, sign in shown:
            value = values[i]
            rivals = [v for v, x in zip(values, sums, strict=True) if v is not None and x.done == most]
            contest = bool(sign) and s.done == most and len(set(rivals)) > 1
            best = contest and value == (max(rivals) if sign > 0 else min(rivals))
            row.append("N/A" if value is None else words(value) + ("*" if best else ""))
        rows.append(row)
    return rows


def _name(r: SimResult, results: Sequence[SimResult]) -> str:
    """The policy, with its workload or seed where the policy does not tell results apart."""
    alike = [x for x in results if x.policy == r.policy]
    if len(alike) == 1:
        return r.policy
    if len({x.name for x in alike}) == len(alike):
        return f"{r.policy} ({r.name})"
    return f"{r.policy} #{alike.index(r) + 1}"


def _span(seconds: float) -> str:
    return format_duration(round(seconds), parts=2)


def _dollars(usd: float) -> str:
    return f"${usd:,.0f}" if usd >= 100 else f"${usd:,.2f}"


# ---------------------------------------------------------------- the figures


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    """Nearest rank."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def _utilization(points: Sequence[Point]) -> float | None:
    busy = there = 0.0
    for a, b in pairwise(points):
        busy += a.gpus["busy"] * (b.t_s - a.t_s)
        there += sum(a.gpus.values()) * (b.t_s - a.t_s)
    return busy / there if there else None


def _fairness(done: Sequence[TaskRow]) -> float | None:
    slow = [(r, (r.ended_s - r.submitted_s) / max(r.ideal_s, 1.0)) for r in done if r.ended_s is not None]
    for key in (lambda r: r.tenant, lambda r: r.model, lambda r: r.task_id):
        groups: dict[str, list[float]] = {}
        for r, x in slow:
            groups.setdefault(key(r), []).append(x)
        if len(groups) > 1:
            means = [statistics.fmean(g) for g in groups.values()]
            return sum(means) ** 2 / (len(means) * sum(m * m for m in means))
    return None


def _by_state(x: Sequence[float], points: Sequence[Point]) -> figures.Stack:
    return figures.Stack(x, {s: [p.gpus.get(s, 0.0) for p in points] for s in STATES})


def _by_market(x: Sequence[float], points: Sequence[Point]) -> figures.Stack:
    markets = {"on demand": "on_demand", "spot": "spot"}
    return figures.Stack(x, {name: [p.gpus_by_market.get(m, 0.0) for p in points] for name, m in markets.items()})


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 68rem; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto }}
th, td {{ padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }}
th:first-child, td:first-child {{ text-align: left }}
.best {{ font-weight: 700 }}
figure {{ margin: 0; overflow-x: auto }} svg, img {{ max-width: 100%; height: auto }}
dl {{ color: #555; font-size: 13px; columns: 2 }} dt {{ font-weight: 600 }} dd {{ margin: 0 0 .4rem }}
</style>
<h1>{title}</h1>
<p>{days}, seed {seed}. Bold: the best of those that did the most work.</p>
<table><thead><tr>{columns}</tr></thead><tbody>{rows}</tbody></table>
{pictures}
<h2>What the columns say</h2><dl>{told}</dl>
</html>
"""
