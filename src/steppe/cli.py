"""The command line: `steppe --help`."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from . import __version__
from .curvature.command import register as register_measuring
from .doctor import register as register_doctor
from .lab.command import register as register_lab
from .lab.options import OneLine, OneLineGroup
from .method import Method
from .methods import find
from .papers.command import register as register_papers

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
        typer.echo(f"{cls.__name__}({_defaults(cls)})\n\n{inspect.getdoc(cls)}")
    elif markdown:
        typer.echo(markdown_table())
    else:
        table = Table(*HEADER, caption="looks: gradient evaluations a step; copies: extra model copies at the peak")
        for row in rows():
            table.add_row(*row)
        Console().print(table)


def known_methods() -> list[type[Method]]:
    """The methods of the package, by name."""
    own = [cls for cls in Method.registry.values() if cls.__module__.startswith("steppe.methods.")]
    return sorted(own, key=lambda cls: cls.__name__)


def with_defaults(cls: type[Method]) -> Method:
    """The method with its defaults, or, if it has none for something, the first setting it declares."""
    try:
        return cls()
    except TypeError:
        return cls.variants()[0]


def _defaults(cls: type[Method]) -> str:
    def show(value: Any) -> str:
        return getattr(value, "__name__", None) or ("adam(1e-3)" if "Adam" in repr(value) else str(value))

    return ", ".join(f.name if f.default is MISSING else f"{f.name}={show(f.default)}" for f in fields(cls))


def rows() -> list[tuple[str, ...]]:
    """One row a method: name, paper, looks, copies, defaults, advice."""
    described = [(cls, with_defaults(cls)) for cls in known_methods()]
    return [(c.__name__, c.paper, f"{m.cost:.4g}", str(m.copies), _defaults(c), c.advice) for c, m in described]


HEADER = ("method", "paper", "looks", "copies", "settings", "advice")


def markdown_table() -> str:
    """The table of methods, for the documentation."""
    lines = [HEADER, tuple("---" for _ in HEADER), *rows()]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
