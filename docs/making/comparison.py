"""A comparison that `steppe compare` made: its table on the page about choosing a method, and its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import DOCS

RECORDS = DOCS / "assets" / "equal_cost.json"  # a list of records
REPORT = "assets/compare/report.html"  # where the report is in the site


def report(path: Path = RECORDS) -> str:
    """The report of the records, as `steppe report` writes it."""
    from steppe.lab.report.page import report

    return report(json.loads(path.read_text("utf-8")), command="steppe compare")


def equal_cost(path: Path = RECORDS) -> str:
    """What methods gain over the base trained as long as they cost; without records, how to make them."""
    if not path.exists():
        return (
            "There are no published records yet. Make your own, on your problem:\n\n"
            "```bash\nsteppe compare --data cifar-10 --model cnn-5 --methods sam,gsam,asam --seeds 5\n```\n"
        )
    from steppe.lab.statistics import summarise

    rows = [row for row in summarise(json.loads(path.read_text("utf-8"))) if row.mean is not None]
    lines = []
    for problem in dict.fromkeys(row.problem for row in rows):
        lines += [
            f"### {problem}",
            "",
            "| | test accuracy | gradients | at equal cost | seeds |",
            "|---|---|---|---|---|",
        ]
        for row in rows:
            if row.problem == problem:
                gain = _gain(row.equal_cost) if row.equal_cost else ""
                cost = "" if row.cost is None else f"{row.cost:.3g} x"
                lines.append(f"| {row.label} | {_percent(row.mean)} | {cost} | {gain} | {row.n} |")
        lines.append("")
    lines += [
        f"Means with 95 % intervals, from the records in `docs/assets/{path.name}`. *At equal cost*: percentage points",
        "over the base optimizer trained for as many gradients as the method takes, paired by seed.",
    ]
    return "\n".join(lines) + "\n"


def _percent(mean: Any) -> str:
    half = "" if mean.low is None else f" ± {100 * (mean.high - mean.value):.2f}"
    return f"{100 * mean.value:.2f}{half} %"


def _gain(difference: Any) -> str:
    mean = difference.mean
    half = "" if mean.low is None else f" ± {100 * (mean.high - mean.value):.2f}"
    return f"{100 * mean.value:+.2f}{half} ({difference.verdict})"
