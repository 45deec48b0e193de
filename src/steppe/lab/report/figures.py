"""The figure for papers, by matplotlib: accuracy against cost."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ...support.drawing import new_figure
from ..statistics import Mean, Row, summarise
from . import formatting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASE = "#5a5f68"
COLOURS = ("#0067a5", "#c84e00", "#00805c", "#a8437f", "#946200", "#2f86c0", "#6650a8", "#7a4b2a")  # as on the page
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1.5, 2)))
MARKERS = "os^Dpv"
LINE = ("base", "equal-cost")  # roles that are connected by a line: the base trained longer
AXES = {"gradients": "gradient evaluations", "seconds": "seconds of training"}


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
