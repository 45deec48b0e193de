"""Simulation of the type I error and the power of the verdicts in a table.

python studies/verdicts/simulate.py      writes record.json beside it; takes a few minutes

A table has a base and some methods. Every seed has an effect that all of them share, and every run has normal noise of
standard deviation 1. Without any difference between methods, a type I error is a table with at least one "better" or
"worse". With an effect on one method, the power is how often that method is called "better", and how often at least
"probably better".
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from steppe.lab.statistics import difference_of, judged, summarise

TABLES = 2000
SEEDS, ROWS, EFFECTS = (3, 5, 10), (2, 4, 8), (0.5, 1.0, 2.0)
RECORD = Path(__file__).parent / "record.json"
RUNS = (
    ("base", "base", 1, 10),
    ("base, 2x longer", "equal-cost", 1, 20),
    ("A", "method", 2, 10),
    ("B", "method", 2, 10),
)
WORDS = (("better",), ("better", "probably better"))
SPREADS = {
    "all rows alike": lambda k, rows: 1.0,
    "one diverges: 30 times the noise": lambda k, rows: 30.0 if k == rows - 1 else 1.0,
    "one has 3 times the noise": lambda k, rows: 3.0 if k == rows - 1 else 1.0,
    "half have 10 times the noise": lambda k, rows: 10.0 if k >= (rows + 1) // 2 else 1.0,
    "noise from 1 to 3": lambda k, rows: 1 + 2 * k / max(rows - 1, 1),
}


def table(draw: random.Random, n: int, rows: int, kind: str, effect: float = 0.0) -> list[str]:
    """The verdicts of one simulated table. The first method has the effect."""
    shared = [draw.gauss(0, 3) for _ in range(n)]
    base = {s: shared[s] + draw.gauss(0, 1) for s in range(n)}
    common = [draw.gauss(0, 1) for _ in range(n)]
    differences = []
    for k in range(rows):
        if kind == "rows move together":
            own = {s: shared[s] + 0.9 * common[s] + 0.19**0.5 * draw.gauss(0, 1) for s in range(n)}
        elif kind == "accuracies of 360 examples":
            own = {s: shared[s] + draw.gauss(0, 1) for s in range(n)}
        else:
            own = {s: shared[s] + SPREADS[kind](k, rows) * draw.gauss(0, 1) for s in range(n)}
        if k == 0:
            own = {s: value + effect for s, value in own.items()}
        if kind == "accuracies of 360 examples":  # the standard deviation of the noise is half an example
            own, seen = ({s: round(value / 2) for s, value in one.items()} for one in (own, base))
        else:
            seen = base
        found = difference_of(own, seen, "base")
        assert found is not None
        differences.append(found)
    return [one.verdict for one in judged(differences)]


def against_rivals(draw: random.Random, n: int) -> list[str]:
    """The verdicts of a comparison without any effect: two methods, and the base trained longer and stopped early."""
    records = []
    for seed in range(n):
        for label, role, cost, epochs in RUNS:
            values = [draw.gauss(0, 1) for _ in range(epochs)]
            curve = [{"epoch": k + 1, "test_accuracy": v, "gradients": (k + 1) * cost} for k, v in enumerate(values)]
            recipe = {"data": "simulated", "seed": seed, "epochs": epochs, "method": label if role == "method" else ""}
            final = {"test_accuracy": values[-1], "test_loss": 1.0, "gradients": epochs * cost}
            records.append({"status": "done", "label": label, "role": role, "recipe": recipe, "epochs": curve,
                            "final": final})  # fmt: skip
    rows = summarise(records)
    return [d.verdict for row in rows for d in (row.difference, row.equal_cost) if d is not None]


def wrong(verdicts: list[str]) -> bool:
    """Whether a table without any effect has a "better" or "worse"."""
    return "better" in verdicts or "worse" in verdicts


def simulate(tables: int, seed: int = 0) -> dict[str, Any]:
    """The shares of tables with errors, and of methods that are detected, in percent."""
    draw = random.Random(seed)
    errors, power = [], []
    for kind in (*SPREADS, "rows move together", "accuracies of 360 examples"):
        for n in SEEDS:
            for rows in ROWS:
                count = sum(wrong(table(draw, n, rows, kind)) for _ in range(tables))
                errors.append({"kind": kind, "seeds": n, "rows": rows, "percent": 100 * count / tables})
    for n in SEEDS:
        count = sum(wrong(against_rivals(draw, n)) for _ in range(tables // 2))
        percent = 100 * count / (tables // 2)
        errors.append({"kind": "methods against rivals at no more cost", "seeds": n, "rows": 2, "percent": percent})
    for n in SEEDS:
        for effect in EFFECTS:
            first = [table(draw, n, 4, "one diverges: 30 times the noise", effect)[0] for _ in range(tables)]
            sure, probably = (sum(first.count(word) for word in words) for words in WORDS)
            power.append({"seeds": n, "rows": 4, "effect": effect, "better": 100 * sure / tables,
                          "at least probably": 100 * probably / tables})  # fmt: skip
    return {"tables": tables, "seed": seed, "errors": errors, "power": power}


if __name__ == "__main__":
    found = simulate(int(sys.argv[1]) if len(sys.argv) > 1 else TABLES)
    RECORD.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
