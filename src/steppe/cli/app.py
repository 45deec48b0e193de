"""The command line, `steppe`: assembled from the files in `commands`.

Each file there defines the command of the same name by a function `command`. A folder is a group of commands, such as
`steppe paper`. To add a command, add a file.
"""

from __future__ import annotations

import importlib
import inspect
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
    """Train with sharpness-aware optimizers, compare them, and measure how flat the minimum is."""
    import_from_current_folder()
    if version:
        typer.echo(__version__)
        raise typer.Exit


def assemble(group: typer.Typer, package: ModuleType) -> None:
    """Add the commands of a package to a group: first those of `FIRST`, then the others in alphabetical order."""
    first = {name: place for place, name in enumerate(FIRST)}
    found_here = pkgutil.iter_modules(package.__path__)
    for found in sorted(found_here, key=lambda found: (first.get(found.name, len(first)), found.name)):
        module = importlib.import_module(f"{package.__name__}.{found.name}")
        if found.ispkg:
            inner = typer.Typer(cls=OneLineGroup, no_args_is_help=True, add_completion=False)
            assemble(inner, module)
            group.add_typer(inner, name=found.name, help=module.__doc__)
        else:
            text = _unwrapped(module.command.__doc__ or "")
            group.command(found.name, cls=OneLine, help=text)(helpful()(module.command))


def _unwrapped(text: str) -> str:
    """The text with each paragraph on one line, so that the help is wrapped to the width of the terminal."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(text).split("\n\n"))


assemble(app, commands)
