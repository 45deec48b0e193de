"""`steppe paper collect`: keep the results of finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ....support.errors import UserError
from ...paper_options import Kept, Name, Scale


def command(
    folder: Annotated[Path, typer.Argument(help="Folder of records: --out of `steppe paper run`.")],
    name: Name,
    scale: Scale = "full",
    results: Kept = None,
) -> None:
    """Add the finished runs of a folder to the kept results: one line of JSON per run, each run once."""
    from ....papers.experiment import check_scale
    from ....papers.registry import find
    from ....papers.store import collect, results_folder

    experiment = find(name)
    if check_scale(scale) == "smoke" and results is None:
        raise UserError("smoke runs are not worth keeping; to collect them anyway, name a folder with --results")
    into = results or results_folder()
    total, new = collect(folder, experiment, scale, into)
    path = into / f"{experiment.slug}.jsonl"
    typer.echo(f"{path}: {total} runs, {new} of them new" if total else f"no finished runs of {name} in {folder}")
