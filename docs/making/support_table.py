"""The tables "works / refused / not tried": one CSV file for each page, one row for each feature.

`docs/making/support/trainers.csv` is the table of a page that has the line `<!-- support: trainers -->`. Its columns:
`feature`, `state` (one of `STATES`), `tests` (for example `tests/test_loops.py::test_x`; several with a space between
them) and `note` (Markdown). A row that says "works" or "refused" names the test that shows it; a row that says
"not tried" names none. `problems` finds the rows that break these rules, and a test asserts that there are none.
"""

from __future__ import annotations

import ast
import csv
import functools
from dataclasses import dataclass
from pathlib import Path

from . import ROOT

ROWS = Path(__file__).parent / "support"
STATES = ("works", "refused", "not tried")


@dataclass(frozen=True)
class Row:
    """One feature: whether it works, and which tests show it."""

    feature: str
    state: str
    tests: tuple[str, ...]
    note: str


def rows(page: str) -> list[Row]:
    """The rows of a page's table, in the order of its file."""
    with (ROWS / f"{page}.csv").open(encoding="utf-8", newline="") as file:
        return [Row(r["feature"], r["state"], tuple(r["tests"].split()), r["note"]) for r in csv.DictReader(file)]


def markdown(page: str) -> str:
    """A page's table."""
    lines = ["| feature | state | notes, and the test that shows it |", "|---|---|---|"]
    for row in rows(page):
        files = dict.fromkeys(test.partition("::")[0].removeprefix("tests/") for test in row.tests)
        shown = " ".join(f"`{file}`" for file in files)
        state = row.state if row.state == "works" else f"**{row.state}**"
        lines.append(f"| {row.feature} | {state} | {' '.join(filter(None, [row.note, shown and f'({shown})']))} |")
    return "\n".join(lines)


def problems(page: str) -> list[str]:
    """What is wrong with a page's rows: a state that is not one, a test that does not exist, a missing test."""
    found = []
    for row in rows(page):
        if row.state not in STATES:
            found.append(f"{row.feature}: {row.state!r} is none of {', '.join(STATES)}")
        elif (row.state == "not tried") == bool(row.tests):
            found.append(f'{row.feature}: "works" and "refused" name a test, "not tried" names none')
        found += [f"{row.feature}: there is no test {test}" for test in row.tests if not exists(test)]
    return found


def exists(test: str) -> bool:
    """Whether `path::function` is a test function of that file."""
    path, _, name = test.partition("::")
    return name.startswith("test_") and name in _functions(ROOT / path)


@functools.cache
def _functions(path: Path) -> frozenset[str]:
    if not path.is_file():
        return frozenset()
    return frozenset(node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef))
