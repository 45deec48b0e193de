"""The text of the page: the title, the results in sentences, the overview of several problems, the footer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..records import seed_of
from ..statistics import FEWEST, POOLED, Row
from . import conclusion, formatting
from .html import Markup, join, tag
from .results_table import capitalised, css_class

LONG = 60  # a title of more characters is set in smaller letters
ANSWERS = 6  # most methods that are described in sentences; the others are only in the table


def title(problems: Sequence[Sequence[Row]], metric: str) -> str:
    """The title of a page: its conclusion."""
    return capitalised(conclusion.conclusion(problems, metric)) if problems else "There are no runs to show."


def subject(problems: Sequence[Sequence[Row]]) -> str:
    """What was compared: the methods, and of several problems the data sets, or their numbers if there are many."""
    records = [record for rows in problems for row in rows for record in row.group.records]
    methods = {str(r["method"]["name"]): 1 for r in records if r.get("role") == "method" and r.get("method")}
    names = _listed(list(methods), "methods") or "Training"
    if len(problems) == 1:
        return f"{names} on {setting(problems[0])}"
    data = {str(r["recipe"].get("data", "")).removeprefix("python:"): 1 for r in records}
    return f"{names} on {_listed(list(data), 'data sets') or 'nothing'}"


def _listed(names: list[str], many: str) -> str:
    if len(names) > 6:
        return f"{len(names)} {many}"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def header(given: str, problems: Sequence[Sequence[Row]], metric: str) -> Markup:
    """The title (by default the conclusion), and below it the results; for several problems, an overview of them."""
    if not problems:
        return tag("header", tag("h1", given or title(problems, metric)))
    sentences = [unbroken(capitalised(one)) for one in conclusion.sentences(problems, metric)]
    if given:
        top = join(
            tag("h1", given, class_="conclusion" if len(given) > LONG else None),
            *(tag("p", one, class_="conclusion") for one in sentences),
        )
    else:
        heading = [tag("span", one, " ") for one in sentences]
        top = join(tag("p", subject(problems), class_="subject"), tag("h1", *heading, class_="conclusion"))
    return tag("header", top, answers(problems[0], metric) if len(problems) == 1 else overview(problems, metric))


def overview(problems: Sequence[Sequence[Row]], metric: str) -> Markup:
    """A table of methods by problems, with links to the problems."""
    labels = list(dict.fromkeys(row.label for rows in problems for row in rows))
    unit = ", %" if formatting.is_share(metric) else ""
    heads = [tag("th", tag("a", rows[0].problem, href=f"#problem-{k}"), scope="col", class_="number")
             for k, rows in enumerate(problems)]  # fmt: skip
    body = []
    for label in labels:
        cells = []
        for rows in problems:
            found = [row for row in rows if row.label == label]
            cells.append(tag("td", *([_overview_cell(row, metric) for row in found] or ["–"]), class_="number"))
        body.append(tag("tr", tag("th", tag("span", tag("span", label), class_="who"), scope="row"), *cells))
    caption = (
        f"{capitalised(formatting.name_of(metric))}{unit}: mean ± standard error over seeds. ▲ means better, ▼ worse "
        "than the base of the same column. No mark: no difference seen, too few seeds, or some runs diverged."
    )
    head = tag("thead", tag("tr", tag("th", "method", scope="col"), *heads))
    made = tag("table", tag("caption", tag("span", caption)), head, tag("tbody", *body))
    return tag("div", made, class_="scroll overview", tabindex=0, role="region", aria_label="Overview")


def _overview_cell(row: Row, metric: str) -> Markup:
    text = formatting.mean(row.mean, metric)
    return tag("span", text, class_=css_class(row.verdict), title=formatting.verdict(row))


def setting(rows: Sequence[Row]) -> str:
    """Data, model, number of epochs and number of seeds, in one line."""
    epochs = {row.group.recipe.get("epochs") for row in rows if row.role in ("base", "method")}
    seeds = {str(seed_of(record)) for row in rows for record in row.group.records}
    length = f"{epochs.pop()} epochs" if len(epochs) == 1 else None
    return " · ".join(filter(None, (rows[0].problem, length, formatting.plural(len(seeds), "seed"))))


def answers(rows: Sequence[Row], metric: str) -> Markup:
    """The results in sentences: the base first, then the methods in the order of the table."""
    methods = [row for row in rows if row.role == "method"]
    bases = [row for row in rows if row.role == "base"]
    shown = methods[:ANSWERS]
    items = [tag("li", tag("b", row.label), " ", formatting.base_sentence(row, metric), class_="base") for row in bases]
    for row in shown:
        sentence = [
            tag("em", text, class_=css_class(verdict)) if verdict else unbroken(text)
            for text, verdict in formatting.pieces(row, metric)
        ]
        items.append(tag("li", tag("b", row.label), " ", *sentence, class_=css_class(row.verdict)))
    if len(methods) > ANSWERS:
        items.append(tag("li", f"and {len(methods) - ANSWERS} more in the table.", class_="more"))
    return join(tag("ul", *items, class_="answers"), _caution(rows, metric))


def unbroken(text: str) -> str:
    """The text with non-breaking spaces in intervals and in "n = 3"."""
    return re.sub(r"\[[^\]]*\]|n = \d+|\S+ (points|seconds|%)", lambda found: found[0].replace(" ", "\u00a0"), text)


def _caution(rows: Sequence[Row], metric: str) -> Markup | None:
    warnings = conclusion.warnings(rows, metric)
    return tag("ul", *(tag("li", one) for one in warnings), class_="caution") if warnings else None


def footer(rows: Sequence[Row], command: str, metric: str) -> Markup:
    """How to repeat the runs, and how to read the page."""
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
        f"Seeds: {', '.join(seeds) or 'none'}. A seed determines the initial weights, the batches and their "
        "augmentation, in the same way for all methods, so differences are taken within a seed. “No difference seen” "
        "does not mean that two methods are equal: the interval shows how large the difference may be. All intervals "
        "of a table are simultaneous: with probability 95 % all of them contain their true difference. A method is "
        "called better or worse exactly if its interval excludes zero. “Probably” means that the comparison would be "
        "significant alone, but is not after the correction for all comparisons of the table. p values have the same "
        f"correction. With fewer than {FEWEST} common seeds there is no verdict. With up to {POOLED} seeds, rows whose "
        "variances agree share one estimate of the variance."
    )
    return tag("footer", again, tag("h2", "How to read this page"), tag("p", note))
