"""`steppe methods`: the methods of the registry."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from ..errors import user_mistakes
from ..tables import show_methods


def command(
    name: Annotated[str | None, typer.Argument(help="A method: print its settings, equations and paper.")] = None,
    markdown: Annotated[bool, typer.Option(help="Print the list as a Markdown table.")] = False,
) -> None:
    """List the methods: what they cost, what they store, when to use them."""
    from ...methods.registry import defaults_text, find

    if name is not None:
        with user_mistakes(ValueError):
            method = find(name)
        typer.echo(f"{method.__name__}({defaults_text(method)})\n\n{inspect.getdoc(method)}")
    elif markdown:
        typer.echo(_markdown_table())
    else:
        show_methods()


def _markdown_table() -> str:
    from ...methods.registry import HEADER, table_rows

    lines = [HEADER, tuple("---" for _ in HEADER), *table_rows()]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
