"""`steppe list`: what can be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...support.errors import UserError, unknown
from ..tables import show_data, show_experiments, show_methods, show_models
from . import methods


def command(
    what: Annotated[str, typer.Argument(help="What to list: data, models, methods or recipes.")],
    name: Annotated[
        str | None, typer.Argument(help="With `methods`: one method to describe, as `steppe methods NAME` does.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the data sets. Default: $STEPPE_DATA, else ~/.cache/steppe.")
    ] = None,
) -> None:
    """List what can be trained: data sets, models, methods, and the papers' tables as recipes."""
    from ...papers.store import Results

    shown = {
        "data": lambda: show_data(data_dir),
        "models": show_models,
        "methods": show_methods,
        "recipes": lambda: show_experiments(Results.read()),
    }
    if what not in shown:
        raise unknown("list of", what, shown)
    if name is not None:
        if what != "methods":
            raise UserError(f"steppe list {what} takes no name")
        methods.command(name)
        return
    shown[what]()
