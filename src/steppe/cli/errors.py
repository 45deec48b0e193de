"""How commands report errors: one line that begins with "steppe:", and no traceback for what the user can correct.

Commands raise `UserError`; `helpful` is around every command (see app.py) and prints it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..lab.records import RecordWarning
from ..support.errors import UserError, one_line, unknown
from ..support.files import DISK_FULL, disk_is_full


def say(text: object) -> None:
    """Print one line on stderr, prefixed with "steppe:"."""
    typer.echo(f"steppe: {one_line(text)}", err=True)


@contextmanager
def _one_line_for(ctx: Any) -> Iterator[None]:
    """Print a usage error as one line, in place of typer's box."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
            raise  # not a usage error of typer, or a request for help
        say(f"{error.format_message()} (see {ctx.command_path} --help)")  # pyright: ignore[reportAttributeAccessIssue]
        raise typer.Exit(2) from None


class OneLine(TyperCommand):
    """A command whose usage errors are printed as one line, like all its other errors."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments like typer, but print an error as one line."""
        with _one_line_for(ctx):
            return super().parse_args(ctx, args)


class OneLineGroup(TyperGroup):
    """A group of commands. A wrong name is reported in one line, with the most similar names."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of this name; an unknown name ends the program with one line."""
        known = self.list_commands(ctx)
        if args[0] not in known:
            say(f"{unknown('command', args[0], known)} (see {ctx.command_path} --help)")
            raise typer.Exit(2)
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments like typer, but print an error as one line."""
        with _one_line_for(ctx):
            return super().parse_args(ctx, args)


@contextmanager
def helpful() -> Iterator[None]:
    """Print one line in place of a traceback for every error that the user can correct; warnings about records too."""
    import torch

    usual = warnings.showwarning

    def show(message: Any, category: Any, *where: Any, **more: Any) -> None:
        if issubclass(category, RecordWarning):
            say(message)
        else:
            usual(message, category, *where, **more)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", RecordWarning)
            warnings.showwarning = show
            yield
    except UserError as error:
        say(error)
        raise typer.Exit(2) from None
    except BrokenPipeError:  # the reader of our output has closed the pipe: typer exits quietly
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        say(f"{where}{DISK_FULL if disk_is_full(error) else error.strerror or error}")
        raise typer.Exit(2) from None
    except torch.OutOfMemoryError as error:
        say(
            f"out of memory ({one_line(error).split('.')[0]}): use a smaller batch, fewer samples or fewer runs at once"
        )
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        say("stopped")
        raise typer.Exit(130) from None


@contextmanager
def resumable(note: str = "Run the same command again to resume.") -> Iterator[None]:
    """For work that saves its progress: after Ctrl-C, print how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"stopped; nothing is lost. {note}")
        raise typer.Exit(130) from None


@contextmanager
def user_mistakes(*kinds: type[Exception]) -> Iterator[None]:
    """For library calls with values from the user: exceptions of these kinds become a `UserError`."""
    try:
        yield
    except kinds as error:
        raise UserError(one_line(error)) from error
