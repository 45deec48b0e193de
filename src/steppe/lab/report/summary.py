"""The text of the page: its title, the answers in sentences, the overview of several problems, the footer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..records import seed_of
from ..statistics import FEWEST, POOLED, Row
from . import conclusion, formatting
from .html import Markup, join, tag
from .results_table import capitalised, css_class

LONG = 60  # characters of a title that is a sentence, and not in large letters
ANSWERS = 6  # methods described in sentences; the others are only in the table


def title(problems: Sequence[Sequence[Row]], metric: str) -> str:
    """The title of a page: its conclusion."""
    return capitalised(conclusion.conclusion(problems, metric)) if problems else "There are no runs to show."


def subject(problems: Sequence[Sequence[Row]]) -> str:
    """What was compared: the methods and the data sets, or their numbers if there are many."""
    records = [record for rows in problems for row in rows for record in row.group.records]
    methods = {str(r["method"]["name"]): 1 for r in records if r.get("role") == "method" and r.get("method")}
    data = {str(r["recipe"].get("data", "")): 1 for r in records}
    return f"{_listed(list(methods), 'methods') or 'Training'} on {_listed(list(data), 'data sets') or 'nothing'}"


def _listed(names: list[str], many: str) -> str:
    if len(names) > 6:
        return f"{len(names)} {many}"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def header(given: str, problems: Sequence[Sequence[Row]], metric: str) -> Markup:
    """The conclusion as the title, unless another is given, and the results; of several problems an overview."""
    if not problems:
        return tag("header", tag("h1", given or title(problems, metric)))
    said = [unbroken(capitalised(one)) for one in conclusion.sentences(problems, metric)]
    if given:
        top = join(
            tag("h1", given, class_="conclusion" if len(given) > LONG else None),
            *(tag("p", one, class_="conclusion") for one in said),
        )
    else:
        about = subject(problems) + (f" · {setting(problems[0])}" if len(problems) == 1 else "")
        sentences = [tag("span", one, " ") for one in said]
        top = join(tag("p", about, class_="subject"), tag("h1", *sentences, class_="conclusion"))
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
        "than the base of the same column. No mark means: no difference seen, or n too small, or some runs diverged."
    )
    head = tag("thead", tag("tr", tag("th", "method", scope="col"), *heads))
    made = tag("table", tag("caption", tag("span", caption)), head, tag("tbody", *body))
    return tag("div", made, class_="scroll overview", tabindex=0, role="region", aria_label="Overview")


def _overview_cell(row: Row, metric: str) -> Markup:
    said = formatting.mean(row.mean, metric)
    return tag("span", said, class_=css_class(row.verdict), title=formatting.verdict(row))


def setting(rows: Sequence[Row]) -> str:
    """Data, model, length and seeds in a line."""
    epochs = {row.group.recipe.get("epochs") for row in rows if row.role != "equal-cost"}
    seeds = {str(seed_of(record)) for row in rows for record in row.group.records}
    said = [rows[0].problem, f"{epochs.pop()} epochs" if len(epochs) == 1 else None, _many(len(seeds), "seed")]
    return " · ".join(one for one in said if one)


def _many(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def answers(rows: Sequence[Row], metric: str) -> Markup:
    """The results in sentences: the base first, then the methods in the order of the table."""
    methods = [row for row in rows if row.role == "method"]
    bases = [row for row in rows if row.role == "base"]
    shown = methods[:ANSWERS]
    items = [tag("li", tag("b", row.label), " ", formatting.base_sentence(row, metric), class_="base") for row in bases]
    for row in shown:
        said = [
            tag("em", text, class_=css_class(of)) if of else unbroken(text)
            for text, of in formatting.pieces(row, metric)
        ]
        items.append(tag("li", tag("b", row.label), " ", *said, class_=css_class(row.verdict)))
    if len(methods) > ANSWERS:
        items.append(tag("li", f"and {len(methods) - ANSWERS} more in the table.", class_="more"))
    return join(tag("ul", *items, class_="answers"), _caution(rows, metric))


def unbroken(text: str) -> str:
    """The text with non-breaking spaces in intervals and in "n = 3"."""
    return re.sub(r"\[[^\]]*\]|n = \d+|\S+ (points|seconds|%)", lambda found: found[0].replace(" ", "\u00a0"), text)


def _caution(rows: Sequence[Row], metric: str) -> Markup | None:
    said = conclusion.warnings(rows, metric)
    return tag("ul", *(tag("li", one) for one in said), class_="caution") if said else None


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
        "augmentation, for all methods in the same way. Therefore differences are taken within a seed. “No difference "
        "seen” does not mean that two methods are equal: the interval shows how large the difference may be. All "
        "intervals of a table are simultaneous: together they contain the true differences with probability 95 %. A "
        "method is called better or worse exactly if its interval leaves out zero. “Probably” means that this "
        f"comparison alone would be clear, but not among all those of the table. With fewer than {FEWEST} pairs there "
        f"is no verdict. With up to {POOLED} seeds the rows share one variance where their variances agree."
    )
    return tag("footer", again, tag("h2", "How to read this page"), tag("p", note))
