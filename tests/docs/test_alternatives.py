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


def test_a_cell_that_is_named_was_run():
    """A wrong name of a cell would say "not measured". GAM as printed was not run on CIFAR-10 with wrong labels."""
    for row in alternatives.ROWS:
        named = [bool(row.cell), bool(row.cell), bool(row.cell) and row.cell != "gam", bool(row.label)]
        assert [gain is not None for gain in alternatives.gains(row)] == named, row.method


def test_numbers_are_those_of_the_map_and_of_the_short_training():
    by_method = {row.method: cells for row, cells in zip(alternatives.ROWS, body(), strict=True)}
    gain = frontier.table_of("digits-60").row("asam").gain
    assert by_method["ASAM"][3].strip("*") == frontier.points_text(gain) and gain.n == 10
    assert (by_method["ASAM"][3].startswith("**")) is (gain.verdict == "better")
    assert alternatives.short()["GNP"].equal_cost.n == 3
    assert [by_method[name][2] for name in ("LookSAM", "GapSAM", "GAM", "Every")] == ["1.1", "2.1", "6", "1 + 1/k"]


def test_only_asam_gained_more_than_the_best_baseline_on_digits():
    """As the page says above the table."""
    digits = [table for table in frontier.tables() if table.regime.name.startswith("digits-")]
    judged = [(table.regime.name, row.cell, row.gain) for table in digits for row in table.methods if row.gain]
    better = {(regime, cell) for regime, cell, gain in judged if gain.verdict == "better"}
    assert better == {("digits-60", "asam")}


def test_the_short_training_is_as_the_note_says():
    (recipe,) = {(run["recipe"]["epochs"], run["recipe"]["share"]) for run in alternatives.short()["SAM"].group.done}
    assert recipe == (4, 0.2) and "4 epochs on a fifth of the data" in alternatives.markdown()
