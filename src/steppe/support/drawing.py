"""Figures of matplotlib that a notebook shows, also if it has not imported pyplot."""

from __future__ import annotations

import io
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    return _shown_figure()(figsize=(width, height), layout="constrained")


@cache
def _shown_figure() -> type[Figure]:
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        """A figure that shows itself: pyplot does it for its own figures only."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=110)
            return file.getvalue()

    made: Any = ShownFigure
    return made
