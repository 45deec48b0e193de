"""The table in the terminal."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")
pytest.importorskip("rich.console")

from helpers.report_records import comparison, diverged, printed, record, rows
from steppe.lab.report.formatting import difference


def equal_cost() -> str:
    return difference(rows(comparison(3))["SAM rho=0.1"].equal_cost, "test_accuracy")


def test_the_terminal_table_shows_everything():
    said = printed([*comparison(3), diverged("SAM rho=0.1", 3, "loss became NaN in epoch 3", cost=2.0)])
    lines = said.splitlines()
    first = next(k for k, line in enumerate(lines) if line.lstrip().startswith("SAM"))
    plain = [" ".join(line.split()) for line in lines[first : first + 2]]
    sam = rows([*comparison(3), diverged("SAM rho=0.1", 3, cost=2.0)])["SAM rho=0.1"]
    base, equal = (difference(d, "test_accuracy") for d in (sam.difference, sam.equal_cost))
    assert plain[0] == f"SAM rho=0.1 96.18 ± 0.13 2.0× {base} {equal}"
    assert plain[1] == "n = 3, 1 diverged 0.5 ± 0 2.0× 1 of 4 diverged; the others: better the others: better"
    assert "SAM rho=0.1: loss became NaN in epoch 3" in said
    assert "simultaneous 95 % intervals" in " ".join(said.split())


def test_the_table_fits_an_ordinary_terminal():
    lines = printed(comparison(3), width=80).splitlines()
    first = next(k for k, line in enumerate(lines) if line.lstrip().startswith("SAM"))
    assert lines[first].endswith(equal_cost()) and lines[first + 1].split()[-2:] == ["better", "better"]


@pytest.mark.parametrize("width", range(40, 120, 5))
def test_nothing_is_cut_off_on_a_narrow_terminal(width):
    """Every word of the wide table is there, in columns that fold."""
    records = [*comparison(3), diverged("SAM rho=0.1", 3, "loss became NaN", cost=2.0), diverged("GNAM", 0)]
    letters = [sorted("".join(printed(records, wide).replace("─", "").split())) for wide in (200, width)]
    assert letters[0] == letters[1]


def test_labels_fold_before_numbers():
    records = [record("A label of many words", 0.9, s, cost=2.0) for s in range(3)]
    said = printed(comparison(3) + records, width=80)
    assert "+1.60 [+1." in said and "A label\n" in "\n".join(x[:8].rstrip() for x in said.splitlines())


def test_labels_are_not_markup_in_the_terminal():
    assert "[red]x[/red]" in printed([record("[red]x[/red]", 0.9, 0), diverged("y", 0, "[bold]why[/bold]")])
    assert "[bold]why[/bold]" in printed([diverged("y", 0, "[bold]why[/bold]")])


def test_problems_are_apart_in_the_terminal():
    said = printed([record("SGD", 0.9, 0, role="base"), record("SGD", 0.5, 0, role="base", data="mnist")])
    assert (
        said.index("digits, digits-mlp") < said.index("90.00") < said.index("mnist, digits-mlp") < said.index("50.00")
    )
