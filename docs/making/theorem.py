"""GAM's two forms: a section of its page. All numbers are from the kept results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import figures

TITLE = "## What the paper says, what is printed, what follows"
ANSWER = """\
**The theorem and the printed algorithm are two methods; `GAM()` is the printed one.** Keep its defaults to repeat the
paper's numbers, and T at 2: with more directions it loses trainings. For a radius that settles, use what the theorem
says, with a batch that is held out of training:
`GAM(T=1, reference="weights", discrepancy="cosine", directions="unit", period=10)`."""
HEAD = ("", "base", "GAM, as printed", "as its theorem says, T = 1", "SAM, ρ chosen on held-out data")
SLOW = """\
The theorem's form is slow with these settings: Adam at 1e-3 moves γ by about 0.001 in an update, and only every tenth
step updates it. In short training γ stays near zero, and the result near the base's."""
WHY = ("**What the paper says", "**What follows")  # beginnings of the paragraphs of the docstring that say why
NOT_RUN = "not run"


def page_text(text: str) -> str:
    """The docstring with the section at its end, and in it what the docstring says on the two forms."""
    paragraphs = text.split("\n\n")
    why = [one for one in paragraphs if one.startswith(WHY)]
    return "\n\n".join([*(one for one in paragraphs if one not in why), "\n".join(section(why))])


def section(why: Sequence[str] = (), results: Any = None) -> list[str]:
    """The lines of the section: the answer, why, and what our runs show."""
    results = figures.paper_results() if results is None else results
    rows = ["| " + " | ".join(row) + " |" for row in (HEAD, *_of_paper(results), *_of_map(results))]
    said = "Test accuracy in %, mean ± standard error (n); the first rows are [S0's Table 1](../papers/s0.md):"
    table = [rows[0], "|---" * len(HEAD) + "|", *rows[1:]]
    reasons = [line for one in why for line in (one, "")]
    runs = ["Our runs:", "", *findings(results), "", said, "", *table]
    return [TITLE, "", ANSWER, "", *reasons, *runs, "", SLOW, ""]


def findings(results: Any) -> list[str]:
    """How many trainings each form lost, and the comparisons, in words."""
    from steppe.papers.definitions.s0_theorem import STABILITY, TRENDS, losses
    from steppe.papers.registry import experiments

    known = experiments()
    lines = []
    for words, row in (("as printed", "gam"), ("as its theorem says, T = 1", "T-1")):
        gone = losses(known[STABILITY], results, row)
        grew, of = growing(known[STABILITY], results, row)
        lost = f"{gone}; γ₁ still grew in the last quarter of {grew} of {of} finished ones" if gone.total else NOT_RUN
        lines.append(f"- Trainings with GAM {words}: {lost}.")
    for trend in TRENDS:
        verdict, found = trend.judge(known, results)
        lines.append(f"- {trend.text}: {found.short(verdict)}.")
    return lines


def growing(experiment: Any, results: Any, row: str) -> tuple[int, int]:
    """In how many finished trainings of a row γ₁ is longer at the end than after three quarters, and of how many."""
    from steppe.papers.definitions.s0_theorem import HERE

    runs = [run for column in HERE for run in results.of(experiment, f"{column}/{row}").done]
    curves = [[abs(gamma[0]) for gamma in run["metrics"]["gamma"]] for run in runs if "gamma" in run["metrics"]]
    return sum(curve[-1] > curve[3 * len(curve) // 4 - 1] for curve in curves), len(curves)


def _of_paper(results: Any) -> list[tuple[str, ...]]:
    """The columns of S0's Table 1."""
    from steppe.papers.definitions.s0_theorem import HERE, NAME
    from steppe.papers.registry import find

    table, rows = find(NAME), []
    cells = {cell.name: cell for cell in table.cells}
    for column in HERE:
        shown = []
        for name in ("sgd", "gam", "gam-theorem", "sam"):
            cell = cells.get(f"{column}/{name}")
            group = results.of(table, cell) if cell else None
            shown.append(_number(group, "test_accuracy", cell.note) if cell else NOT_RUN)
        rows.append((column, *shown))
    return rows


def _of_map(results: Any) -> list[tuple[str, ...]]:
    """The regimes of the map in which both forms were run."""
    from steppe.papers.frontier_table import tables

    rows = []
    for table in tables(results):
        found = [table.row(name) for name in ("base-1", "gam", "gam-theorem", "sam")]
        if table.regime.metric == "test_accuracy" and found[1] and found[2]:
            notes = ("", "", "", found[3].label.removeprefix("SAM, ") if found[3] else "")
            groups = [row.group if row else None for row in found]
            shown = [_number(group, table.regime.metric, note) for group, note in zip(groups, notes, strict=True)]
            rows.append((table.regime.title, *shown))
    return rows


def _number(group: Any, metric: str, note: str = "") -> str:
    mean = group.mean(metric) if group else None
    gone = f"{len(group.diverged)} diverged" if group and group.diverged else ""
    error = "" if mean is None or mean.error is None else f" ± {100 * mean.error:.1f}"
    ours = "" if mean is None else f"{100 * mean.value:.1f}{error} ({mean.n})"
    return ", ".join(filter(None, (ours, gone or ("" if ours else NOT_RUN), note)))
