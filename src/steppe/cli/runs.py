"""What the training commands share: train runs with a progress display, and report the results."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import typer

from ..support.errors import UserError
from .errors import say

QUEUE = "queue"


def address_of(on: str, address: str) -> str | None:
    """Where to train: None for this machine, QUEUE for `steppe work`, else the address of a Ray cluster."""
    if on not in ("local", "ray", QUEUE):
        raise UserError(f"--on must be local, ray or queue, not {on!r}")
    return {"local": None, "ray": address, QUEUE: QUEUE}[on]


def leave_to_others(planned: list[Any], where: Any) -> None:
    """Queue the runs in the folder, print how to train them, and end the command; return if all are finished."""
    from ..lab.runner.shared_folder import queue_up

    count = queue_up(planned, where)
    if count == 0:
        return
    typer.echo(f"{count} of {len(planned)} runs are queued in {where.folder}")
    typer.echo(f"to train them, on as many machines as you like: steppe work {where.folder}")
    typer.echo(f"when they are done: steppe report {where.folder}")
    raise typer.Exit


def train_all(planned: list[Any], where: Any, workers: int, address: str | None = None) -> list[Any]:
    """Train the planned runs, on this machine or on the Ray cluster of an address ("": a new one); return the records.

    With the address "queue" the runs are left to `steppe work`, and the command ends.
    """
    from ..lab.runner.estimate import announcement
    from ..lab.runner.local import notes, perform
    from ..lab.runner.ray import perform_on_ray
    from .progress import Display

    for note in notes(planned, where):
        say(note)
    if address == QUEUE:
        leave_to_others(planned, where)
    elif address is None and (text := announcement(planned, where, workers)):
        typer.echo(text, err=True)
    with Display(planned) as display:
        if address is not None:
            return perform_on_ray(planned, where, address, workers, display)
        return perform(planned, where, workers, display)


def report_runs(records: list[Any], page: Path, *tables: Any, metric: str = "", as_json: bool = False) -> None:
    """Print the tables, or JSON instead, and write the HTML page."""
    from rich.console import Console

    from ..lab.records import finite, metric_of
    from ..lab.report import write_report

    if as_json:
        from ..lab.comparison_result import rows_as_dicts
        from ..lab.report import headline

        by = metric or metric_of(records)
        conclusion, *cautions = headline(records, by).plain.splitlines()
        content: dict[str, Any] = {"page": str(page), "conclusion": conclusion, "cautions": cautions}
        content["methods"] = rows_as_dicts(records, by)
        typer.echo(json.dumps(finite(content), indent=1, ensure_ascii=False))
    for table in tables if not as_json else ():
        if table is not None:
            Console().print(table)
    write_report(records, page, command="steppe " + shlex.join(sys.argv[1:]), metric=metric or metric_of(records))
    typer.echo(f"wrote {page}", err=as_json)
