"""The page: one self-contained HTML file, which needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...support.files import whole_file
from ..statistics import Row, summarise
from . import chart_sections, results_table, summary, two_reports
from .chart_data import charts
from .html import Markup, join, tag
from .run_details import run_details

SCRIPTS = ("chart.js", "labels.js", "ridges.js", "figures.js", "landscape.js", "downloads.js", "page.js")


def write_report(
    records: Iterable[Any],
    path: str | os.PathLike[str],
    *,
    command: str = "",
    title: str = "",
    metric: str = "test_accuracy",
    base: str | None = None,
    against: Iterable[Any] = (),
    names: tuple[str, str] = ("the first", "the second"),
) -> Path:
    """Write the page and return its path. `command` is shown as the way to repeat the runs.

    The default `title` is the conclusion. `against` are the records of another report: the page then shows both, with
    their differences first, under the two `names`.
    """
    path = Path(path)
    page = report(records, command=command, title=title, metric=metric, base=base, against=against, names=names)
    with whole_file(path) as beside:  # a reader never sees half a page
        beside.write_text(page, encoding="utf-8")
    return path


def report(
    records: Iterable[Any],
    *,
    command: str = "",
    title: str = "",
    metric: str = "test_accuracy",
    base: str | None = None,
    against: Iterable[Any] = (),
    names: tuple[str, str] = ("the first", "the second"),
) -> str:
    """The page as text."""
    rows, others = summarise(records, metric, base), summarise(against, metric, base)
    differences = None
    if others:
        found = two_reports.pairs(rows, others, metric)
        differences = two_reports.differences(found, names, metric, two_reports.alone(rows, others, found))
        title = title or two_reports.sentence(found, names, metric)
        rows = two_reports.named(rows, names[0]) + two_reports.named(others, names[1])
    problems = [[r for r in rows if r.problem == name] for name in dict.fromkeys(row.problem for row in rows)]
    style, script = _file("page.css"), "\n".join(_file(name) for name in SCRIPTS)
    body = join(
        summary.header(title, problems, metric),
        tag(
            "main",
            differences,
            *(_problem(k, one, metric, len(problems) > 1) for k, one in enumerate(problems)),
            id="content",
        ),
        summary.footer(rows, command, metric),
        _data([charts(one, metric) for one in problems]),
        tag("script", Markup(script)),
    )
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("title", title or summary.title(problems, metric)),
        tag("style", Markup(style)),
    )
    return f"<!doctype html>\n{tag('html', tag('head', head), tag('body', body), lang='en')}\n"


def _problem(index: int, rows: list[Row], metric: str, many: bool) -> Markup:
    """One problem: the table, then the charts, then the details."""
    return tag(
        "section",
        tag("h2", rows[0].problem, class_="problem" if many else "unseen"),
        summary.answers(rows, metric) if many else None,
        results_table.results(index, rows, metric),
        chart_sections.cost_chart(index, rows, metric),
        chart_sections.curves(index, rows),
        chart_sections.curvature(index, rows),
        chart_sections.coefficients(index, rows),
        run_details(index, rows),
        id=f"problem-{index}",
        data_problem=index,
    )


def _data(payload: list[dict[str, Any]]) -> Markup:
    # "<" is the only character that could end the element early.
    text = json.dumps(payload, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return tag("script", Markup(text), type="application/json", id="data")


def _policy(script: str) -> str:
    """The content security policy: no requests, and no script except the page's own. Images are made by the page."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"


def _file(name: str) -> str:
    return (files("steppe.lab.report") / "static" / name).read_text(encoding="utf-8")
