"""`steppe paper list`: the papers' tables and figures, and which of them have been run."""

from __future__ import annotations

from typing import Annotated

import typer

from ...paper_options import Kept, kept_results
from ...tables import show_experiments, show_table


def command(
    name: Annotated[str | None, typer.Argument(help="A table or figure, such as s0/table1: list its cells.")] = None,
    results: Kept = None,
) -> None:
    """List the papers' tables and figures, or the cells of one, and which of them have been run."""
    from ....papers.registry import find

    kept = kept_results(results)
    if name is None:
        show_experiments(kept)
        return
    experiment, rows = find(name), []
    for cell in experiment.cells:
        recipe = cell.recipe
        what = ("-",) * 3 if recipe is None else (recipe.data.split(":")[-1], recipe.model, str(recipe.epochs))
        method = cell.label if recipe is None else recipe.method
        rows.append((cell.name, method, *what, str(len(kept.best(experiment, cell)[1].records))))
    show_table(("cell", "method", "data", "model", "epochs", "runs"), rows)
