"""The table of results, and the table cells that other sections of the page use too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..statistics import Row
from . import formatting
from .forest_plot import Scale, forest, scale_of
from .html import Markup, join, tag


def results(index: int, rows: Sequence[Row], metric: str) -> Markup:
    """The table of results. Every header sorts; numbers are sorted by value, not as text."""
    percent, points = ("%", "points") if formatting.is_share(metric) else ("", "")
    head = [
        sorting_head("method", "text"),
        sorting_head(formatting.name_of(metric), "number", percent),
        sorting_head(formatting.name_of(formatting.other(metric)), "number", formatting.unit(formatting.other(metric))),
        sorting_head("gradients", "number", "× base"),
        sorting_head("time", "number", "× base"),
        sorting_head("difference to base", "number difference", points),
        sorting_head("verdict", "text"),
        sorting_head("best base", "number difference", f"no more cost{points and ', '}{points}"),
    ]
    scale = scale_of([row.difference for row in rows] + [row.equal_cost for row in rows])
    body = [_result(row, metric, scale) for row in rows]
    caption = (
        f"{capitalised(formatting.name_of(metric))}: mean ± standard error over seeds. Differences are paired by seed, "
        "with intervals that hold together with 95 %. The best base at no more cost is, of the base trained up to "
        "as long as the method costs, stopped early and its rivals, the one that is hardest to beat. Click a "
        "header to sort."
    )
    made = tag(
        "table",
        tag("caption", tag("span", caption)),
        tag("thead", tag("tr", *head)),
        tag("tbody", *body),
        class_="results sortable",
    )
    reasons = [tag("li", tag("b", row.label), f": {_counted(row.reasons)}") for row in rows if row.reasons]
    lost = join(tag("p", "Diverged runs:"), tag("ul", *reasons)) if reasons else None
    return tag(
        "section",
        tag("h3", "Results", id=f"results-{index}"),
        scrolling(made, f"results-{index}"),
        tag("div", lost, class_="losses") if lost else None,
        aria_labelledby=f"results-{index}",
    )


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


def _result(row: Row, metric: str, scale: Scale) -> Markup:
    one, equal = row.difference, row.equal_cost
    seconds = row.seconds.value if row.seconds else None
    return tag(
        "tr",
        row_name(row),
        tag(
            "td",
            formatting.mean(row.mean, metric),
            tag("span", formatting.runs(row), class_="p"),
            class_="number",
            data_value="" if row.mean is None else repr(row.mean.value),
        ),
        _other(row, formatting.other(metric)),
        cell(formatting.times(row.cost), row.gradients, formatting.count(row.gradients)),
        cell(formatting.times(row.time), seconds, formatting.duration(seconds)),
        _difference(one, metric, scale),
        _verdict(row),
        _difference(equal, metric, scale, formatting.equal_cost_verdict(row)),
        class_=row.role,
    )


def _other(row: Row, metric: str) -> Markup:
    """The other of accuracy and loss: they need not agree."""
    mean = row.group.mean(metric)
    return cell(formatting.mean(mean, metric), mean and mean.value)


def _verdict(row: Row) -> Markup:
    said = tag("span", formatting.verdict(row), class_=f"verdict {css_class(row.verdict)}")
    return tag("td", said, _p(row.difference), class_="text", data_value=row.verdict)


def row_name(row: Row) -> Markup:
    """The first cell of a row: the group's name and its marker in the charts."""
    key = tag("span", class_="key", data_group=row.label)
    return tag("th", tag("span", key, tag("span", row.label), class_="who"), scope="row", data_value=row.label)


def _difference(one: Any, metric: str, scale: Scale, said: str = "") -> Markup:
    if one is None:
        return tag("td", "–", class_="number difference", data_value="")
    verdict = tag("span", f"{said}, n = {one.n}", class_=f"verdict {css_class(said)}") if said else None
    rival = tag("span", f"against {one.against}", class_="p rival") if said else None
    number = tag("span", formatting.difference(one, metric), class_="numbers")
    return tag("td", forest(one, scale), number, verdict, rival, class_="number difference", data_value=one.mean.value)


def _p(one: Any) -> Markup | None:
    if one is None or one.n < 2:
        return None
    return tag("span", f"p {_equals(formatting.p_value(one.adjusted))}, n = {one.n}", class_="p")


def _equals(said: str) -> str:
    return said if said.startswith("<") else f"= {said}"


def cell(said: str, value: float | None, below: str = "") -> Markup:
    """A number as text, with its value for sorting and a smaller text below."""
    small = tag("span", below, class_="p") if below and value is not None else None
    return tag("td", said, small, class_="number", data_value="" if value is None else repr(value))


def scrolling(table: Markup, labelled_by: str) -> Markup:
    """A table that scrolls horizontally if it is too wide, also with the keyboard."""
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_labelledby=labelled_by)


def _counted(reasons: Sequence[str]) -> str:
    counts = {reason: reasons.count(reason) for reason in reasons}
    return "; ".join(reason if k == 1 else f"{reason} ({k} runs)" for reason, k in counts.items())


def css_class(verdict: str) -> str:
    """The style of a verdict."""
    return {"better": "better", "worse": "worse", "all diverged": "lost", "some diverged": "lost"}.get(verdict, "open")


def capitalised(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]
