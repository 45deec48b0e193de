"""Figures for papers, by matplotlib: accuracy against cost, and curves over training."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...support.drawing import new_figure
from ...support.files import whole_file
from ..statistics import Mean, Row, summarise
from . import formatting
from .chart_data import PROGRESS, curve, is_longer, quantity_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASE = "#5a5f68"
COLOURS = ("#0067a5", "#c84e00", "#00805c", "#a8437f", "#946200", "#2f86c0", "#6650a8", "#7a4b2a")  # as on the page
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1.5, 2)))
MARKERS = "os^Dpv"
LINE = ("base", "equal-cost")  # roles that are connected by a line: the base trained longer
AXES = {"epoch": "epochs", "gradients": "gradient evaluations", "seconds": "seconds of training"}


def cost_figure(records: Iterable[Any], metric: str = "test_accuracy", axis: str = "gradients") -> Figure:
    """The result of each method against its cost; bars are 95 % intervals (standard errors below three runs).

    An outlier is drawn as an arrow at the edge, so that it does not compress the scale of the other results.
    """
    rows = [row for row in _one_problem(records, metric) if row.mean and _cost(row, axis)]
    unit = 100 if formatting.is_share(metric) else 1
    figure, axes = _blank(AXES[axis], formatting.name_of(metric) + (", %" if formatting.is_share(metric) else ""))
    reached = [(row, row.mean, look) for row, look in zip(rows, _looks(rows), strict=True) if row.mean]
    aside = outliers([mean.value for _, mean, _ in reached])
    longer = sorted((_cost(row, axis), unit * mean.value) for row, mean, _ in reached if row.role in LINE)
    if len(longer) > 1:
        axes.plot(*zip(*longer, strict=True), color=BASE, linestyle=(0, (5, 3)), linewidth=1.2, zorder=1)
    ends: list[float] = []
    places = _side_by_side([_cost(row, axis) for row, _, _ in reached])
    for (row, mean, look), place in zip(reached, places, strict=True):
        if mean.value not in aside:
            low, high = _bar(mean)
            ends += [unit * low, unit * high]
            across = [[unit * (mean.value - low)], [unit * (high - mean.value)]]
            face = "white" if row.role in ("equal-cost", "rival") else look["color"]
            style = {"color": look["color"], "marker": look["marker"], "linestyle": "none", "markerfacecolor": face}
            axes.errorbar([place], [unit * mean.value], yerr=across, elinewidth=1.3, label=row.label, **style)
    axes.set_xlim(left=0)
    if aside:
        air = 0.08 * (max(ends) - min(ends)) or 0.01
        axes.set_ylim(min(ends) - air, max(ends) + air)
    for row, mean, look in reached:
        if mean.value in aside:
            below = unit * mean.value < min(ends)
            label = f"{row.label} ({formatting.value(mean.value, metric)})"
            style = {"color": look["color"], "marker": "v" if below else "^", "linestyle": "none", "label": label}
            place = 0.02 if below else 0.98
            axes.plot([_cost(row, axis)], [place], transform=axes.get_xaxis_transform(), clip_on=False, **style)
    return _with_legend(figure, axes, len(rows))


def _side_by_side(costs: Sequence[float]) -> list[float]:
    """The costs, with equal ones moved slightly apart; the first of them stays in place."""
    width = max(costs, default=0.0) / 70
    places: list[float] = []
    for k, cost in enumerate(costs):
        before = sum(abs(cost - other) < width for other in costs[:k])
        places.append(cost + (before + 1) // 2 * width * (1 if before % 2 else -1))
    return places


def _bar(mean: Mean) -> tuple[float, float]:
    if mean.n > 2 and mean.low is not None and mean.high is not None:
        return mean.low, mean.high
    return mean.value - (mean.error or 0.0), mean.value + (mean.error or 0.0)


def curves_figure(records: Iterable[Any], quantity: str = "test_error", axis: str = "epoch") -> Figure:
    """A quantity over training: means over seeds with bands of 95 % intervals.

    With more than four curves the bands would overlap: then only the last interval is drawn, beside the end of a curve.
    """
    rows = _one_problem(records, "test_accuracy")
    if axis == "epoch":
        rows = [row for row in rows if not is_longer(row, rows)]  # over epochs, longer runs are not comparable
    figure, axes = _blank(AXES[axis], quantity_name(quantity) + (", %" if quantity == "test_error" else ""))
    column = PROGRESS.index(axis)
    drawn = [(row, look, curve(row.group, quantity)) for row, look in zip(rows, _looks(rows), strict=True)]
    drawn = [(row, look, [p for p in points if p[column] is not None]) for row, look, points in drawn]
    drawn = [one for one in drawn if one[2]]
    values = [point[3] for _, _, points in drawn for point in points]
    reach = max((points[-1][column] for _, _, points in drawn), default=1.0)
    for k, (row, look, points) in enumerate(drawn):
        if len(points) > 1:
            look = {**look, "marker": None}
        axes.plot([p[column] for p in points], [p[3] for p in points], **look, linewidth=1.6, label=row.label)
        banded = [p for p in points if p[4] is not None and p[5] is not None]
        if banded and len(drawn) <= 4:
            low, high = ([p[end] for p in banded] for end in (4, 5))
            axes.fill_between([p[column] for p in banded], low, high, color=look["color"], alpha=0.13, linewidth=0)
        elif banded:
            at = reach * (1.02 + 0.014 * k)
            axes.plot([at, at], banded[-1][4:], color=look["color"], linewidth=1.4, solid_capstyle="butt")
    if values and 0 < 3 * min(values) < max(values):
        _log_axis(axes, min(values) / 1.4, max(values) * 1.15)
    return _with_legend(figure, axes, len(drawn))


def _log_axis(axes: Any, low: float, high: float) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    subs = (1, 2, 3, 5, 7) if high < 20 * low else (1, 2, 5) if high < 300 * low else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(low, high)


def write_figures(records: Iterable[Any], folder: str | os.PathLike[str], metric: str = "test_accuracy") -> list[Path]:
    """Write both figures as PNG and SVG. The same records give the same files."""
    import matplotlib

    records = list(records)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    made = {"cost": cost_figure(records, metric), "curves": curves_figure(records)}
    written = []
    with matplotlib.rc_context({"svg.hashsalt": "steppe", "svg.fonttype": "none"}):
        for name, figure in made.items():
            for kind in ("png", "svg"):
                path = folder / f"{name}.{kind}"
                metadata = {"Date": None} if kind == "svg" else {"Software": None}
                with whole_file(path) as beside:
                    figure.savefig(beside, dpi=200, format=kind, metadata=metadata)
                written.append(path)
    return written


def _one_problem(records: Iterable[Any], metric: str) -> list[Row]:
    rows = summarise(records, metric)
    problems = list(dict.fromkeys(row.problem for row in rows))
    if len(problems) > 1:
        raise ValueError(f"a figure shows one problem, but there are {len(problems)}: {'; '.join(problems)}")
    return rows


def outliers(values: Sequence[float]) -> set[float]:
    """Values whose distance from the median exceeds six times the median distance."""
    if not values:
        return set()
    middle = statistics.median(values)
    spread = statistics.median(abs(value - middle) for value in values)
    return {value for value in values if abs(value - middle) > 6 * spread + 1e-12 * abs(middle)}


def _cost(row: Row, axis: str) -> float:
    value = row.gradients if axis == "gradients" else row.seconds.value if row.seconds else None
    return value or 0.0


def _looks(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Colour, line style and marker of each row, as on the page."""
    looks, k, longer, rivals = [], 0, 0, 0
    for row in rows:
        if row.role == "method":
            place = k % 8 + k // 8  # where colours repeat, line styles and markers differ
            looks.append({"color": COLOURS[k % 8], "linestyle": DASHES[place % 4], "marker": MARKERS[place % 6]})
            k += 1
        elif row.role == "rival":
            looks.append({"color": BASE, "linestyle": DASHES[(rivals + 1) % 4], "marker": MARKERS[1 + rivals % 5]})
            rivals += 1
        else:
            longer += row.role == "equal-cost"
            looks.append({"color": BASE, "linestyle": DASHES[longer % 4], "marker": "o"})
    return looks


def _blank(across: str, up: str) -> tuple[Figure, Any]:
    figure = new_figure(6.4, 3.8)
    axes = figure.add_subplot()
    axes.set(xlabel=across, ylabel=up)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _with_legend(figure: Figure, axes: Any, many: int) -> Figure:
    if many:
        columns = 1 + (many - 1) // 16
        figure.legend(
            *axes.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8, ncols=columns
        )
    return figure
