"""The figures by matplotlib."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from helpers.report_records import comparison, many, record
from steppe.lab.report import figures
from steppe.lab.report.chart_data import curve
from steppe.lab.statistics import summarise


@pytest.mark.parametrize("records", [comparison(3), comparison(1), [record("SGD", 0.9, 0, role="base")]])
def test_figures_show_what_the_table_says(records):
    summary: list[Any] = summarise(records)
    axes: Any = figures.cost_figure(records).axes[0]
    drawn = {round(float(y), 6) for line in axes.lines for y in line.get_ydata()}
    assert {round(100 * row.mean.value, 6) for row in summary} <= drawn
    axes = figures.curves_figure(records, "test_error").axes[0]
    expected = [point[3] for point in curve(summary[0].group, "test_error")]
    assert list(axes.lines[0].get_ydata()) == expected


def test_many_curves_have_their_last_interval_beside_them():
    records = many(6)
    axes: Any = figures.curves_figure(records, "test_error").axes[0]
    assert not axes.collections  # no bands
    bars = [list(line.get_ydata()) for line in axes.lines if len(line.get_xdata()) == 2]
    assert bars == [curve(row.group, "test_error")[-1][4:] for row in summarise(records)]
    assert len(figures.curves_figure(comparison(3)).axes[0].collections) == 3


def test_equal_costs_stand_side_by_side():
    assert figures._side_by_side([70.0, 140.0, 140.0, 140.0]) == [70.0, 140.0, 142.0, 138.0]


def test_an_outlier_is_an_arrow_at_the_edge():
    assert figures.outliers([0.95, 0.96, 0.94, 0.1]) == {0.1}
    assert figures.outliers([0.95, 0.1]) == set()
    axes: Any = figures.cost_figure([*many(4), record("Lost", 0.1, 0)]).axes[0]
    assert axes.get_ylim()[0] > 92
    (mark,) = [line for line in axes.lines if line.get_label() == "Lost (10.00)"]
    assert list(mark.get_ydata()) == [0.02]


def test_figures_are_reproducible_to_the_byte(tmp_path):
    first, second = (figures.write_figures(comparison(2), tmp_path / name) for name in "ab")
    assert [p.name for p in first] == ["cost.png", "cost.svg", "curves.png", "curves.svg"]
    assert all(p.stat().st_size > 1000 for p in first)
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
