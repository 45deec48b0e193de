"""A forest plot: differences and their intervals as small pictures in a table, all rows on one scale."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..statistics import Difference
from .html import Markup, tag

WIDTH, HEIGHT = 120, 16


@dataclass(frozen=True)
class Scale:
    """The horizontal scale: zero is in the middle, ±`reach` at the edges."""

    reach: float

    def at(self, value: float) -> float:
        """The position of a value, limited to the picture."""
        inside = max(-self.reach, min(self.reach, value))
        return round(WIDTH / 2 * (1 + 0.94 * inside / self.reach), 2)


def scale_of(differences: Sequence[Difference | None]) -> Scale:
    """A scale that shows all differences except outliers, which would compress the others."""
    sizes = [abs(one.mean.value) for one in differences if one is not None]
    if not sizes:
        return Scale(1.0)
    limit = 4 * statistics.median(sizes)
    ends = [
        abs(end)
        for one in differences
        if one is not None and abs(one.mean.value) <= limit
        for end in (one.mean.low, one.mean.high, one.mean.value)
        if end is not None and abs(end) <= 2 * limit
    ]
    return Scale(max(ends, default=0.0) or max(sizes) or 1.0)


def forest(one: Difference, scale: Scale) -> Markup:
    """The picture: a line at zero, the interval, the mean; an arrow if the mean is outside the scale."""
    middle, value = HEIGHT / 2, one.mean.value
    marks = [tag("line", x1=scale.at(0), x2=scale.at(0), y1=0, y2=HEIGHT, class_="zero")]
    if one.mean.low is not None and one.mean.high is not None:
        marks.append(
            tag("line", x1=scale.at(one.mean.low), x2=scale.at(one.mean.high), y1=middle, y2=middle, class_="interval")
        )
    if abs(value) > scale.reach:
        tip, back = (WIDTH, WIDTH - 8) if value > 0 else (0, 8)
        marks.append(tag("path", d=f"M{tip},{middle} L{back},{middle - 5} L{back},{middle + 5}Z", class_="outside"))
    else:
        marks.append(tag("circle", cx=scale.at(value), cy=middle, r=3.5))
    return tag("svg", *marks, class_="forest", viewBox=f"0 0 {WIDTH} {HEIGHT}", aria_hidden="true", focusable="false")
