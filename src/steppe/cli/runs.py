"""What the training commands do with their runs: train them with a progress display, and report what came out."""

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
    """Where to train: None here, QUEUE for `steppe work`, else the address of a Ray cluster."""
    if on not in ("local", "ray", QUEUE):
        raise UserError(f"--on is local or ray or queue, not {on!r}")
    return {"local": None, "ray": address, QUEUE: QUEUE}[on]


def leave_to_others(planned: list[Any], where: Any) -> None:
    """Queue the runs in the folder, say how they are trained, and end the command."""
    from ..lab.runner.shared_folder import queue_up

    count = queue_up(planned, where)
    if count == 0:
        return
    typer.echo(f"{count} of {len(planned)} runs wait in {where.folder}")
    typer.echo(f"train them, on as many machines as you like: steppe work {where.folder}")
    typer.echo(f"then: steppe report {where.folder}")
    raise typer.Exit


def train_all(planned: list[Any], where: Any, workers: int, address: str | None = None) -> list[Any]:
    """The records of the planned runs, trained here or at the address of a Ray cluster ("": a new one).

    The address "queue" leaves them to `steppe work`: the command ends here.
    """
    from ..lab.runner.estimate import announcement
    from ..lab.runner.local import notes, perform
    from ..lab.runner.ray import perform_on_ray
    from .progress import Display

    for note in notes(planned, where):
        say(note)
    if address == QUEUE:
        leave_to_others(planned, where)
    elif address is None and (said := announcement(planned, where, workers)):
        typer.echo(said, err=True)
    with Display(planned) as display:
        if address is not None:
            return perform_on_ray(planned, where, address, workers, display)
        return perform(planned, where, workers, display)


def report_runs(records: list[Any], page: Path, *tables: Any, metric: str = "", as_json: bool = False) -> None:
    """Print the tables, or JSON in their place, and write the page."""
    from rich.console import Console

    from ..lab.records import finite, metric_of
    from ..lab.report import write_report

    if as_json:
        from ..lab.comparison_result import rows_as_dicts
        from ..lab.report import headline

        by = metric or metric_of(records)
        conclusion, *cautions = headline(records, by).plain.splitlines()
        said: dict[str, Any] = {"page": str(page), "conclusion": conclusion, "cautions": cautions}
        said["methods"] = rows_as_dicts(records, by)
        typer.echo(json.dumps(finite(said), indent=1, ensure_ascii=False))
    for table in tables if not as_json else ():
        if table is not None:
            Console().print(table)
    write_report(records, page, command="steppe " + shlex.join(sys.argv[1:]), metric=metric or metric_of(records))
    typer.echo(f"wrote {page}", err=as_json)
