"""The table of results, and the table cells that other sections of the page use too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..statistics import FEWEST, Difference, Row
from . import formatting, settings
from .forest_plot import Scale, forest, scale_of
from .html import Markup, join, tag


def results(index: int, rows: Sequence[Row], metric: str) -> Markup:
    """The table of results. Every header sorts; numbers are sorted by value, not as text."""
    columns = _columns(metric)
    kinds = ["text", *["number"] * 4, *["number difference"] * 2]
    head = [sorting_head(name, kind, unit) for (name, unit), kind in zip(columns, kinds, strict=True)]
    scale = scale_of([row.difference for row in rows] + [row.equal_cost for row in rows])
    names = [f"{name}, {unit}" if unit in ("%", "× base") else name for name, unit in columns]
    body = [_result(row, metric, scale, names, settings.settings(row, rows)) for row in rows]
    caption = (
        f"{capitalised(formatting.name_of(metric))}: mean ± standard error over seeds. Differences are paired by seed; "
        "their 95 % intervals are simultaneous for the whole table. The best base at no more cost: the base trained "
        "for up to the method's cost, the base stopped early, or one of its variants, whichever is hardest to beat. "
        "Click a column header to sort."
    )
    table = sortable_table(caption, head, body, class_="results sortable")
    reasons = [tag("li", tag("b", row.label), f": {_counted(row.reasons)}") for row in rows if row.reasons]
    diverged = join(tag("p", "Diverged runs:"), tag("ul", *reasons)) if reasons else None
    return tag(
        "section",
        tag("div", tag("h3", "Results", id=f"results-{index}"), class_="bar", data_downloads=True),
        scrolling(table, f"results-{index}"),
        tag("div", diverged, class_="losses") if diverged else None,
        aria_labelledby=f"results-{index}",
    )


def sortable_table(caption: str, heads: Sequence[Markup], body: Sequence[Markup], class_: str = "sortable") -> Markup:
    """A table with a caption, whose column headers (`sorting_head`) sort it."""
    head = tag("thead", tag("tr", *heads))
    return tag("table", tag("caption", tag("span", caption)), head, tag("tbody", *body), class_=class_)


def sorting_head(name: str, kind: str, unit: str = "") -> Markup:
    """A column header that sorts the table."""
    arrow = tag("span", class_="arrow", aria_hidden="true")
    button = tag(
        "button",
        tag("span", name, arrow, class_="what"),
        tag("span", unit, class_="unit") if unit else None,
        type="button",
    )
    return tag("th", button, scope="col", class_=kind, aria_sort="none")


def _columns(metric: str) -> list[tuple[str, str]]:
    """Name and unit of each column."""
    other = formatting.other(metric)
    points = "points" if formatting.is_share(metric) else ""
    return [
        ("method", ""),
        (formatting.name_of(metric), formatting.unit(metric)),
        (formatting.name_of(other), formatting.unit(other)),
        ("gradients", "× base"),
        ("time", "× base"),
        ("difference to base", points),
        ("difference to best base", f"at no more cost{points and ', '}{points}"),
    ]


def _result(row: Row, metric: str, scale: Scale, names: Sequence[str], found: Mapping[str, str]) -> Markup:
    other = formatting.other(metric)
    mean, beside, seconds = row.mean, row.group.mean(other), row.seconds and row.seconds.value
    cells = [
        cell(formatting.mean(mean, metric), mean and mean.value, formatting.runs(row), names[1]),
        cell(formatting.mean(beside, other), beside and beside.value, "", names[2]),
        cell(formatting.times(row.cost), row.gradients, formatting.count(row.gradients), names[3]),
        cell(formatting.times(row.time), seconds, formatting.duration(seconds), names[4]),
        _to_base(row, metric, scale, names[5]),
        _to_rival(row, metric, scale, names[6]),
    ]
    return tag("tr", row_name(row, found), *cells, class_=row.role)


def row_name(row: Row, found: Mapping[str, str] | None = None) -> Markup:
    """The first cell of a row: the group's name, its marker in the charts, and its settings."""
    key = tag("span", class_="key", data_group=row.label)
    below = None
    if found:
        few, all_of_them = settings.listed(found, settings.FEW), settings.listed(found)
        below = tag("span", few, class_="settings", title=all_of_them if few != all_of_them else None)
    who = tag("span", key, tag("span", row.label, below), class_="who")
    return tag("th", who, scope="row", data_value=row.label)


def _to_base(row: Row, metric: str, scale: Scale, name: str) -> Markup:
    verdict = tag("span", formatting.verdict(row), class_=f"verdict {css_class(row.verdict)}")
    return difference_cell(row.difference, metric, scale, name, join(verdict, p_value_line(row.difference)))


def _to_rival(row: Row, metric: str, scale: Scale, name: str) -> Markup:
    one, text = row.equal_cost, formatting.equal_cost_verdict(row)
    if one is None:
        return tag("td", "–", class_="number difference", data_value="", data_name=name)
    verdict = tag("span", f"{text}, n = {one.n}", class_=f"verdict {css_class(text)}")
    return difference_cell(
        one, metric, scale, name, join(verdict, tag("span", f"against {one.against}", class_="p rival"))
    )


def difference_cell(one: Difference | None, metric: str, scale: Scale, name: str, below: Markup) -> Markup:
    """A table cell with a difference: as a picture, in numbers, and `below` it the verdict."""
    numbers = formatting.difference(one, metric).replace(", ", ",\u00a0")  # no line break inside an interval
    shown = join(forest(one, scale), tag("span", numbers, class_="numbers")) if one else None
    value = one.mean.value if one else ""
    return tag("td", shown, below, class_="number difference", data_value=value, data_name=name)


def p_value_line(one: Difference | None) -> Markup | None:
    """The adjusted p value of a difference and its number of seeds; without a verdict, only the number of seeds."""
    if one is None or one.n < 2:
        return None
    p = formatting.p_value(one.adjusted)
    test = f"p {p if p.startswith('<') else f'= {p}'}, " if one.n >= FEWEST else ""
    return tag("span", f"{test}n = {one.n}", class_="p")


def cell(text: str, value: float | None, below: str = "", name: str | None = None) -> Markup:
    """A table cell with a number as text, its value for sorting, and a smaller text below.

    On narrow screens the cell also shows `name`, that of its column.
    """
    small = tag("span", below, class_="p") if below not in ("", "–") else None
    return tag("td", text, small, class_="number", data_value="" if value is None else repr(value), data_name=name)


def scrolling(table: Markup, labelled_by: str) -> Markup:
    """A table that scrolls horizontally if it is too wide, also with the keyboard."""
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_labelledby=labelled_by)


def _counted(reasons: Sequence[str]) -> str:
    counts = {reason: reasons.count(reason) for reason in reasons}
    return "; ".join(reason if k == 1 else f"{reason} ({k} runs)" for reason, k in counts.items())


def css_class(verdict: str) -> str:
    """The CSS class of a verdict."""
    return {"better": "better", "worse": "worse", "all diverged": "lost", "some diverged": "lost"}.get(verdict, "open")


def capitalised(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]
