"""Our numbers beside a paper's, as rows of text for the terminal and for the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..lab.data.imagenet_sets import METRICS as OTHER_METRICS
from ..lab.report.formatting import is_share
from ..lab.statistics import Mean, summarise
from .claims import NOT_RUN, Claim, Finding, Judged, Trend, interval_text, judge
from .experiment import Cell, Experiment
from .frontier_table import tables
from .registry import claims, experiments, trends
from .store import KEPT_SCALES, Results

HEADER = ("cell", "method", "paper", "ours (95 % interval)", "n", "difference", "seconds per run", "verdict")
_METRICS = {"test_accuracy": "", "best_test_accuracy": "best epoch", **OTHER_METRICS}


@dataclass(frozen=True)
class Line:
    """One row: a claim and our result for it, or a result that the paper has no number for."""

    cell: Cell
    metric: str
    judged: Judged | None
    ours: Mean | None
    scale: str
    diverged: int
    seconds: float | None = None  # of training, per run
    uncollected: int = 0  # number of finished runs that are not collected yet

    @property
    def has_run(self) -> bool:
        """Whether anything was run for this row."""
        return self.ours is not None or self.diverged > 0

    @property
    def verdict(self) -> str:
        """The verdict on the claim; for a result without a claim, a note that the number is ours only."""
        if self.judged is not None:
            return self.judged.verdict
        return ("ours only" if self.scale == "full" else "ours only, smaller scale") if self.has_run else NOT_RUN

    def texts(self) -> tuple[str, ...]:
        """The cells of the row, under `HEADER`."""
        claim = self.judged.claim if self.judged else None
        name = self.cell.name + _of(self.metric)
        apart = self.judged.apart if self.judged else None
        note = self.judged.note if self.judged else f"{self.diverged} diverged" if self.diverged else ""
        if self.cell.stands_for:
            note = ", ".join(filter(None, (f"in place of {self.cell.stands_for}", note)))
        scale = f"{self.scale} scale" if self.scale not in ("", "full") else ""
        new = f"{self.uncollected} not collected" if self.uncollected else ""
        shown = ", ".join(filter(None, (note, scale, new)))
        verdict = self.verdict + (f" ({shown})" if shown else "")
        return (
            name, self.cell.label, "" if claim is None else paper_number(claim), our_number(self.ours, self.metric),
            str(self.ours.n) if self.ours else "0", "" if apart is None else f"{apart:+.1f} s.e.",
            "" if self.seconds is None else f"{self.seconds:.3g}", verdict,
        )  # fmt: skip


def _of(metric: str) -> str:
    """The name of a metric in parentheses; empty for the accuracy on the test set."""
    name = _METRICS.get(metric, metric)
    return f" ({name})" if name else ""


def paper_number(claim: Claim) -> str:
    """The paper's number with its spread."""
    factor = 100 if is_share(claim.metric) else 1
    text = f"{factor * claim.value:.2f}"
    return text if claim.error is None else f"{text} ± {factor * claim.error:.2f}"


def our_number(mean: Mean | None, metric: str) -> str:
    """Our number with its interval, or with a note that there is none."""
    if mean is None:
        return NOT_RUN
    factor = 100 if is_share(metric) else 1
    number = f"{factor * mean.value:.2f}" if is_share(metric) else f"{mean.value:.4g}"
    if mean.low is None or mean.high is None:
        return f"{number} (no interval)"
    if is_share(metric):  # a t interval can end below 0 or above 1
        ends = [f"{factor * min(max(end, 0.0), 1.0):.2f}" for end in (mean.low, mean.high)]
    else:
        ends = [f"{end:.4g}" for end in (mean.low, mean.high)]
    return f"{number} ({' to '.join(ends)})"


def lines(experiment: Experiment, results: Results, scale: str | None = None) -> list[Line]:
    """A row for every claim about the experiment, and for every other trained cell. Computed cells have only trends."""
    claimed: dict[str, list[Claim]] = {}
    for claim in claims():
        if claim.experiment == experiment.name:
            claimed.setdefault(claim.cell, []).append(claim)
    found = []
    for cell in (cell for cell in experiment.cells if cell.recipe is not None):
        best, group = results.best(experiment, cell) if scale is None else (scale, results.of(experiment, cell, scale))
        time = group.mean("seconds")
        rest: Any = (
            len(group.diverged),
            None if time is None else time.value,
            sum("uncollected" in r for r in group.records),
        )
        mine = claimed.get(cell.name, ()) if scale is None else ()
        for claim in mine:
            judged = judge(claim, experiments(), results)
            found.append(Line(cell, claim.metric, judged, judged.ours, judged.scale, *rest))
        beyond = [metric for metric in OTHER_METRICS if group.mean(metric)]
        there, known = best if group.records else "", {claim.metric for claim in mine}
        for metric in beyond if mine else ("test_accuracy", *beyond):
            if metric not in known:
                found.append(Line(cell, metric, None, group.mean(metric), there, *rest))
    return found


def findings(experiment: Experiment, results: Results) -> list[tuple[Trend, str, Finding]]:
    """The paper's statements about this experiment, with verdicts."""
    mine = [trend for trend in trends() if trend.experiment == experiment.name]
    return [(trend, *trend.judge(experiments(), results)) for trend in mine]


def print_experiment(experiment: Experiment, results: Results, scale: str | None = None) -> None:
    """Print numbers, trends and choices of an experiment to the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)  # in a file or a pipe, lines may be longer
    caption = (
        "difference: ours minus the paper's, in combined standard errors √(se² + se²); within 2 counts as reproduced"
    )
    table = Table(
        title=f"{experiment.name} · {experiment.title}", caption=caption, title_justify="left", caption_justify="left",
        box=SIMPLE_HEAD, padding=(0, 1),
    )  # fmt: skip
    for name in HEADER:
        if name != "method":  # the cell's name has it
            table.add_column(name, overflow="fold", no_wrap=name.startswith(("cell", "ours")))
    all_lines = lines(experiment, results, scale)
    run = [line for line in all_lines if line.has_run]
    shown = run or [line for line in all_lines if line.judged is not None]  # nothing was run: show the paper's numbers
    for line in shown:
        cell, _, *rest = line.texts()
        table.add_row(cell, *rest)
    if shown:
        console.print(table)
    grid = matrix(all_lines, experiment.rows) if experiment.rows else []  # else the cells' names are table enough
    for title, more in (
        ("test accuracy in %, ± standard error (n)", grid),
        ("against the best base at no more cost (simultaneous intervals)", fair(experiment, results, scale)),
    ):
        if more:
            console.print(_as_table(title, more))
    missing = list(dict.fromkeys(line.cell.name for line in all_lines if not line.has_run))
    at = [scale] if scale else [*KEPT_SCALES]
    if not shown and not any(results.of(experiment, cell, one).records for cell in experiment.cells for one in at):
        where = f" at {scale} scale" if scale else ""
        console.print(f"{experiment.name} · {experiment.title}: {NOT_RUN}{where}")
    elif run and missing:
        columns = dict.fromkeys("/".join(name.split("/")[:-1]) or name for name in missing)
        console.print(f"{NOT_RUN}: {len(missing)} more cells: {', '.join(columns)}", soft_wrap=True)
    for trend, verdict, found in findings(experiment, results):
        if scale in (None, found.scale):
            console.print(f"{trend.text}: {found.words(verdict)}", soft_wrap=True)
    for line in _to_collect(experiment, results, at):
        console.print(line, soft_wrap=True)
    for choice in experiment.choices:
        console.print(f"note: {choice}", soft_wrap=True)


def _as_table(title: str, rows: list[tuple[str, ...]]) -> Any:
    """Rows of text, the head first, for the terminal."""
    from rich.table import Table

    table = Table(*rows[0], title=title, title_justify="left")
    for row in rows[1:]:
        table.add_row(*row)
    return table


def _to_collect(experiment: Experiment, results: Results, scales: Sequence[str]) -> list[str]:
    """The commands that collect the finished runs that are not collected yet."""
    found: dict[tuple[str, str], set[str]] = {}
    for scale in scales:
        for cell in experiment.cells:
            for record in results.of(experiment, cell, scale).records:
                if "uncollected" in record:
                    found.setdefault((record["uncollected"], scale), set()).add(record["key"])
    return [
        f"{'1 run is' if len(keys) == 1 else f'{len(keys)} runs are'} not collected yet: "
        f"steppe paper collect {folder} {experiment.name}" + (f" --scale {scale}" if scale != "full" else "")
        for (folder, scale), keys in found.items()
    ]


def overview(results: Results) -> list[tuple[str, str, int, int, str]]:
    """Name, title, cells, runs and scale of every experiment."""
    rows: list[Any] = []
    for experiment in experiments().values():
        groups = [results.best(experiment, cell) for cell in experiment.cells]
        kept = sum(len(group.records) for _, group in groups)
        run = sum(1 for _, group in groups if group.records)
        scale = results.scale_of(experiment)
        state = f"{kept} runs, {run} of {len(groups)} cells, {scale} scale" if kept else NOT_RUN
        rows.append((experiment.name, experiment.title, len(groups), kept, state))
    return rows


# For the page


def matrix(shown: list[Line], rows: Sequence[tuple[str, str]] = ()) -> list[tuple[str, ...]]:
    """A table with methods as rows, as papers print it: ours ± standard error (n) / the paper's number.

    The head of a column says whether it was run at a smaller scale. Columns without runs are left out. With fewer than
    two columns or rows there is no table. `rows` are those of `Experiment.rows`: these alone, each in every column.
    """
    at: dict[tuple[str, str], Line] = {}
    for line in shown:
        column, _, row = line.cell.name.rpartition("/")
        if column and (not rows or row in dict(rows)):
            at[column + _of(line.metric), row] = line
    columns = list(dict.fromkeys(column for (column, _), line in at.items() if line.has_run))
    names = dict(rows) or {row: row for _, row in at}
    if len(columns) < 2 or len(names) < 2:
        return []

    def head(column: str) -> str:
        scales = {line.scale for (at_column, _), line in at.items() if at_column == column and line.has_run}
        partly = "partly " if "full" in scales else ""
        return column + "".join(f", {partly}{scale} scale" for scale in sorted(scales - {"full"}))

    def entry(column: str, row: str) -> str:
        line = at.get((column, row))
        return _entry(line) if line is not None else NOT_RUN if rows else ""

    body = [(name, *(entry(column, row) for column in columns)) for row, name in names.items()]
    return [("", *map(head, columns)), *body]


def _entry(line: Line) -> str:
    """A number in the table."""
    paper = f" / {100 * line.judged.claim.value:.2f}" if line.judged else ""
    error = "" if line.ours is None or line.ours.error is None else f" ± {100 * line.ours.error:.2f}"
    ours = "" if line.ours is None else f"{100 * line.ours.value:.2f}{error} ({line.ours.n})"
    parts = (ours, f"{line.diverged} diverged" if line.diverged else "" if ours else NOT_RUN, line.cell.note)
    return ", ".join(filter(None, parts)) + paper


def offset(shown: list[Line]) -> str:
    """A sentence on the average difference between our numbers and the paper's; empty for fewer than three."""
    pairs = [(line.ours.value, line.judged.claim.value) for line in shown
             if line.ours and line.judged and line.judged.apart is not None and is_share(line.metric)]  # fmt: skip
    if len(pairs) < 3:
        return ""
    apart = [100 * (ours - paper) for ours, paper in pairs]
    mean = f"ours minus the paper's is {sum(apart) / len(apart):+.2f} points on average"
    return f"Over {len(pairs)} cells {mean}, from {min(apart):+.2f} to {max(apart):+.2f}."


def run_on(experiment: Experiment, results: Results) -> list[str]:
    """One line for each machine and version that results come from, with the number of runs and their time."""
    found: dict[str, dict[str, float]] = {}
    for cell in experiment.cells:
        for record in results.best(experiment, cell)[1].records:
            e = record["environment"]
            commit = f", commit {e['commit'][:8]}" if e.get("commit") else ""
            text = f"{e['device']}, torch {e['torch']}, Python {e['python']}, steppe {e['steppe']}{commit}"
            found.setdefault(text, {})[record["key"]] = record.get("final", {}).get("seconds") or 0.0
    return [
        f"{len(runs)} run{'s' if len(runs) > 1 else ''} on {text}{_minutes(sum(runs.values()))}"
        for text, runs in found.items()
    ]


def _minutes(seconds: float) -> str:
    return f": {seconds / 60:.1f} minutes" if seconds else ""


def fair(experiment: Experiment, results: Results, scale: str | None = None) -> list[tuple[str, ...]]:
    """Every method against the best base at no more than its cost, and its curvature."""
    if experiment.stops:  # its lengths and costs have rules of their own
        return frontier_rows(results)
    scale = scale or results.scale_of(experiment)
    if not scale or not any(cell.role == "equal-cost" for cell in experiment.cells):
        return []
    records = [
        {**record, "label": group.label, "role": group.role}
        for group in results.distinct(experiment, scale)
        for record in group.records
    ]
    if not records:
        return []
    measures = {"λ_max": "top", "trace": "trace", "sharpness": "sharpness"}
    table = [
        (
            "method",
            "n",
            "test accuracy, %",
            "gradients",
            "seconds",
            "minus the best base at no more cost",
            "",
            *measures,
        )
    ]
    for row in summarise(records):
        equal = row.equal_cost
        apart = "" if equal is None else f"{interval_text(equal.mean, 'test_accuracy')} against {equal.against}"
        seconds = row.seconds.value if row.seconds else None
        alone = "no base of this cost was run" if row.role == "method" else row.role
        verdict = row.verdict if row.diverged else equal.verdict if equal else alone
        table.append((
            row.label, str(row.n), our_number(row.mean, "test_accuracy") if row.mean else "",
            "" if row.cost is None else f"{row.cost:.3g}x", "" if seconds is None else f"{seconds:.3g}",
            apart, verdict, *(_with_error(row.group.mean(metric)) for metric in measures.values()),
        ))  # fmt: skip
    return table


def frontier_rows(results: Results) -> list[tuple[str, ...]]:
    """Every method of every regime against the best base at its cost."""
    rows: list[tuple[str, ...]] = []
    for table in tables(results):
        metric = table.regime.metric
        for row in table.rows:
            mean, gain = row.group.mean(metric), row.gain
            apart = ("", "", "") if gain is None else (interval_text(gain.mean, metric), gain.against, gain.verdict)
            cost, n = "" if row.cost is None else f"{row.cost:.3g}x", str(mean.n if mean else 0)
            rows.append((table.regime.name, row.label, cost, n, our_number(mean, metric), *apart))
    head = ("regime", "method", "cost", "n", "test result", "minus the best base at its cost", "that base", "")
    return [head, *rows] if rows else []


def _with_error(mean: Mean | None) -> str:
    if mean is None:
        return ""
    return f"{mean.value:.3g}" if mean.error is None else f"{mean.value:.3g} ± {mean.error:.2g}"
