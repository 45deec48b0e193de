"""`steppe report`: table and page of finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ...support.errors import UserError, unknown
from ..runs import report_runs


def command(
    runs: Annotated[list[Path], typer.Argument(help="Records, or folders of them.")],
    out: Annotated[Path | None, typer.Option(help="The page to write; by default beside the records.")] = None,
    metric: Annotated[str, typer.Option(help="test_accuracy, test_loss, top, trace, ...")] = "test_accuracy",
) -> None:
    """Make table and page of finished runs again."""
    from ...lab.records import read_records
    from ...lab.report import headline, table
    from ..progress import other_measures

    records = read_records(runs)
    if not records:
        raise UserError(f"there are no records in {' '.join(map(str, runs))}")
    first = runs[0] if runs[0].is_dir() else runs[0].parent
    page = out or first / "report.html"
    if page.is_dir():
        raise UserError(f"--out {page} is a folder: name the page")
    _check_metric(records, metric)
    said = headline(records, metric), table(records, metric)
    report_runs(records, page, *said, other_measures(records), metric=metric)


def _check_metric(records: list[Any], metric: str) -> None:
    """Raise for a name that no record has; while no run has ended, for a name that no record ever has."""
    from ...lab.records import metrics_of
    from ...lab.report.formatting import NAMES

    known = {name for record in records for name in metrics_of(record)} or set(NAMES)
    if metric not in known:
        raise unknown("metric", metric, known)
