"""Two reports on one page: the paired difference of every method that both have on the same data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..statistics import FEWEST, Difference, Row, judged, larger_is_better, paired
from . import formatting
from .forest_plot import scale_of
from .html import Markup, join, tag
from .results_table import (
    capitalised,
    cell,
    css_class,
    difference_cell,
    p_value_line,
    row_name,
    scrolling,
    sortable_table,
    sorting_head,
)
from .settings import display_name, display_value

if TYPE_CHECKING:
    from rich.table import Table

SAME = ("data", "share", "label_noise", "hold_out", "method", "average")  # what two rows must share to be compared
Names = tuple[str, str]


@dataclass(frozen=True)
class Pair:
    """A method in both reports: the difference is the first minus the second."""

    one: Row
    other: Row
    difference: Difference

    @property
    def diverged(self) -> int:
        """The number of runs that diverged, in both."""
        return self.one.diverged + self.other.diverged

    @property
    def verdict(self) -> str:
        """The verdict in words; if some runs diverged, on the other runs."""
        rest = formatting.verdict_of(self.difference)
        return f"{self.diverged} diverged; the others: {rest}" if self.diverged else rest

    @property
    def judged(self) -> bool:
        """Whether there are enough seeds for a verdict, and no run diverged."""
        return self.difference.n >= FEWEST and not self.diverged


def pairs(ones: Sequence[Row], others: Sequence[Row], metric: str) -> list[Pair]:
    """The methods that both reports have, with the same data and a common seed; intervals are simultaneous."""
    left, found = list(others), []
    for one in ones:
        alike = [other for other in left if _comparable(one, other)]
        with_seeds = [(o, d) for o in alike if (d := paired(one.group, o.group, metric)) is not None]
        if with_seeds:
            other, difference = min(with_seeds, key=lambda pair: _dissimilarity(one, pair[0]))
            left.remove(other)
            found.append(Pair(one, other, difference))
    made = []
    for problem in dict.fromkeys(pair.one.problem for pair in found):
        here = [pair for pair in found if pair.one.problem == problem]
        verdicts = judged([pair.difference for pair in here], larger_is_better(metric))
        made += [replace(pair, difference=one) for pair, one in zip(here, verdicts, strict=True)]
    return made


def _comparable(one: Row, other: Row) -> bool:
    mine, theirs = one.group.recipe, other.group.recipe
    return one.role == other.role and all((mine.get(k) or None) == (theirs.get(k) or None) for k in SAME)


def _dissimilarity(one: Row, other: Row) -> tuple[bool, bool, int]:
    """How much two rows differ: in their labels, then in their problems, then in the number of recipe fields."""
    mine, theirs = one.group.recipe, other.group.recipe
    fields = sum(mine.get(k) != theirs.get(k) for k in {*mine, *theirs})
    labels = [row.group.records[0].get("label") for row in (one, other)]  # a row's own label may have been extended
    return labels[0] != labels[1], one.problem != other.problem, fields


def sentence(found: Sequence[Pair], names: Names, metric: str) -> str:
    """The conclusion from both reports in one sentence."""
    a, b = names
    if not found:
        return f"{a} and {b} have no method with the same data and seeds in common."
    sure = [pair for pair in found if pair.judged]
    if not sure:
        return f"Nothing can be said about {a} and {b}: fewer than {FEWEST} seeds in common, or runs diverged."
    many = len({pair.one.problem for pair in found}) > 1
    ways = {way: [p for p in sure if p.difference.verdict == way] for way in ("better", "worse")}
    parts = [
        f"{way} in {a} than in {b}: {', '.join(_gain(pair, metric, many) for pair in some)}"
        for way, some in ways.items()
        if some
    ]
    if not parts:
        largest = max(sure, key=lambda pair: abs(pair.difference.mean.value))
        return f"No method is told apart between {a} and {b}; the largest difference is {_gain(largest, metric, many)}."
    rest = len(found) - sum(map(len, ways.values()))
    return capitalised("; ".join([*parts, *([f"{rest} not told apart"] if rest else [])])) + "."


def _gain(pair: Pair, metric: str, many: bool) -> str:
    unit = " points" if formatting.is_share(metric) else ""
    where = f" on {pair.one.problem}" if many else ""
    mean = pair.difference.mean
    bounds = formatting.interval(mean, metric, signed=True)
    return f"{pair.one.label}{where}, {formatting.signed_value(mean.value, metric)}{unit} {bounds}".strip()


def named(rows: Sequence[Row], name: str) -> list[Row]:
    """The rows with the report's name before that of their problem."""
    return [replace(row, problem=f"{name}: {row.problem}") for row in rows]


def differences(found: Sequence[Pair], names: Names, metric: str, alone: tuple[list[str], list[str]]) -> Markup:
    """The section with the differences; `alone` are the methods that only one of the two has."""
    a, b = names
    unit, points = formatting.unit(metric), "points" if formatting.is_share(metric) else ""
    many = len({pair.one.problem for pair in found}) > 1
    heads = [("method", "text", ""), (a, "number", unit), (b, "number", unit),
             (f"{a} minus {b}", "number difference", points), ("differs in", "text", "")]  # fmt: skip
    scale = scale_of([pair.difference for pair in found])
    body = []
    for pair in found:
        one, other = pair.one.mean, pair.other.mean
        mark = css_class("" if pair.diverged else pair.difference.verdict)
        below = join(tag("span", pair.verdict, class_=f"verdict {mark}"), p_value_line(pair.difference))
        apart = listed(differing(pair))
        cells = [
            cell(formatting.mean(one, metric), one and one.value, formatting.runs(pair.one), a),
            cell(formatting.mean(other, metric), other and other.value, formatting.runs(pair.other), b),
            difference_cell(pair.difference, metric, scale, f"{a} minus {b}", below),
            tag("td", apart, class_="text", data_value=apart, data_name="differs in"),
        ]
        body.append(tag("tr", row_name(pair.one, {"on": pair.one.problem} if many else None), *cells))
    caption = (
        f"{capitalised(formatting.name_of(metric))}: mean ± standard error over seeds. The difference is paired over "
        "the seeds that both have; the 95 % intervals of a problem are simultaneous."
    )
    table = sortable_table(caption, [sorting_head(*one) for one in heads], body, class_="results sortable")
    only = [f"Only in {name}: {', '.join(labels)}." for name, labels in zip(names, alone, strict=True) if labels]
    return tag(
        "section",
        tag("h2", f"{a} against {b}", id="differences"),
        scrolling(table, "differences") if found else None,
        *(tag("p", one, class_="counts") for one in only),
        aria_labelledby="differences",
    )


def alone(ones: Sequence[Row], others: Sequence[Row], found: Sequence[Pair]) -> tuple[list[str], list[str]]:
    """The labels of the methods that have no counterpart, in either report."""
    mine, theirs = {id(pair.one) for pair in found}, {id(pair.other) for pair in found}
    first = [row.label for row in ones if id(row) not in mine]
    second = [row.label for row in others if id(row) not in theirs]
    return list(dict.fromkeys(first)), list(dict.fromkeys(second))


def differing(pair: Pair) -> dict[str, tuple[str, str]]:
    """Settings, versions and devices in which the two differ: name and both values."""
    mine, theirs = ({**row.group.recipe, **_environment(row)} for row in (pair.one, pair.other))
    names = [name for name in dict.fromkeys([*mine, *theirs]) if (mine.get(name) or None) != (theirs.get(name) or None)]
    return {display_name(name): (display_value(mine.get(name)), display_value(theirs.get(name))) for name in names}


def _environment(row: Row) -> Mapping[str, Any]:
    """Versions and device of the first run. The commit is left out: it differs nearly always."""
    found = next((r["environment"] for r in row.group.records if r.get("environment")), {})
    return {name: found[name] for name in ("steppe", "torch", "device") if name in found}


def listed(found: Mapping[str, tuple[str, str]]) -> str:
    """The differing settings in a line."""
    return ", ".join(f"{name} {one} / {other}" for name, (one, other) in found.items()) or "nothing"


def difference_table(found: Sequence[Pair], names: Names, metric: str) -> Table:
    """The differences in the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    made = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    many = len({pair.one.problem for pair in found}) > 1
    for name in ("method", *names, f"{names[0]} minus {names[1]}", "differs in"):
        made.add_column(Text(name), overflow="fold")
    for pair in found:
        label = f"{pair.one.label}\n{pair.one.problem}" if many else pair.one.label
        means = [formatting.mean(row.mean, metric) for row in (pair.one, pair.other)]
        gain = f"{formatting.difference(pair.difference, metric)}\n{pair.verdict}, n = {pair.difference.n}"
        made.add_row(*(Text(one) for one in (label, *means, gain, listed(differing(pair)))))
    return made
