"""One picture of many differences: a row for each regime, a point with its interval for each method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#00897b", "#f4713c", "#8d99a6")  # they read on white and on black


class Point(NamedTuple):
    """A difference and the ends of its interval."""

    middle: float
    low: float
    high: float


def draw(
    labels: Sequence[str],
    series: Mapping[str, Sequence[Point | None]],
    about: str,
    limits: tuple[float, float],
    tolerance: float = 0.0,
) -> Figure:
    """The picture, the first row at the top. A point beyond the limits is written at the edge, as a number.

    `tolerance` shades how far below zero still counts as level.
    """
    from matplotlib.figure import Figure

    row = 0.1 + 0.1 * len(series)
    figure = Figure(figsize=(8, 0.9 + row * len(labels)), layout="constrained")
    axis = figure.subplots()
    for place in range(0, len(labels), 2):
        axis.axhspan(place - 0.5, place + 0.5, color="#8d99a6", alpha=0.12, linewidth=0)
    if tolerance:
        axis.axvspan(-tolerance, limits[1], color=COLOURS[0], alpha=0.10, linewidth=0)
    axis.axvline(0, color="#000000", linewidth=0.8)
    for turn, (name, points) in enumerate(series.items()):
        shift = (turn - (len(series) - 1) / 2) * 0.8 / len(series)
        colour = COLOURS[turn]
        for place, point in enumerate(points):
            if point is not None:
                _mark(axis, point, place + shift, colour, limits)
        axis.plot([], [], "o-", color=colour, linewidth=2.5, markersize=5, label=name)
    axis.set_yticks(range(len(labels)), list(labels))
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.set_xlim(limits)
    figure.supxlabel(about, fontsize=9)
    axis.tick_params(labelsize=9, length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside upper right", fontsize=9, frameon=False, ncols=len(series))
    return figure


def _mark(axis: Any, point: Point, place: float, colour: str, limits: tuple[float, float]) -> None:
    """A point with its interval, or its number at the edge that it is beyond."""
    low, high = limits
    if low < point.middle < high:
        ends = [max(point.low, low), min(point.high, high)]
        axis.plot(ends, [place, place], "-", color=colour, linewidth=2.5, solid_capstyle="butt")
        axis.plot(point.middle, place, "o", color=colour, markersize=5)
        return
    left = point.middle <= low
    said = f"{point.middle:+.0f}".replace("-", "−")
    axis.text(
        low if left else high, place, f"◂ {said}" if left else f"{said} ▸", color=colour, fontsize=8, va="center",
        ha="left" if left else "right",
    )  # fmt: skip
