"""What the training commands do with their runs: train them with a progress display, and report what came out."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import typer

from .errors import say


def train_all(planned: list[Any], where: Any, workers: int, address: str | None = None) -> list[Any]:
    """The records of the planned runs, trained here or at the address of a Ray cluster ("": a new one)."""
    from ..lab.runner.local import notes, perform
    from ..lab.runner.ray import perform_on_ray
    from .progress import Display

    for note in notes(planned, where):
        say(note)
    with Display(planned) as display:
        if address is not None:
            return perform_on_ray(planned, where, address, workers, display)
        return perform(planned, where, workers, display)


def report_runs(records: list[Any], page: Path, *tables: Any, metric: str = "") -> None:
    """Print the tables, and write the page."""
    from rich.console import Console

    from ..lab.records import metric_of
    from ..lab.report import write_report

    for table in tables:
        if table is not None:
            Console().print(table)
    write_report(records, page, command="steppe " + shlex.join(sys.argv[1:]), metric=metric or metric_of(records))
    typer.echo(f"wrote {page}")
