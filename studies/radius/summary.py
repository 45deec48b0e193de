"""Tables from records: mean ± standard error, the best of six radii of SAM, a verdict for each regime.

python studies/radius/summary.py RECORDS... [--only WORD] [--curves]
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

BASE = "sam rho=0"
Cell = tuple[float, float, int]  # mean, standard error, n


def read(paths: list[Path]) -> list[dict]:
    """All records of these files or folders."""
    files = [f for path in paths for f in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line]


def cells(records: list[dict]) -> dict[str, dict[str, Cell]]:
    """Regime (with its epochs) to candidate to mean, standard error, n. Runs that were lost count as chance, 10 %."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for mark, accuracies in record["accuracy"].items():
            found = values[f"{record['regime']}-{mark}"][short(record["candidate"])]
            found += [a if a == a else 10.0 for a in accuracies]
    return {
        regime: {name: (mean(v), stdev(v) / len(v) ** 0.5 if len(v) > 1 else 0.0, len(v)) for name, v in row.items()}
        for regime, row in values.items()
    }


def short(candidate: str) -> str:
    """A candidate without how many are held out, where that is the regime's own number."""
    words = candidate.split()
    own = {"hold=64", "hold=16", "hold=100", "hold=500"}
    named = {"hold=32": "hold=x2", "hold=128": "hold=x2", "hold=256": "hold=x4"}
    if "draw=16" in words and "hold=64" in words:
        words[words.index("hold=64")] = "hold=x4"
    kept = [named.get(w, w) for w in words if w not in own or any(x.startswith("draw") for x in words)]
    return " ".join(w for w in kept if not w.startswith("draw") or "hold=500" in words)


def verdict(row: dict[str, Cell], name: str) -> tuple[float, float, bool, bool]:
    """How far above the best radius and above the base; whether either is good enough."""
    best = max(
        (cell for other, cell in row.items() if other.startswith("sam rho") and other != BASE), key=lambda c: c[0]
    )
    base, own = row[BASE], row[name]
    over_best, over_base = own[0] - best[0], own[0] - base[0]
    near = over_best >= -max(0.3, (own[1] ** 2 + best[1] ** 2) ** 0.5)
    safe = over_base >= -max(0.3, 2 * (own[1] ** 2 + base[1] ** 2) ** 0.5)
    return over_best, over_base, near, safe


def table(rows: dict[str, dict[str, Cell]], only: str) -> list[str]:
    """One line a candidate: in how many regimes it is good enough, and where it is worst."""
    lines = []
    for name in sorted({name for row in rows.values() for name in row}):
        if only not in name:
            continue
        found = {regime: verdict(row, name) for regime, row in rows.items() if name in row and BASE in row}
        if not found:
            continue
        near, safe = sum(v[2] for v in found.values()), sum(v[3] for v in found.values())
        worst = min(found, key=lambda r: found[r][0])
        average = mean(max(v[0], -10) for v in found.values())
        lines.append(
            f"{near:2d} near, {safe:2d} safe of {len(found)}; mean {average:+5.2f}; worst {found[worst][0]:+6.1f} "
            f"({worst}) | {name}"
        )
    return sorted(lines, reverse=True)


def regime_lines(rows: dict[str, dict[str, Cell]], names: list[str]) -> list[str]:
    """One line a regime: base, best radius, and these candidates."""
    lines = []
    for regime, row in rows.items():
        if BASE not in row:
            continue
        best = max((n for n in row if n.startswith("sam rho") and n != BASE), key=lambda n: row[n][0])
        shown = [f"{_cell(row[BASE])}", f"{_cell(row[best])} ({best[8:]})"]
        for name in names:
            if name not in row:
                shown.append("-")
                continue
            *_, near, safe = verdict(row, name)
            shown.append(_cell(row[name]) + ("" if near and safe else " below best" if safe else " below base"))
        lines.append(f"| {regime} | {row[BASE][2]} | " + " | ".join(shown) + " |")
    head = ["regime", "n", "base", "best SAM (ρ)", *names]
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *lines]


def _cell(cell: Cell) -> str:
    return f"{cell[0]:.1f} ± {cell[1]:.1f}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--regime", default="")
    parser.add_argument("--show", nargs="*", default=[], help="candidates to show regime by regime")
    options = parser.parse_args()
    rows = {name: row for name, row in cells(read(options.records)).items() if options.regime in name}
    print("\n".join(table(rows, options.only)))
    if options.show:
        print("\n" + "\n".join(regime_lines(rows, options.show)))


if __name__ == "__main__":
    main()
