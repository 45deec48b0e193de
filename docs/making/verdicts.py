"""How far verdicts can be trusted: the table of simulated errors and power, from the record of the study."""

from __future__ import annotations

import json
from typing import Any

from . import ROOT

RECORD = ROOT / "studies" / "verdicts" / "record.json"


def record() -> dict[str, Any]:
    """The record of the study."""
    return json.loads(RECORD.read_text("utf-8"))


def markdown() -> str:
    """Two tables: how often a table without any effect has a verdict, and how often an effect is seen."""
    found = record()
    seeds = sorted({one["seeds"] for one in found["errors"]})
    heads, rule = " | ".join(f"n = {n}" for n in seeds), "|---" * (len(seeds) + 1) + "|"
    lines = [f"| tables without any effect | {heads} |", rule]
    for kind in dict.fromkeys(one["kind"] for one in found["errors"]):
        cells = []
        for n in seeds:
            shares = [one["percent"] for one in found["errors"] if (one["kind"], one["seeds"]) == (kind, n)]
            cells.append(" / ".join(f"{share:.1f}" for share in shares))
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    rows = sorted({one["rows"] for one in found["errors"]})
    lines += [
        "",
        f"The percentage of {found['tables']} simulated tables that contain a wrong “better” or “worse”, for tables of "
        f"{' / '.join(map(str, rows))} methods.",
        "",
        f"| one of four methods is better by | {heads} |",
        rule,
    ]
    for effect in sorted({one["effect"] for one in found["power"]}):
        mine = [one for n in seeds for one in found["power"] if (one["seeds"], one["effect"]) == (n, effect)]
        cells = [f"{one['better']:.0f} ({one['at least probably']:.0f})" for one in mine]
        lines.append(f"| {effect:g} standard deviations of a run | {' | '.join(cells)} |")
    lines += [
        "",
        "The percentage of tables that call this method better (in brackets: at least probably better). Another method "
        "of each table diverges.",
    ]
    return "\n".join(lines)
