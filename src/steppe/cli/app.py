"""The command line, `steppe --help`: assembled from the files of `commands`.

A file of `commands` is a command of the same name: its function `command`. A folder there is a group of commands, such
as `steppe paper`. A new command is a new file, and nothing else has to know.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Annotated

import typer

from .. import __version__
from . import commands
from .errors import OneLine, OneLineGroup, helpful
from .prepare import import_from_current_folder

FIRST = ("compare", "train", "sweep", "report", "work", "measure", "landscape", "methods", "list")

app = typer.Typer(cls=OneLineGroup, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Train with sharpness-aware optimizers, and measure how flat the place is where training ended."""
    import_from_current_folder()
    if version:
        typer.echo(__version__)
        raise typer.Exit


def assemble(group: typer.Typer, package: ModuleType) -> None:
    """Add the commands of a package to a group: those of `FIRST`, then the others in the order of their names."""
    first = {name: place for place, name in enumerate(FIRST)}
    found_here = pkgutil.iter_modules(package.__path__)
    for found in sorted(found_here, key=lambda found: (first.get(found.name, len(first)), found.name)):
        module = importlib.import_module(f"{package.__name__}.{found.name}")
        if found.ispkg:
            inner = typer.Typer(cls=OneLineGroup, no_args_is_help=True, add_completion=False)
            assemble(inner, module)
            group.add_typer(inner, name=found.name, help=module.__doc__)
        else:
            group.command(found.name, cls=OneLine)(helpful()(module.command))


assemble(app, commands)
