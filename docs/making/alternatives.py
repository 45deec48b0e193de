"""SAM and the methods that are recommended instead of it in some situation, each with what it gained where it was run.

The columns are three regimes of the map (`extra/frontier`) and `extra/equal-cost`. A method that was run in none of
them says so.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from . import figures, frontier

NOT_MEASURED = "not measured"
ON_MAP = {
    "digits-60": "digits, 60 % wrong labels",
    "digits-clean": "digits, clean labels",
    "cifar-40": "CIFAR-10, 40 % wrong labels",
}
SHORT = "extra/equal-cost"


class Row(NamedTuple):
    """A method, when to prefer it, and its names where it was run."""

    situation: str
    method: str
    cell: str = ""  # of the map
    label: str = ""  # in extra/equal-cost
    note: str = ""


ROWS = (
    Row("The method to start with.", "SAM", "sam", "SAM"),
    Row("Twice the time is too much.", "LookSAM", "looksam"),
    Row("Twice the time is too much.", "Late", "late-sam", note="SAM in the last eighth of training"),
    Row("Twice the time is too much.", "MSAM", "msam"),
    Row("Twice the time is too much.", "Every", note="SAM on every k-th step"),
    Row("I cannot tune ρ. None of these is safe untuned.", "SAM", "sam-default", note="ρ = 0.05"),
    Row("I cannot tune ρ, and can hold out some examples.", "GapSAM", "gapsam", note="sets its own radius"),
    Row("My layers have very different scales.", "ASAM", "asam", "ASAM", "ρ about ten times SAM's"),
    Row("SAM helps, and I want to go further.", "GSAM", "gsam", "GSAM alpha=0.2"),
    Row("SAM slows training down or makes it unstable.", "GNP", "", "GNP", "mixes in the plain gradient"),
    Row("I want to set the weight of sharpness directly.", "WSAM", "", "WSAM"),
    Row("I can afford three or four looks.", "CRSAM", "crsam", "CRSAM"),
    Row("I can afford three or four looks.", "GNAMFast", "", "GNAMFast"),
    Row("I have data for an auxiliary batch.", "GAM", "gam", "GAM", "learns its perturbation; `period` saves looks"),
    Row("I have a sharpness measure of my own.", "UniversalSAM"),
)


@cache
def short() -> dict[str, Any]:
    """The rows of `extra/equal-cost` by label."""
    from steppe.lab.statistics import summarise
    from steppe.papers.registry import find

    results, experiment = figures.paper_results(), find(SHORT)
    groups = results.distinct(experiment, results.scale_of(experiment))
    records = [{**run, "label": group.label, "role": group.role} for group in groups for run in group.records]
    return {row.label: row for row in summarise(records)}


def gains(row: Row) -> list[Any]:
    """The differences to the best baseline at the method's cost, one for each column; None where it was not run."""
    tables = [frontier.table_of(name) for name in ON_MAP]
    found = [table.row(row.cell) if table and row.cell else None for table in tables]
    return [*(one and one.gain for one in found), short()[row.label].equal_cost if row.label else None]


def markdown() -> str:
    """The table, and what its columns are."""
    head = ("situation", "method", "looks", *ON_MAP.values(), "CIFAR-10, short training")
    lines = [_line(head), "|---" * len(head) + "|"]
    before = ""
    for row in ROWS:
        name = f"[{row.method}](methods/{row.method.lower()}.md)" + (f": {row.note}" if row.note else "")
        situation, before = "" if row.situation == before else row.situation, row.situation
        lines.append(_line((situation, name, _looks(row), *map(_shown, gains(row)))))
    note = (
        "Points of test accuracy, minus the best baseline at the same cost: the base trained longer, stopped early, "
        "averaged. 95 % confidence intervals, simultaneous in each column; bold ones exclude zero. First three columns "
        "(n = 10): [the map](frontier.md), with the radius that held-out data chose for SAM; ASAM takes ten times "
        "that, and MSAM, GAM and GapSAM their defaults. On CIFAR-10 that radius is 1, far above the defaults: ASAM, "
        "GSAM and CR-SAM break down there. Last column (n = 3): CNN-5, Adam, 4 epochs on a fifth of the data, nothing "
        "tuned and too short to decide, from [all methods at equal cost](papers/extra.md)."
    )
    return "\n".join([*lines, "", note])


def _looks(row: Row) -> str:
    from steppe.methods.registry import find, with_defaults

    known = {"Late": "1.1", "Every": "1 + 1/k"}  # around SAM, as the notes say
    return known.get(row.method) or f"{float(with_defaults(find(row.method)).cost):g}"


def _shown(one: Any) -> str:
    if one is None or one.mean.low is None:
        return NOT_MEASURED
    shown = frontier.points_text(one)
    return f"**{shown}**" if one.verdict in ("better", "worse") else shown


def _line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"
