"""The command line: `steppe --help`."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .. import __version__
from ..methods.registry import HEADER, defaults_text, find, table_rows
from .doctor import register as register_doctor
from .errors import OneLine, OneLineGroup
from .lab import register as register_lab
from .measure import register as register_measuring
from .paper import register as register_papers

app = typer.Typer(cls=OneLineGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Train with sharpness-aware optimizers, and measure how flat the place is where training ended."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


register_measuring(app)
register_lab(app)
register_papers(app)
register_doctor(app)


@app.command(cls=OneLine)
def methods(
    name: Annotated[str | None, typer.Argument(help="Show one method in full.")] = None,
    markdown: Annotated[bool, typer.Option(help="Print a Markdown table.")] = False,
) -> None:
    """List the methods: what they cost, what they hold, when to use them."""
    if name is not None:
        try:
            cls = find(name)
        except ValueError as error:
            typer.echo(f"steppe: {error}", err=True)
            raise typer.Exit(2) from None
        typer.echo(f"{cls.__name__}({defaults_text(cls)})\n\n{inspect.getdoc(cls)}")
    elif markdown:
        typer.echo(markdown_table())
    else:
        table = Table(*HEADER, caption="looks: gradient evaluations a step; copies: extra model copies at the peak")
        for row in table_rows():
            table.add_row(*row)
        Console().print(table)


def markdown_table() -> str:
    """The table of methods, for the documentation."""
    lines = [HEADER, tuple("---" for _ in HEADER), *table_rows()]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
