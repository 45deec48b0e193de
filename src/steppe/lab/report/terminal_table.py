"""The table of a comparison in the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..statistics import Difference, summarise
from . import conclusion, formatting

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table
    from rich.text import Text

NOTE = (
    "Mean ± standard error over seeds. Differences are paired by seed, with simultaneous 95 % intervals for all rows. "
    "Gradients and time are relative to the base. Best base: the base trained for up to the method's cost, the "
    "base stopped early, or one of its variants, whichever is hardest to beat."
)
STYLES = {"better": "green", "worse": "red", "all diverged": "red", "some diverged": "yellow", "base": "dim"}


def table(records: Iterable[Any], metric: str = "test_accuracy", base: str | None = None) -> Table:
    """The comparison as a rich table, with one section per problem."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    rows = summarise(records, metric, base)

    class Folding(Table):
        """A table that wraps labels first; if that is not enough, all columns, so that no text is cut off."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            wide = options.update(max_width=10_000)
            labels = [Measurement.get(console, wide, cell) for cell in ("method", *self.columns[0].cells)]
            whole, word = max(label.maximum for label in labels), max(label.minimum for label in labels)
            if console.measure(self, options=wide).maximum - whole + word > options.max_width:
                for column in self.columns:
                    column.no_wrap = False
            return super().__rich_console__(console, options)

    made = Folding(
        box=SIMPLE_HEAD, caption=NOTE, caption_justify="left", title_justify="left", padding=0, show_edge=False
    )
    other = formatting.other(metric)
    made.add_column("method\nruns", overflow="fold")
    heads = "\n".join(formatting.name_of(m) + (", %" if formatting.is_share(m) else "") for m in (metric, other))
    made.add_column(heads, justify="right", overflow="fold", no_wrap=True)
    made.add_column("gradients\ntime", justify="right", overflow="fold", no_wrap=True)
    made.add_column("against base\nverdict", overflow="fold", no_wrap=True)
    made.add_column("against best base\nat no more cost", overflow="fold", no_wrap=True)
    problems = list(dict.fromkeys(row.problem for row in rows))
    if len(problems) == 1:
        made.title = escape(problems[0])
    for problem in problems:
        if len(problems) > 1:
            made.add_row(Text(problem, style="bold"))
        for row in (row for row in rows if row.problem == problem):
            made.add_row(
                Text(f"{row.label}\n{formatting.runs(row)}"),
                f"{formatting.mean(row.mean, metric)}\n{formatting.mean(row.group.mean(other), other)}",
                f"{formatting.times(row.cost)}\n{formatting.times(row.time)}",
                _comparison(row.difference, formatting.verdict(row), metric, STYLES.get(row.verdict, "")),
                _comparison(row.equal_cost, formatting.equal_cost_verdict(row), metric),
            )
        made.add_section()
    reasons = [f"{row.label}: {reason}" for row in rows for reason in row.reasons]
    if reasons:
        made.caption = escape("\n".join([NOTE, *reasons]))
    return made


def headline(records: Iterable[Any], metric: str = "test_accuracy", base: str | None = None) -> Text:
    """The conclusion in one sentence, and the warnings below it."""
    from rich.text import Text

    rows = summarise(records, metric, base)
    problems = [[r for r in rows if r.problem == name] for name in dict.fromkeys(row.problem for row in rows)]
    sentence = conclusion.conclusion(problems, metric) if problems else "There are no runs."
    text = Text(sentence[:1].upper() + sentence[1:], style="bold")
    for warning in dict.fromkeys(line for problem in problems for line in conclusion.warnings(problem, metric)):
        text.append(f"\n{warning}", style="not bold yellow")
    return text


def _comparison(one: Difference | None, verdict: str, metric: str, style: str = "") -> Text:
    """The difference, with the verdict below it."""
    from rich.text import Text

    text = verdict if one is None else f"{formatting.difference(one, metric)}\n{verdict}"
    text = text.replace("; about", ";\nabout").replace("; many", ";\nmany")  # for a narrow column
    return Text(text, style=style or STYLES.get(verdict, ""))
