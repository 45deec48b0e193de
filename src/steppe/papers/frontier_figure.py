"""The charts of `extra/frontier`: the test result against the cost, methods beside the base's curve over lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..lab.report.formatting import is_share
from .definitions.frontier import LENGTHS
from .frontier_table import Row, Table
from .plotting import axes_for

_CURVES = {
    "base": ("0.25", "o", [f"base-{n}" for n in LENGTHS]),
    "average": ("0.6", "o", [f"base-{n}-ema" for n in LENGTHS]),
    "nesterov": ("0.4", "s", [f"nesterov-{n}" for n in LENGTHS]),
    "sam": ("C3", "D", ["sam", "sam-2", "sam-4"]),
}
_MARKS, _COLOURS = "^v<>PX*dphH8", ("C0", "C1", "C2", "C4", "C5", "C6", "C8", "C9")  # without SAM's red and the greys


def charts(tables: Sequence[Table], most: int = 2) -> Any:
    """One panel for each regime."""
    figure, axes = axes_for(len(tables), 5.6, 3.4, most=most)
    for axis, table in zip(axes, tables, strict=True):
        chart(axis, table)
        axis.set_title(table.regime.title, fontsize=9)
    return figure


def chart(axis: Any, table: Table) -> None:
    """Draw the base, its rivals and SAM as curves over their lengths, and every other method as a marker."""
    drawn = {name: [row for cell in cells if (row := table.row(cell))] for name, (_, _, cells) in _CURVES.items()}
    for name, rows in drawn.items():
        color, marker, _ = _CURVES[name]
        if rows:
            _points(axis, table, rows, rows[0].label, color=color, marker=marker, ls="--" if name != "base" else "-")
    factor = 100 if is_share(table.regime.metric) else 1
    best = table.best_bases
    axis.plot(
        [one.length for one in best], [factor * one.mean.value for one in best], color="0.25", lw=6, alpha=0.2,
        solid_capstyle="round", zorder=0, label=f"best of {table.regime.base}, stopped early",
    )  # fmt: skip
    rest = [row for row in table.methods if row not in drawn["sam"]]
    places = _apart([row.cost or 1.0 for row in rest])
    for number, (row, place) in enumerate(zip(rest, places, strict=True)):
        style = {"color": _COLOURS[number % len(_COLOURS)], "marker": _MARKS[number % len(_MARKS)], "ls": ""}
        _points(axis, table, [row], row.label, place, **style)
    axis.set_xscale("log", base=2)
    axis.set_xticks(LENGTHS, [f"{length}×" for length in LENGTHS])
    axis.minorticks_off()
    label = "test accuracy, %" if is_share(table.regime.metric) else "test perplexity"
    axis.set(xlabel="cost in gradients", ylabel=label)
    axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _apart(costs: Sequence[float]) -> list[float]:
    """Factors that move markers of about the same cost side by side."""
    alike: dict[int, list[int]] = {}
    for number, cost in enumerate(costs):
        alike.setdefault(round(4 * math.log2(cost)), []).append(number)
    factors = [1.0] * len(costs)
    for some in alike.values():
        for place, number in enumerate(some):
            factors[number] = 2 ** (0.06 * (place - (len(some) - 1) / 2))
    return factors


def _points(axis: Any, table: Table, rows: Sequence[Row], label: str, place: float = 1.0, **style: Any) -> None:
    factor = 100 if is_share(table.regime.metric) else 1
    there = [(place * row.cost, m) for row in rows if row.cost and (m := row.group.mean(table.regime.metric))]
    if there:
        x, y = [cost for cost, _ in there], [factor * m.value for _, m in there]
        axis.errorbar(x, y, [factor * (m.error or 0) for _, m in there], label=label, ms=4, lw=1, capsize=2, **style)
