"""Helpers of the figures: results at one scale, axes, means with error bars."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from ..lab.statistics import Group, Mean, mean_of
from .experiment import Experiment
from .store import Results


class FigureResults:
    """The results of one experiment at one scale: the one at which most of its cells were run."""

    def __init__(self, experiment: Experiment, results: Results):
        self.experiment, self.results = experiment, results
        self.scale = results.scale_of(experiment)

    def group(self, cell: str) -> Group:
        """The runs of a cell."""
        return self.results.of(self.experiment, cell, self.scale or "full")

    def groups(self) -> dict[str, Group]:
        """The runs of every cell that has any."""
        found = {cell.name: self.group(cell.name) for cell in self.experiment.cells}
        return {name: group for name, group in found.items() if group.records}

    def digest(self) -> str:
        """A digest of all results that the figure may use."""
        records = {r["key"]: r for group in self.groups().values() for r in group.records}
        text = json.dumps([records[key] for key in sorted(records)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def axes_for(count: int, width: float = 3.2, height: float = 2.6, most: int = 4) -> tuple[Any, list[Any]]:
    """A figure with `count` axes, at most `most` in a row."""
    import matplotlib.pyplot as plt

    columns = min(count, most)
    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    for axis in flat[count:]:
        axis.set_visible(False)
    return figure, flat[:count]


def band(axis: Any, x: Sequence[float], runs: Iterable[Sequence[float]], **style: Any) -> None:
    """Draw the mean over runs, with a band of one standard error."""
    means = [mean_of(column) for column in zip(*runs, strict=True)]
    middle = [mean.value for mean in means]
    (line,) = axis.plot(x, middle, **style)
    low, high = ([m.value + sign * (m.error or 0) for m in means] for sign in (-1, 1))
    axis.fill_between(x, low, high, color=line.get_color(), alpha=0.2, lw=0)


def points(axis: Any, x: Sequence[Any], means: Sequence[Mean | None], factor: float = 100, **style: Any) -> None:
    """Draw means with standard errors; missing values are left out."""
    there = [(a, m) for a, m in zip(x, means, strict=True) if m is not None]
    values = [factor * m.value for _, m in there]
    axis.errorbar([a for a, _ in there], values, [factor * (m.error or 0) for _, m in there], capsize=2, **style)


def ticks(axis: Any, values: Sequence[Any]) -> None:
    """A logarithmic axis with ticks at these values only."""
    axis.set_xscale("log")
    axis.set_xticks([float(value) for value in values], [str(value) for value in values])
    axis.minorticks_off()
