"""Tables for the terminal: lists of methods, data sets, models and experiments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]], **style: Any) -> None:
    """Print a table. Text such as :smile: is not replaced by an emoji."""
    table = Table(*head, **style)
    for row in rows:
        table.add_row(*row)
    Console(emoji=False).print(table)


def show_methods() -> None:
    """Print the methods of the registry."""
    from ..methods.registry import HEADER, table_rows

    caption = "looks: gradient evaluations per step; copies: extra model copies at the peak"
    show_table(HEADER, table_rows(), caption=caption)


def show_data(folder: Path | None) -> None:
    """Print the data sets, and whether they are in the folder."""
    from ..lab.data import data_names

    rows = [(listing.name, listing.about, "yes" if listing.found else "no") for listing in data_names(folder)]
    show_table(("data", "about", "found here"), rows)


def show_models() -> None:
    """Print the models."""
    from ..lab.models import model_names

    show_table(("model", "about"), list(model_names()))


def show_experiments(results: Any) -> None:
    """Print the papers' tables and figures, and which of them have been run."""
    from ..papers.registry import paper_titles
    from ..papers.show import overview

    rows = [(name, title, str(cells), state) for name, title, cells, _, state in overview(results)]
    show_table(("name", "what", "cells", "results"), rows, caption="\n".join(paper_titles()), caption_justify="left")
