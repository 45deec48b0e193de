"""The tables "works / refused / not tried" are made from rows that name tests, and every such test exists."""

from __future__ import annotations

import pytest

from helpers.pages import DOCS, making

support = making("support_table")
PAGES = sorted(path.stem for path in support.ROWS.glob("*.csv"))


@pytest.mark.parametrize("page", PAGES)
def test_every_row_names_tests_that_exist(page):
    assert support.problems(page) == []
    features = [row.feature for row in support.rows(page)]
    assert features and len(set(features)) == len(features)


@pytest.mark.parametrize("page", PAGES)
def test_the_page_shows_the_table(page):
    assert f"\n<!-- support: {page} -->\n" in (DOCS / f"{page}.md").read_text("utf-8")
    table = support.markdown(page).splitlines()
    assert len(table) == 2 + len(support.rows(page))
    assert all(line.count(" | ") == 2 for line in table[2:])


def test_wrong_rows_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(support, "ROWS", tmp_path)
    here = "tests/docs/test_support_tables.py::"
    lines = [
        "feature,state,tests,note",
        f'right,works,{here}test_wrong_rows_are_found,"words, and a comma"',
        "nobody knows,not tried,,",
        f"no such state,perhaps,{here}test_wrong_rows_are_found,",
        "no test,refused,,",
        f"not tried with a test,not tried,{here}test_wrong_rows_are_found,",
        f"gone,works,{here}test_that_is_gone tests/absent.py::test_x,",
    ]
    (tmp_path / "page.csv").write_text("\n".join(lines), "utf-8")
    found = support.problems("page")
    assert [problem.partition(":")[0] for problem in found] == [
        "no such state", "no test", "not tried with a test", "gone", "gone",
    ]  # fmt: skip
    table = support.markdown("page").splitlines()
    assert table[2] == "| right | works | words, and a comma (`docs/test_support_tables.py`) |"
    assert table[3] == "| nobody knows | **not tried** |  |"
