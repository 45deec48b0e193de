"""Progress of runs: bars on a terminal; elsewhere a line when a run ends, and once a minute in between."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..lab.runner.estimate import Remaining
from ..lab.runner.jobs import Job
from ..lab.runner.local import News
from ..lab.statistics import summarise

if TYPE_CHECKING:
    from rich.table import Table


PAUSE = 60.0  # seconds between two lines of a long run


class Display:
    """Shows the progress of runs on stderr: ``with Display(jobs) as show: perform(jobs, ..., tell=show)``."""

    def __init__(self, jobs: Sequence[Job], quiet: bool = False):
        from rich.console import Console

        self._jobs = {job.recipe.key: job for job in jobs}
        self._remaining = Remaining(jobs)
        self._ended: set[str] = set()
        self._console = Console(stderr=True)
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        self._quiet, self._begun = quiet, time.monotonic()
        self.before = 0  # number of runs that an earlier command had finished
        self._last_line = self._begun

    def __enter__(self) -> Display:
        if self._console.is_terminal and not self._quiet:
            from rich.progress import BarColumn, Progress, TextColumn

            columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}")
            self._bars = Progress(*columns, console=self._console, transient=True)
            self._bars.start()
            runs = f"{len(self._jobs)} runs"
            self._whole = self._bars.add_task(runs, total=self._remaining.whole, note="starting")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()
        if self.before and not self._quiet:
            print(f"{self.before} of {len(self._jobs)} runs were already done", file=sys.stderr)

    def __call__(self, news: News) -> None:
        """Show the progress of a run."""
        job = self._jobs[news.key]
        if news.key in self._ended:
            return
        self._remaining.hear(news)
        if news.ended:
            self._ended.add(news.key)
        self.before += news.before
        if self._bars is not None:
            self._update_bars(job, news)
        elif not (news.before or self._quiet):
            self._print_line(job, news)

    def _print_line(self, job: Job, news: News) -> None:
        """Print a line if a run has ended, or if nothing was printed for a while."""
        now = time.monotonic()
        if not news.ended and now - self._last_line < PAUSE:
            return
        self._last_line, run = now, f"{job.name}, seed {job.recipe.seed}"
        what = news.result if news.ended else f"epoch {news.epoch} of {job.recipe.epochs}"
        count = f"{len(self._ended)}/{len(self._jobs)}  {now - self._begun:.0f} s"
        print(f"{count}  {run}: {what}{self._remaining}", file=sys.stderr, flush=True)

    def _update_bars(self, job: Job, news: News) -> None:
        if news.ended:
            if news.key in self._tasks:
                self._bars.remove_task(self._tasks.pop(news.key))
        else:
            if news.key not in self._tasks:
                name = f"  {job.name}, seed {job.recipe.seed}"
                self._tasks[news.key] = self._bars.add_task(name, total=job.recipe.epochs, note="")
            note = f"epoch {news.epoch} of {job.recipe.epochs}"
            part = news.step / news.steps if news.steps else 0.0
            self._bars.update(self._tasks[news.key], completed=news.epoch + part, note=note)
        note = f"{len(self._ended)} of {len(self._jobs)} done{self._remaining}"
        self._bars.update(self._whole, completed=self._remaining.done, note=note)


_OTHERS = {
    "test loss": "test_loss",
    "top eigenvalue": "top",
    "trace": "trace",
    "sharpness": "sharpness",
    "seconds": "seconds",
}


def other_measures(records: Sequence[Any]) -> Table | None:
    """A table of test loss, curvature and time, as means over seeds; None if no run has ended."""
    from rich.table import Table
    from rich.text import Text

    rows = summarise(records)
    shown = {name: metric for name, metric in _OTHERS.items() if any(row.group.mean(metric) for row in rows)}
    if not shown:
        return None
    table = Table("method", box=None, title="means over seeds", title_justify="left", pad_edge=False)
    for name in shown:
        table.add_column(name, justify="right")
    problems = list(dict.fromkeys(row.problem for row in rows))
    for problem in problems:
        if len(problems) > 1:
            table.add_row(Text(problem, style="bold"))
        for row in (row for row in rows if row.problem == problem):
            means = [row.group.mean(metric) for metric in shown.values()]
            table.add_row(Text(row.label), *("-" if mean is None else f"{mean.value:.3g}" for mean in means))
    return table
