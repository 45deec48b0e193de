"""How commands say what went wrong: one line that begins with "steppe:", and never a traceback for a user's mistake."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..lab.records import RecordWarning
from ..support.errors import UserError, one_line, unknown

GO_ON = "Run the same command again to go on."


@contextmanager
def _one_line_for(ctx: Any) -> Iterator[None]:
    """One line for a wrong use, in place of a box."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
            raise  # not one of typer's own, or its help
        message = one_line(error.format_message())  # pyright: ignore[reportAttributeAccessIssue]
        typer.echo(f"steppe: {message} (see {ctx.command_path} --help)", err=True)
        raise typer.Exit(2) from None


class OneLine(TyperCommand):
    """A command whose usage errors are one line, like all its other errors."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """What typer does, in fewer words."""
        with _one_line_for(ctx):
            return super().parse_args(ctx, args)


class OneLineGroup(TyperGroup):
    """Commands by name; a wrong name gets one line too, with the nearest right one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """What typer does, if there is such a command."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known:
            message = one_line(unknown("command", name, known))
            typer.echo(f"steppe: {message} (see {ctx.command_path} --help)", err=True)
            raise typer.Exit(2)
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """What typer does, in fewer words."""
        with _one_line_for(ctx):
            return super().parse_args(ctx, args)


def os_error(error: OSError) -> str:
    """What went wrong with a file, in one line."""
    where = f"{error.filename}: " if error.filename else ""
    return one_line(f"{where}{error.strerror or error}")


@contextmanager
def helpful(again: str = "") -> Iterator[None]:
    """One line in place of a traceback for everything that the user can put right."""
    import torch

    usual = warnings.showwarning

    def show(message: Any, category: Any, *where: Any, **more: Any) -> None:
        if issubclass(category, RecordWarning):
            typer.echo(f"steppe: {one_line(message)}", err=True)
        else:
            usual(message, category, *where, **more)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", RecordWarning)
            warnings.showwarning = show
            yield
    except UserError as error:
        typer.echo(f"steppe: {one_line(error)}", err=True)
        raise typer.Exit(2) from None
    except BrokenPipeError:  # the reader of our output has had enough: typer knows
        raise
    except OSError as error:
        typer.echo(f"steppe: {os_error(error)}", err=True)
        raise typer.Exit(2) from None
    except torch.OutOfMemoryError as error:
        typer.echo(f"steppe: out of memory ({one_line(error).split('.')[0]}): try a smaller --batch", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo(f"steppe: stopped; nothing is lost. {again}".rstrip(), err=True)
        raise typer.Exit(130) from None
