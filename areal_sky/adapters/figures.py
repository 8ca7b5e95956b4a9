"""The only `import matplotlib`: plain numbers to pictures that read well on paper, too, and for the colour-blind."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_sky.errors import Refused

MOST_POINTS = 800  # of a curve: more than a picture has pixels
# Okabe and Ito's palette, the yellow left out, which is faint on white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F", "#8C564B", "#9467BD")
LAYERS = {
    "busy": "#0072B2", "starting": "#E69F00", "idle": "#BDBDBD", "draining": "#CC79A7",
    "on demand": "#0072B2", "spot": "#009E73",
}  # fmt: skip
DASHES = ("-", "--", "-.", ":")


@dataclass(frozen=True, slots=True)
class Picture:
    png: bytes
    svg: str


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers that add up, over `x`; each value holds until the next."""

    x: Sequence[float]
    layers: Mapping[str, Sequence[float]]


def stacks(rows: Mapping[str, Sequence[Stack]], titles: Sequence[str], x_label: str, y_label: str) -> Picture:
    """A row of panels per name, a column per title, all on the same axes. Raises Refused without matplotlib."""
    figure, axes = _figure(len(rows), len(titles), 10, 0.9 + 1.5 * len(rows))
    every = (stack for row in rows.values() for stack in row)
    top = max((sum(values) for stack in every for values in zip(*stack.layers.values(), strict=True)), default=1.0)
    for (name, row), line in zip(rows.items(), axes, strict=True):
        for stack, ax in zip(row, line, strict=True):
            keep = _kept(len(stack.x))
            x = [stack.x[i] for i in keep]
            ax.stackplot(
                x, *([v[i] for i in keep] for v in stack.layers.values()), labels=list(stack.layers), step="post",
                colors=[LAYERS.get(k, COLOURS[n]) for n, k in enumerate(stack.layers)], linewidth=0,
            )  # fmt: skip
            ax.set_ylim(0, top * 1.05 or 1)
            ax.margins(x=0)
        line[0].set_ylabel(y_label)
        line[-1].annotate(
            name, (1.02, 0.5), xycoords="axes fraction", rotation=-90, va="center", fontsize=9, weight="bold"
        )
    for column, title in enumerate(titles):
        axes[0][column].set_title(title, fontsize=10, loc="left")
        axes[-1][column].set_xlabel(x_label)
        handles, labels = axes[0][column].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="upper right", ncol=len(labels), fontsize=8, frameon=False, columnspacing=1.0,
            handlelength=1.2, handletextpad=0.4, bbox_to_anchor=(0.5 * (column + 1) - 0.02, 1.0),
        )  # fmt: skip
    return _picture(figure)


def curves(
    data: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x_label: str,
    y_label: str,
    end_label: str = "",
    bins: int = 0,
) -> Picture:
    """A curve per name. `end_label`: format of the last value, told beside the name. Raises Refused.

    `bins`: what jumps up and down is shown as its mean over that many parts of the whole.
    """
    figure, ((ax,),) = _figure(1, 1, 8.5, 4)
    end = max((x[-1] for x, _ in data.values() if x), default=0.0)
    for n, (name, (x, y)) in enumerate(data.items()):
        if bins and end > 0:
            x, y = _means(x, y, end / bins)
        keep = _kept(len(x))
        told = f"{name}  {end_label.format(y[-1])}" if end_label and y else name
        style = {"color": COLOURS[n % len(COLOURS)], "linestyle": DASHES[n // 3 % len(DASHES)]}
        ax.plot([x[i] for i in keep], [y[i] for i in keep], drawstyle="steps-post", label=told, linewidth=1.5, **style)
    ax.set_xlabel(x_label)
    ax.set_ylabel(y_label)
    ax.set_ylim(bottom=0)
    ax.margins(x=0)
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    return _picture(figure)


def trade_off(
    points: Mapping[str, tuple[float, float]], order: Sequence[str], x_label: str, y_label: str
) -> Picture:
    """A point per name where less is better both ways; those that no other beats are joined. Raises Refused.

    `order`: all names, so that each has the colour that it has among them in `curves`.
    """
    figure, ((ax,),) = _figure(1, 1, 7, 4.2)
    best = frontier(points)
    front = sorted(points[name] for name in best)
    ax.plot(*zip(*front, strict=True), color="#BDBDBD", linewidth=1.2, zorder=1, drawstyle="steps-post")
    for name, (x, y) in points.items():
        colour = COLOURS[order.index(name) % len(COLOURS)]
        filled = colour if name in best else "white"
        ax.scatter([x], [y], s=48, zorder=2, color=filled, edgecolors=colour, linewidths=1.5, label=name)
    ax.set_xlabel(x_label)
    ax.set_ylabel(y_label)
    ax.set_xlim(*_span([x for x, _ in points.values()]))
    ax.set_ylim(*_span([y for _, y in points.values()]))
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    return _picture(figure)


def frontier(points: Mapping[str, tuple[float, float]]) -> set[str]:
    """Those that no other point beats in one way without losing in the other."""
    return {
        name for name, (x, y) in points.items()
        if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points.values())
    }  # fmt: skip


# ---------------------------------------------------------------- how


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Around the values, and no less than a quarter of them: one percent shall not look like half."""
    least, most = min(values), max(values)
    wide = max(most - least, 0.25 * abs(most)) or 1.0
    return max(0.0, (least + most - 1.2 * wide) / 2), (least + most + 1.2 * wide) / 2


def _figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib import rcParams
        from matplotlib.figure import Figure
    except ImportError:
        raise Refused("pictures need matplotlib: pip install 'areal-sky[report]'") from None
    # The same data gives the same bytes; text stays text.
    rcParams.update({"svg.hashsalt": "areal_sky", "svg.fonttype": "none", "font.size": 9})
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#E5E5E5", linewidth=0.6)
        ax.set_axisbelow(True)
    return figure, axes


def _picture(figure: Any) -> Picture:
    png, svg = io.BytesIO(), io.StringIO()
    figure.savefig(png, format="png", dpi=130, metadata={"Software": None})
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return Picture(png.getvalue(), svg.getvalue())


def _means(x: Sequence[float], y: Sequence[float], width: float) -> tuple[list[float], list[float]]:
    """Of a value that holds until the next, its mean over each `width` of x."""
    at, means, i = 0.0, list[float](), 0
    while x and at < x[-1] - 1e-6 * width:
        until, area, left = min(at + width, x[-1]), 0.0, at
        while i < len(x) and left < until:
            right = min(until, x[i + 1]) if i + 1 < len(x) else until
            area += y[i] * (right - left)
            left = right
            if i + 1 < len(x) and x[i + 1] <= until:
                i += 1
            else:
                break
        means.append(area / (until - at))
        at = until if until == x[-1] else at + width
    return [n * width for n in range(len(means))], means


def _kept(n: int) -> Sequence[int]:
    step = max(1, -(-n // MOST_POINTS))
    return [*range(0, n, step), *([n - 1] if n and (n - 1) % step else [])]
