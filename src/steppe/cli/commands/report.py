"""`steppe report`: table and page of finished runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ...support.errors import UserError, unknown
from ..options import Json
from ..runs import report_runs


def command(
    runs: Annotated[list[Path], typer.Argument(help="Records (JSON files), or folders of records.")],
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write. Default: report.html beside the records.")
    ] = None,
    metric: Annotated[
        str,
        typer.Option(
            help="Metric to compare by: test_accuracy, test_loss, seconds, top (largest eigenvalue), trace, ... "
            "Default: the metric of the runs."
        ),
    ] = "",
    against: Annotated[
        Path | None,
        typer.Option(help="Folder of other runs: one page shows both, and the differences of the methods in both."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the table and write the HTML page of finished runs, or compare two sets of runs."""
    from ...lab.records import metric_of
    from ...lab.report import headline, table
    from ..progress import other_measures

    if as_json and against is not None:
        raise UserError("--json is for one report, without --against")
    records = _read(runs)
    metric = metric or metric_of(records)
    first = runs[0] if runs[0].is_dir() else runs[0].parent
    page = out or first / ("report.html" if against is None else "difference.html")
    if page.is_dir():
        raise UserError(f"--out {page} is a folder: name an HTML file")
    _check_metric(records, metric)
    if against is not None:
        _compare(records, _read([against]), _names(runs, against), page, metric)
    else:
        shown = headline(records, metric), table(records, metric)
        report_runs(records, page, *shown, other_measures(records), metric=metric, as_json=as_json)


def _read(runs: list[Path]) -> list[Any]:
    from ...lab.records import read_records

    records = read_records(runs)
    if not records:
        raise UserError(f"there are no records in {' '.join(map(str, runs))}")
    return records


def _names(runs: list[Path], against: Path) -> tuple[str, str]:
    """The names of the two reports: those of their folders, or the whole paths if those are the same."""
    ways = (lambda path: path.resolve().name, str)
    for way in ways:
        names = "+".join(way(path) for path in runs), way(against)
        if names[0] != names[1]:
            return names
    raise UserError(f"--against {against} are the same runs: name others")


def _compare(records: list[Any], others: list[Any], names: tuple[str, str], page: Path, metric: str) -> None:
    """Print the differences of the two reports and write the page with both."""
    from rich.console import Console

    from ...lab.report import write_report
    from ...lab.report.two_reports import difference_table, pairs, sentence
    from ...lab.statistics import summarise

    found = pairs(summarise(records, metric), summarise(others, metric), metric)
    Console().print(sentence(found, names, metric), style="bold", markup=False, highlight=False)
    if found:
        Console().print(difference_table(found, names, metric))
    command = "steppe " + shlex.join(sys.argv[1:])
    write_report(records, page, command=command, metric=metric, against=others, names=names)
    typer.echo(f"wrote {page}")


def _check_metric(records: list[Any], metric: str) -> None:
    """Raise for a metric that no record has; if no run has ended, for a metric that no record can have."""
    from ...lab.records import metrics_of
    from ...lab.report.formatting import NAMES

    known = {name for record in records for name in metrics_of(record)} or set(NAMES)
    if metric not in known:
        raise unknown("metric", metric, known)
