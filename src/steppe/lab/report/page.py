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
from . import chart_sections, results_table, summary
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
) -> Path:
    """Write the page and return its path. `command` repeats all runs. Without `title` the conclusion is the title."""
    path = Path(path)
    page = report(records, command=command, title=title, metric=metric, base=base)
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
) -> str:
    """The page as text."""
    rows = summarise(records, metric, base)
    problems = [[r for r in rows if r.problem == name] for name in dict.fromkeys(row.problem for row in rows)]
    style, script = _file("page.css"), "\n".join(_file(name) for name in SCRIPTS)
    body = join(
        summary.header(title, problems, metric),
        tag("main", *(_problem(k, one, metric, len(problems) > 1) for k, one in enumerate(problems)), id="content"),
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
