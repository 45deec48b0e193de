"""Starts the command line, or says what it needs."""

import sys


def main() -> None:
    """Entry point of the `steppe` command."""
    try:
        from .cli import app
    except ImportError as error:
        sys.exit(f'the steppe command needs {error.name}: pip install "steppe[cli]"')
    app()


if __name__ == "__main__":
    main()
