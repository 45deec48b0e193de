"""Starts the `steppe` command, or says which package it needs."""

import io
import sys


def main() -> None:
    """Entry point of the `steppe` command."""
    try:
        from .cli.app import app
    except ImportError as error:
        sys.exit(f'the steppe command needs {error.name}: pip install "steppe[cli]"')
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show λ shows a question mark
    app()


if __name__ == "__main__":
    main()
