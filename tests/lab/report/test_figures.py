"""The figures by matplotlib."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from helpers.report_records import comparison, many, record
from steppe.lab.report import figures
from steppe.lab.statistics import summarise


@pytest.mark.parametrize("records", [comparison(3), comparison(1), [record("SGD", 0.9, 0, role="base")]])
def test_figures_show_what_the_table_says(records):
    summary: list[Any] = summarise(records)
    axes: Any = figures.cost_figure(records).axes[0]
    drawn = {round(float(y), 6) for line in axes.lines for y in line.get_ydata()}
    assert {round(100 * row.mean.value, 6) for row in summary} <= drawn


def test_equal_costs_stand_side_by_side():
    assert figures._side_by_side([70.0, 140.0, 140.0, 140.0]) == [70.0, 140.0, 142.0, 138.0]


def test_an_outlier_is_an_arrow_at_the_edge():
    assert figures.outliers([0.95, 0.96, 0.94, 0.1]) == {0.1}
    assert figures.outliers([0.95, 0.1]) == set()
    axes: Any = figures.cost_figure([*many(4), record("Lost", 0.1, 0)]).axes[0]
    assert axes.get_ylim()[0] > 92
    (mark,) = [line for line in axes.lines if line.get_label() == "Lost (10.00)"]
    assert list(mark.get_ydata()) == [0.02]
