"""Which radius helps where: the table of SAM's radii on digits, from the records of the radius study."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

RECORDS = Path(__file__).parents[2] / "studies" / "radius" / "records" / "digits-table.jsonl"
RADII = ("0.02", "0.05", "0.1", "0.2", "0.5", "1")
KINDS = {"clean": "clean labels", "40": "40 % wrong labels", "60": "60 % wrong labels", "tenth": "143 examples, clean"}
BASES = {"sgd": "SGD with momentum", "adam": "Adam"}


def accuracies() -> dict[tuple[str, str], list[float]]:
    """Test accuracies by regime with its epochs, and by candidate, in the order of the seeds."""
    found: dict[tuple[str, str], list[float]] = {}
    for line in RECORDS.read_text("utf-8").splitlines():
        record = json.loads(line)
        for epochs, values in record["accuracy"].items():
            found[f"{record['regime']}-{epochs}", record["candidate"]] = values
    return found


def cell(values: list[float], base: list[float]) -> str:
    """SAM's accuracy less the base's, in points; bold if the 95 % interval of the paired difference leaves out zero."""
    from steppe.lab.statistics import mean_of

    one = mean_of([mine - theirs for mine, theirs in zip(values, base, strict=True)])
    middle, low, high = one.value, one.low or 0.0, one.high or 0.0
    text = f"{middle:+.1f}".replace("-", "−") if abs(middle) >= 0.05 else "0.0"
    return f"**{text}**" if low > 0 or high < 0 else text


def markdown() -> str:
    """One row for each regime: the base's accuracy, and what each radius adds to it."""
    found = accuracies()
    count = len(next(iter(found.values())))
    lines = [f"| labels | base | epochs | base, % | {' | '.join(f'ρ = {rho}' for rho in RADII)} |"]
    lines.append("|---" * (4 + len(RADII)) + "|")
    for kind, labels in KINDS.items():
        for base, name in BASES.items():
            for epochs in ("20", "40", "120"):
                regime = f"digits-{kind}-{base}-{epochs}"
                theirs = found[regime, "sam rho=0"]
                cells = [cell(found[regime, f"sam rho={rho}"], theirs) for rho in RADII]
                lines.append(f"| {labels} | {name} | {epochs} | {mean(theirs):.1f} | {' | '.join(cells)} |")
    note = f"Digits, a small net, n = {count}, paired by seed; bold: the 95 % interval excludes zero (not corrected)."
    return "\n".join([*lines, "", note])
