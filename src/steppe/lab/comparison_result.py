"""The result of a comparison, for Python and notebooks."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..support.errors import UserError
from .records import Record, metric_of, to_frame
from .statistics import Mean, Row, against_best, larger_is_better, summarise

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(frozen=True, repr=False)
class Choice:
    """The best of several: its result with a 95 % interval, and the labels of those that it is tied with."""

    label: str
    method: str  # as `steppe train --method` takes it
    metric: str
    mean: Mean
    tied: tuple[str, ...]  # not shown to be worse, by the simultaneous intervals of all differences to the best
    recipe: dict[str, Any]

    def __str__(self) -> str:
        low, high = self.mean.low, self.mean.high
        metric = self.metric.replace("_", " ").strip("↑")
        if self.recipe.get("hold_out"):
            metric = metric.replace("test", "held-out", 1)
        bounds = f" [{low:.4g}, {high:.4g}]" if low is not None and high is not None else ""
        tied = f"; tied with {'; '.join(self.tied)}" if self.tied else ""
        return f"{self.label}: {metric} {self.mean.value:.4g}{bounds}{tied}"

    __repr__ = __str__  # a notebook shows the sentence


def choice_among(rows: Sequence[Row], metric: str) -> Choice:
    """The row with the best mean, and the rows of its problem that are not shown to be worse. Diverged rows are out."""
    complete = [row for row in rows if row.mean is not None and not row.diverged and row.n]
    if not complete:
        raise UserError("there is no best method: every run diverged or is unfinished")
    sign = 1 if larger_is_better(metric) else -1
    best = max(complete, key=lambda row: sign * (row.mean.value if row.mean else 0.0))
    others = [row for row in complete if row is not best and row.problem == best.problem]
    differences = against_best(best.group, [row.group for row in others], metric)
    pairs = zip(others, differences, strict=True)
    tied = [row.label for row, one in pairs if one is None or one.verdict != "worse"]
    assert best.mean is not None
    return Choice(best.label, best.group.recipe["method"], metric, best.mean, tuple(tied), best.group.recipe)


def rows_as_dicts(records: Sequence[Record], metric: str) -> list[dict[str, Any]]:
    """One dictionary per method: its mean with a 95 % interval, its cost, its differences and verdicts."""
    from .report.values import line_of

    return [line_of(row, metric) for row in summarise(records, metric)]


class Comparison:
    """What `steppe.compare` returns. In a notebook it is shown as the report.

    `records` has one record per run, as in the files of `folder`.
    """

    def __init__(self, records: Sequence[Record], folder: Path):
        self.records, self.folder = list(records), folder
        self.metric = metric_of(records)

    @property
    def frame(self) -> DataFrame:
        """A pandas table with one row per run: recipe, results, curvature."""
        return to_frame(self.records)

    @property
    def table(self) -> DataFrame:
        """A pandas table with one row per method: mean, 95 % interval, cost, difference to the base, verdict."""
        import pandas

        return pandas.DataFrame(rows_as_dicts(self.records, self.metric)).set_index("method")

    def best(self) -> Choice:
        """The method with the best mean, its interval, and the methods that it is tied with."""
        return choice_among(summarise(self.records, self.metric), self.metric)

    def plot(self, axis: str = "gradients") -> Figure:
        """The result of each method against its cost, in gradients or in seconds."""
        from .report.figures import cost_figure

        return cost_figure(self.records, self.metric, axis)

    def save(self, path: str | Path) -> Path:
        """Write the report to a file: one HTML page, which needs no network."""
        from .report import write_report

        return write_report(self.records, path, metric=self.metric)

    def _repr_html_(self) -> str:
        from .report.page import report

        page = html.escape(report(self.records, metric=self.metric), quote=True)
        style = "width:100%;height:80vh;min-height:480px;border:0"
        return f'<iframe title="The comparison" style="{style}" srcdoc="{page}"></iframe>'

    def __repr__(self) -> str:
        try:
            from rich.console import Console
        except ImportError:
            return f"Comparison({len(self.records)} runs in {self.folder})"
        from .report import headline, table

        text = io.StringIO()
        shown = headline(self.records, self.metric), table(self.records, self.metric)
        Console(file=text, width=120, force_jupyter=False, force_terminal=False).print(*shown, sep="\n")
        return text.getvalue()
