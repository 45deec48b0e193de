"""`steppe paper figures`: the papers' figures, from kept results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ....support.errors import require, unknown
from ...paper_options import Kept, kept_results


def command(
    out: Annotated[Path, typer.Argument(help="Folder for the figures.")] = Path("figures"),
    names: Annotated[
        list[str] | None, typer.Option("--name", help="Only this figure, such as s0/fig2. Repeatable.")
    ] = None,
    results: Kept = None,
) -> None:
    """Draw the figures from kept results. A figure without results is reported as not run."""
    from ....papers.figures import FIGURES, draw
    from ....papers.registry import find

    wanted = [find(name).name for name in names or ()] or list(FIGURES)
    for name in wanted:
        if name not in FIGURES:
            raise unknown("figure", name, FIGURES)
    kept = kept_results(results)
    require("matplotlib", "matplotlib", "drawing figures")
    for name in wanted:
        path = draw(name, kept, out)
        typer.echo(f"{name}: {path or 'not run'}")
