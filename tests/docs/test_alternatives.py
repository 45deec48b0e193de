"""The table of methods other than SAM has a measured number, or says that there is none."""

from __future__ import annotations

import re

import steppe
from helpers.pages import making

alternatives, frontier = making("alternatives"), making("frontier")
GAIN = re.compile(r"\*{0,2}[+−]?\d+\.\d+ \[[+−]\d+\.\d+, [+−]\d+\.\d+\]\*{0,2}")


def body() -> list[list[str]]:
    lines = [line for line in alternatives.markdown().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_each_method_exists_and_each_cell_is_a_gain_or_says_that_it_was_not_measured():
    rows = body()
    assert len(rows) == len(alternatives.ROWS) >= 15
    for row, cells in zip(alternatives.ROWS, rows, strict=True):
        assert issubclass(getattr(steppe, row.method), steppe.Method) and f"methods/{row.method.lower()}.md" in cells[1]
        for cell in cells[3:]:
            assert cell == alternatives.NOT_MEASURED or GAIN.fullmatch(cell), cell


def test_every_method_was_run_on_digits_and_most_on_cifar():
    """A wrong name of a cell would say that it was not measured."""
    for row in alternatives.ROWS:
        assert [gain is not None for gain in alternatives.gains(row)[:2]] == [True, True], row.method
    noisy = [row.cell for row in alternatives.ROWS if alternatives.gains(row)[2] is None]
    assert set(noisy) == {"every-5", "gnp", "wsam", "gnam-fast", "gam", "tracesam"}


def test_numbers_are_those_of_the_map():
    by_method = {row.method: cells for row, cells in zip(alternatives.ROWS, body(), strict=True)}
    gain = frontier.table_of("digits-60").row("asam").gain
    assert by_method["ASAM"][3].strip("*") == frontier.points_text(gain) and gain.n == 10
    assert (by_method["ASAM"][3].startswith("**")) is (gain.verdict == "better")
    assert [by_method[name][2] for name in ("LookSAM", "GapSAM", "GAM", "Every")] == ["1.1", "2.1", "6", "1.2"]


def test_gapsam_is_shown_as_it_is_used():
    """With examples held out in turns where there are few of them, as in the other tables."""
    shown = {row.method: alternatives.gains(row) for row in alternatives.ROWS}["GapSAM"]
    cells = ("digits-60/gapsam-turns", "digits-clean/gapsam-turns", "cifar-40/gapsam", "cifar-clean/gapsam")
    tables = [(frontier.table_of(cell.split("/")[0]), cell.split("/")[1]) for cell in cells]
    assert shown == [table.row(cell).gain for table, cell in tables]


def test_only_asam_gained_more_than_the_best_baseline_on_digits():
    digits = [table for table in frontier.tables() if table.regime.name.startswith("digits-")]
    judged = [(table.regime.name, row.cell, row.gain) for table in digits for row in table.methods if row.gain]
    better = {(regime, cell) for regime, cell, gain in judged if gain.verdict == "better"}
    assert better == {("digits-60", "asam")}
