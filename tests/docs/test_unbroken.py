"""Numbers in tables stay on one line; text, code and fenced blocks are not changed."""

from __future__ import annotations

from helpers.pages import making

unbroken = making("unbroken").unbroken


def test_numbers_of_tables_are_not_broken():
    row = "| 96.6 ± 0.1 | **+0.1 [−1.1, +2.0]** (SAM, ρ = 0.05; n = 10) | 60 % wrong labels |"
    assert unbroken(row).replace("\u00a0", "~") == (
        "| 96.6~±~0.1 | **+0.1 [−1.1,~+2.0]** (SAM, ρ~=~0.05; n~=~10) | 60~% wrong labels |"
    )
    assert unbroken(f"    {row}").count("\u00a0") == 8  # in a folded note


def test_other_lines_and_code_stay():
    for same in ("96.6 ± 0.1 and [1, 2]", "| `1 ± 2` and `[1, 2]` |", "```\n| 1 ± 2 |\n```", "| a, b | c = d |"):
        assert unbroken(same) == same
