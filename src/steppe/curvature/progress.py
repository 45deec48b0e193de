"""A progress bar for measurements that take longer than a few seconds. Off without rich or without a terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

PATIENCE = 3.0  # seconds before a bar appears


class Progress:
    """``with Progress("trace", show) as bar: bar(0.25, "error 3%")``."""

    def __init__(self, title: str, show: bool | None = None):
        self._title = title
        self._show = sys.stderr.isatty() if show is None else show
        self._begun = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        return self

    def __call__(self, share: float, note: str = "") -> None:
        """Report the share that is done, from 0 to 1, and a note."""
        if not self._show:
            return
        if self._bar is None:
            if time.monotonic() - self._begun < PATIENCE:
                return
            self._bar, self._task = _rich_bar(self._title)
            if self._bar is None:
                self._show = False
                return
        self._bar.update(self._task, completed=min(max(share, 0.0), 1.0), note=note)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _rich_bar(title: str) -> tuple[Any, Any]:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None, None
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn()
    bar = Bar(*columns, console=Console(stderr=True), transient=True)
    bar.start()
    return bar, bar.add_task(title, total=1.0, note="")
