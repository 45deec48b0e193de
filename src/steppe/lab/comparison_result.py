"""The result of a comparison, for Python and notebooks."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..support.errors import UserError
from .records import Record, metric_of, to_frame
from .statistics import Difference, Mean, Row, larger_is_better, paired, summarise

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(frozen=True)
class Choice:
    """The best of several: its result with a 95 % interval, and what cannot be told apart from it."""

    label: str
    method: str  # as `steppe train --method` takes it
    metric: str
    mean: Mean
    tied: tuple[str, ...]
    recipe: dict[str, Any] = field(repr=False)

    def __str__(self) -> str:
        low, high = self.mean.low, self.mean.high
        bounds = f" [{low:.4g}, {high:.4g}]" if low is not None and high is not None else ""
        tied = f"; tied with {', '.join(self.tied)}" if self.tied else ""
        return f"{self.label}: {self.metric.replace('_', ' ')} {self.mean.value:.4g}{bounds}{tied}"


def choice_among(rows: Sequence[Row], metric: str) -> Choice:
    """The row with the best mean, and those whose paired difference to it may be nothing."""
    able = [row for row in rows if row.mean is not None and not row.diverged and row.n]
    if not able:
        raise UserError("no run has ended well: there is no best")
    sign = 1 if larger_is_better(metric) else -1
    best = max(able, key=lambda row: sign * (row.mean.value if row.mean else 0.0))
    others = [row for row in able if row is not best and row.problem == best.problem]
    tied = [row.label for row in others if not _apart(paired(best.group, row.group, metric))]
    assert best.mean is not None
    return Choice(best.label, best.group.recipe["method"], metric, best.mean, tuple(tied), best.group.recipe)


def _apart(difference: Difference | None) -> bool:
    if difference is None or difference.mean.low is None or difference.mean.high is None:
        return False
    return difference.mean.low > 0 or difference.mean.high < 0


def rows_as_dicts(records: Sequence[Record], metric: str) -> list[dict[str, Any]]:
    """One dictionary a method: its mean with a 95 % interval, its cost, its differences and verdicts."""
    from .report.values import line_of

    return [line_of(row, metric) for row in summarise(records, metric)]


class Comparison:
    """What `steppe.compare` returns. In a notebook it is shown as the report.

    `records` has one record a run, as the files in `folder` have them.
    """

    def __init__(self, records: Sequence[Record], folder: Path):
        self.records, self.folder = list(records), folder
        self.metric = metric_of(records)

    @property
    def frame(self) -> DataFrame:
        """A pandas table with one row a run: recipe, results, curvature."""
        return to_frame(self.records)

    @property
    def table(self) -> DataFrame:
        """A pandas table with one row a method: mean, 95 % interval, cost, difference to the base, verdict."""
        import pandas

        return pandas.DataFrame(rows_as_dicts(self.records, self.metric)).set_index("method")

    def best(self) -> Choice:
        """The method with the best mean, with its interval and what it is tied with."""
        return choice_among(summarise(self.records, self.metric), self.metric)

    def plot(self, axis: str = "gradients") -> Figure:
        """The result of each method against its cost, in gradients or in seconds."""
        from .report.figures import cost_figure

        return cost_figure(self.records, self.metric, axis)

    def save(self, path: str | Path) -> Path:
        """Write the report, one page that needs no network."""
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
        Console(file=text, width=120).print(*shown, sep="\n")
        return text.getvalue()
