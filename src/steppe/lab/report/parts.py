"""The parts of the page, from top to bottom. What is text and table is made here; charts are drawn by the scripts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..statistics import FEWEST, Row, seed_of
from . import wording as words
from .forest import Scale, forest, scale_of
from .html import Markup, join, tag

ANSWERS = 6  # methods told in sentences; the others are in the table


def title(problems: Sequence[Sequence[Row]]) -> str:
    """What was compared on what, if the names are few enough to be said."""
    records = [record for rows in problems for row in rows for record in row.group.records]
    methods = {str(r["method"]["name"]): 1 for r in records if r.get("role") == "method" and r.get("method")}
    data = {str(r["recipe"].get("data", "")): 1 for r in records}
    return f"{_listed(list(methods), 'methods') or 'Training'} on {_listed(list(data), 'data sets') or 'nothing'}"


def _listed(names: list[str], many: str) -> str:
    if len(names) > 6:
        return f"{len(names)} {many}"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def header(said: str, problems: Sequence[Sequence[Row]], metric: str) -> Markup:
    """The title and the answer; with several problems, where to find each."""
    if not problems:
        return tag("header", tag("h1", said), tag("p", "There are no runs to show.", class_="lead"))
    if len(problems) == 1:
        below = join(tag("p", setting(problems[0]), class_="problem"), answers(problems[0], metric))
    else:
        below = overview(problems, metric)
    return tag("header", tag("h1", said), below)


def overview(problems: Sequence[Sequence[Row]], metric: str) -> Markup:
    """Methods by problems: what was reached everywhere, and where to read on."""
    labels = list(dict.fromkeys(row.label for rows in problems for row in rows))
    unit = ", %" if words.is_share(metric) else ""
    heads = [tag("th", tag("a", rows[0].problem, href=f"#problem-{k}"), scope="col", class_="number")
             for k, rows in enumerate(problems)]  # fmt: skip
    body = []
    for label in labels:
        cells = []
        for rows in problems:
            found = [row for row in rows if row.label == label]
            said = [tag("span", words.mean(row.mean, metric), class_=_class(row.verdict), title=words.verdict(row))
                    for row in found]  # fmt: skip
            cells.append(tag("td", *(said or ["–"]), class_="number"))
        body.append(tag("tr", tag("th", tag("span", tag("span", label), class_="who"), scope="row"), *cells))
    caption = (
        f"{upper(words.name_of(metric))}{unit}: mean ± standard error over seeds. ▲ is better and ▼ worse than the "
        "column’s base; without a mark no difference was seen, or n is too small, or runs diverged."
    )
    head = tag("thead", tag("tr", tag("th", "method", scope="col"), *heads))
    made = tag("table", tag("caption", tag("span", caption)), head, tag("tbody", *body))
    return tag("div", made, class_="scroll overview", tabindex=0, role="region", aria_label="Overview")


def setting(rows: Sequence[Row]) -> str:
    """Data, model, length and seeds in a line."""
    epochs = {row.group.recipe.get("epochs") for row in rows if row.role != "equal-cost"}
    seeds = {str(seed_of(record)) for row in rows for record in row.group.records}
    said = [rows[0].problem, f"{epochs.pop()} epochs" if len(epochs) == 1 else None, _many(len(seeds), "seed")]
    return " · ".join(one for one in said if one)


def _many(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def answers(rows: Sequence[Row], metric: str) -> Markup:
    """What came out, in sentences: the base first, then the methods in the table's order."""
    methods = [row for row in rows if row.role == "method"]
    bases = [row for row in rows if row.role == "base"]
    shown = methods[:ANSWERS]
    items = [tag("li", tag("b", row.label), " ", words.base_sentence(row, metric), class_="base") for row in bases]
    for row in shown:
        said = [tag("em", text, class_=_class(of)) if of else unbroken(text) for text, of in words.pieces(row, metric)]
        items.append(tag("li", tag("b", row.label), " ", *said, class_=_class(row.verdict)))
    if len(methods) > ANSWERS:
        items.append(tag("li", f"and {len(methods) - ANSWERS} more in the table.", class_="more"))
    return join(tag("ul", *items, class_="answers"), _caution(rows))


def unbroken(text: str) -> str:
    """The same with spaces that no line may break at, in intervals and in "n = 3"."""
    return re.sub(r"\[[^\]]*\]|n = \d+|\S+ (points|seconds|%)", lambda found: found[0].replace(" ", "\u00a0"), text)


def _caution(rows: Sequence[Row]) -> Markup | None:
    """What no reader should miss: too few seeds, runs that are lost or not over."""
    said = []
    most = max((row.n for row in rows), default=0)
    if 0 < most < FEWEST:
        seeds = "One seed" if most == 1 else f"{most} seeds"
        intervals = "there are no intervals and " if most == 1 else ""
        said.append(f"{seeds}: {intervals}n is too small to tell methods apart. Run at least {FEWEST} seeds.")
    runs, lost = sum(len(row.group.records) for row in rows), sum(row.diverged for row in rows)
    if lost:
        rest = "There is nothing to compare" if lost == runs else "Means are over the others"
        said.append(f"{lost} of {runs} runs diverged. {rest}; what happened is said below the table.")
    if waiting := sum(row.unfinished for row in rows):
        said.append(f"{waiting} {'run is' if waiting == 1 else 'runs are'} not finished and not counted.")
    if rows and not any(row.role == "base" for row in rows):
        said.append("No base was run, so there is nothing to compare with.")
    return tag("ul", *(tag("li", one) for one in said), class_="caution") if said else None


def results(index: int, rows: Sequence[Row], metric: str) -> Markup:
    """The table. Every header sorts; numbers sort by value, not as text."""
    percent, points = ("%", "points") if words.is_share(metric) else ("", "")
    head = [
        sorting_head("method", "text"),
        sorting_head(words.name_of(metric), "number", percent),
        sorting_head("runs", "number"),
        sorting_head("gradients", "number", "× base"),
        sorting_head("time", "number", "× base"),
        sorting_head("difference to base", "number difference", points),
        sorting_head("verdict", "text"),
        sorting_head("at equal cost", "number difference", points),
    ]
    scale = scale_of([row.difference for row in rows] + [row.equal_cost for row in rows])
    body = [_result(row, metric, scale) for row in rows]
    caption = (
        f"{upper(words.name_of(metric))}: mean ± standard error over seeds. Differences are paired by seed, with 95 % "
        "t intervals; verdicts go by their p values after Holm’s correction. At equal cost: against the base trained "
        "for as many gradient evaluations. Press a header to sort."
    )
    made = tag(
        "table",
        tag("caption", tag("span", caption)),
        tag("thead", tag("tr", *head)),
        tag("tbody", *body),
        class_="results sortable",
    )
    reasons = [tag("li", tag("b", row.label), f": {_counted(row.reasons)}") for row in rows if row.reasons]
    lost = join(tag("p", "Runs that diverged:"), tag("ul", *reasons)) if reasons else None
    return tag(
        "section",
        tag("h3", "Results", id=f"results-{index}"),
        scrolling(made, f"results-{index}"),
        tag("div", lost, class_="losses") if lost else None,
        aria_labelledby=f"results-{index}",
    )


def sorting_head(name: str, kind: str, unit: str = "") -> Markup:
    """A header that sorts its column."""
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
        cell(words.mean(row.mean, metric), row.mean and row.mean.value),
        tag("td", *_runs(row), class_="number", data_value=row.n),
        cell(words.times(row.cost), row.gradients, words.count(row.gradients)),
        cell(words.times(row.time), seconds, words.duration(seconds)),
        _difference(one, metric, scale),
        tag("td", tag("span", words.verdict(row), class_=f"verdict {_class(row.verdict)}"), _p(one), class_="text",
            data_value=row.verdict),
        _difference(equal, metric, scale, words.equal_cost_verdict(row)),
        class_=row.role,
    )  # fmt: skip


def _runs(row: Row) -> list[Any]:
    counts = ((row.diverged, "diverged"), (row.unfinished, "unfinished"))
    return [row.n, *(tag("span", f"{k} {what}", class_="p") for k, what in counts if k)]


def row_name(row: Row) -> Markup:
    """The first cell of a row: the group's name and the mark by which charts know it."""
    key = tag("span", class_="key", data_group=row.label)
    return tag("th", tag("span", key, tag("span", row.label), class_="who"), scope="row", data_value=row.label)


def _difference(one: Any, metric: str, scale: Scale, said: str = "") -> Markup:
    if one is None:
        return tag("td", "–", class_="number difference", data_value="")
    verdict = tag("span", f"{said}, n = {one.n}", class_=f"verdict {_class(said)}") if said else None
    number = tag("span", words.difference(one, metric), class_="numbers")
    return tag("td", forest(one, scale), number, verdict, class_="number difference", data_value=one.mean.value)


def _p(one: Any) -> Markup | None:
    if one is None or one.n < 2:
        return None
    return tag("span", f"p {_equals(words.p_value(one.adjusted))}, n = {one.n}", class_="p")


def _equals(said: str) -> str:
    return said if said.startswith("<") else f"= {said}"


def cell(said: str, value: float | None, below: str = "") -> Markup:
    """A number as text, its value to sort by, and something smaller below."""
    small = tag("span", below, class_="p") if below and value is not None else None
    return tag("td", said, small, class_="number", data_value="" if value is None else repr(value))


def footer(rows: Sequence[Row], command: str, metric: str) -> Markup:
    """How to run it again, and how to read it."""
    again = None
    if command:
        copy = tag("button", "Copy", type="button", class_="copy", data_copies="command")
        again = join(
            tag("h2", "Run it again"),
            tag(
                "div",
                tag("pre", tag("code", command, id="command"), tabindex=0, aria_label="Command"),
                copy,
                class_="command",
            ),
        )
    seeds = sorted({str(seed_of(record)) for row in rows for record in row.group.records}, key=lambda s: (len(s), s))
    note = (
        f"Seeds: {', '.join(seeds) or 'none'}. A seed fixes the first weights, the batches and their augmentation for "
        "all methods alike, which is why differences are taken within a seed. “No difference seen” means that the data "
        "do not tell the two apart, not that they are the same: the interval says how large a difference may hide. "
        f"With fewer than {FEWEST} pairs there is no verdict. Intervals are not corrected for the number of "
        "comparisons; verdicts are."
    )
    return tag("footer", again, tag("h2", "How to read this page"), tag("p", note))


def scrolling(table: Markup, labelled_by: str) -> Markup:
    """A table that scrolls sideways on its own where it is too wide, also by keyboard."""
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_labelledby=labelled_by)


def _counted(reasons: Sequence[str]) -> str:
    counts = {reason: reasons.count(reason) for reason in reasons}
    return "; ".join(reason if k == 1 else f"{reason} ({k} runs)" for reason, k in counts.items())


def _class(verdict: str) -> str:
    return {"better": "better", "worse": "worse", "all diverged": "lost", "some diverged": "lost"}.get(verdict, "open")


def upper(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]
