"""The arguments that the commands of `steppe paper` share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..support.errors import UserError

if TYPE_CHECKING:
    from ..papers.store import Results

Name = Annotated[str, typer.Argument(help="Table or figure, such as s0/table1; `steppe paper list` lists all.")]
Scale = Annotated[
    str,
    typer.Option(help="full: as in the paper; small: fewer epochs; smoke: one or two steps, to check that it runs."),
]
Kept = Annotated[
    Path | None,
    typer.Option(help="Folder of kept results. Default: results/ of the source checkout, else of the current folder."),
]


def kept_results(folder: Path | None) -> Results:
    """The results in a folder; by default those of the project."""
    from ..papers.store import Results

    if folder is not None and not folder.is_dir():
        raise UserError(f"folder {folder} does not exist")
    found = Results.read(folder)
    if not found.by_file and folder is None:
        typer.echo(
            "no kept results found: ours are in results/ of the source checkout; name that folder with --results",
            err=True,
        )
    return found
