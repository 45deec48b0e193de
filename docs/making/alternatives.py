"""SAM and the methods that are recommended instead of it in some situation, each with what it gained where it was run.

The columns are regimes of the map (`extra/frontier`). Each method was run in two of them at least.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from . import frontier

NOT_MEASURED = "–"
ON_MAP = {
    "digits-60": "digits, 60 % wrong labels",
    "digits-clean": "digits, clean labels",
    "cifar-40": "CIFAR-10, 40 % wrong labels",
    "cifar-clean": "CIFAR-10, clean labels",
}


class Row(NamedTuple):
    """A method, when to prefer it, and its cell of the map."""

    situation: str
    method: str
    cell: str
    note: str = ""


ROWS = (
    Row("The method to start with.", "SAM", "sam"),
    Row("Twice the time is too much.", "LookSAM", "looksam"),
    Row("Twice the time is too much.", "Late", "late-sam", note="SAM in the last eighth of training"),
    Row("Twice the time is too much.", "MSAM", "msam"),
    Row("Twice the time is too much.", "Every", "every-5", note="SAM on every fifth step"),
    Row("I cannot tune ρ.", "GapSAM", "gapsam", note="sets its own, with some held-out examples"),
    Row("I cannot tune ρ.", "SAM", "sam-default", note="ρ = 0.05, which is not safe everywhere"),
    Row("My layers have very different scales.", "ASAM", "asam", "ρ about ten times SAM's"),
    Row("SAM helps, and I want to go further.", "GSAM", "gsam"),
    Row("SAM slows training down or makes it unstable.", "GNP", "gnp", "mixes in the plain gradient"),
    Row("I want to set the weight of sharpness directly.", "WSAM", "wsam"),
    Row("I can afford three or four looks.", "CRSAM", "crsam"),
    Row("I can afford three or four looks.", "GNAMFast", "gnam-fast"),
    Row("I have data for an auxiliary batch.", "GAM", "gam", "learns its perturbation; `period` saves looks"),
    Row("I have a sharpness measure of my own.", "UniversalSAM", "tracesam", note="measured as Trace-SAM"),
)


def gains(row: Row) -> list[Any]:
    """The differences to the best baseline at the method's cost, one for each column; None where it was not run."""
    tables = [frontier.table_of(name) for name in ON_MAP]
    found = [frontier.gapsam(table) if row.cell == "gapsam" else table.row(row.cell) for table in tables]
    return [one and one.gain for one in found]


def markdown() -> str:
    """The table, and what its columns are."""
    head = ("situation", "method", "looks", *ON_MAP.values())
    lines = [_line(head), "|---" * len(head) + "|"]
    before = ""
    for row in ROWS:
        name = f"[{row.method}](methods/{row.method.lower()}.md)" + (f": {row.note}" if row.note else "")
        situation, before = "" if row.situation == before else row.situation, row.situation
        lines.append(_line((situation, name, _looks(row), *map(_shown, gains(row)))))
    note = (
        "Points of test accuracy, minus the best baseline at the same cost: the base trained longer, stopped early, "
        "averaged. 95 % confidence intervals, simultaneous in each column; bold ones exclude zero; n = 10. From "
        "[the map](frontier.md), with the radius that held-out data chose for SAM; ASAM takes ten times that, and "
        "MSAM, GAM and GapSAM their defaults. On CIFAR-10 that radius is 1, far above the defaults: ASAM, GSAM and "
        "CR-SAM break down there. With a radius of their own they may not. –: not measured."
    )
    return "\n".join([*lines, "", note])


def _looks(row: Row) -> str:
    from steppe.methods.registry import find, with_defaults

    known = {"Late": "1.1", "Every": "1.2"}  # around SAM, as the notes say
    return known.get(row.method) or f"{float(with_defaults(find(row.method)).cost):g}"


def _shown(one: Any) -> str:
    if one is None or one.mean.low is None:
        return NOT_MEASURED
    shown = frontier.points_text(one)
    return f"**{shown}**" if one.verdict in ("better", "worse") else shown


def _line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"
