"""The data of the charts on the page."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytest.importorskip("scipy")

from helpers.report_records import diverged, flat, record
from steppe.lab.report import chart_sections
from steppe.lab.report.chart_data import POINTS, SEED_POINTS, charts, curve, gamma, polynomial, seed_curves, thinned
from steppe.lab.report.forest_plot import Scale, forest, scale_of
from steppe.lab.report.summary import subject
from steppe.lab.report.values import runs_of
from steppe.lab.statistics import Difference, Mean, group_records, mean_of, summarise
from steppe.methods.gam import transformation


def test_curves_are_means_with_intervals_at_epochs_all_finished_runs_have():
    records = [record("SAM", a, s, cost=2.0) for s, a in enumerate((0.8, 0.9, 0.94))]
    records.append(diverged("SAM", 3, cost=2.0))
    (group,) = group_records(records)
    points = curve(group, "test_error")
    expected = mean_of([100 * (1 - r["epochs"][1]["test_accuracy"]) for r in records[:3]])
    assert len(points) == 4
    assert points[1] == pytest.approx([2, 400, 2.0, expected.value, expected.low, expected.high], rel=1e-5)
    data = charts(summarise(records), "test_accuracy")["groups"][0]
    assert [len(one) for one in data["broken"]["test_loss"]] == [2]
    assert list(data["curves"]) == ["test_error", "test_loss", "train_loss", "lr", "surrogate_gap"]


def test_one_seed_gives_curves_without_bands():
    (group,) = group_records([record("SAM", 0.9, 0)])
    assert [point[4:] for point in curve(group, "test_loss")] == [[None, None]] * 4


def test_gamma_and_its_polynomial():
    (group,) = group_records([record("GAM", 0.9, s, gamma=[0.2 + s / 10, 0.05], curvature=flat()) for s in range(2)])
    found: Any = gamma(group)
    assert found["last"] == [[0.2, 0.05], [0.3, 0.05]]
    assert found["largest"] == 2.0
    assert [point[3] for point in found["curves"][0]] == pytest.approx([0.0625, 0.125, 0.1875, 0.25])
    for coefficients, points in zip(found["last"], found["polynomials"], strict=True):
        grid = torch.tensor([x for x, _ in points], dtype=torch.float64)
        assert [y for _, y in points] == pytest.approx(transformation(coefficients, grid).tolist(), rel=1e-5)
    assert polynomial([0.5, 2.0], 3.0) == 3 + 0.5 * 9 + 2 * 27
    assert gamma(group_records([record("SAM", 0.9, 0)])[0]) is None


def test_normalised_directions_have_no_polynomial():
    def page(method: str, coefficients: list[float]) -> tuple[int, bool]:
        records = [record("GAM", 0.9, s, gamma=coefficients, method=method) for s in range(2)]
        (row,) = summarise(records)
        section = str(chart_sections.coefficients(0, [row]))
        found: Any = gamma(row.group)
        assert len(found["curves"]) == len(coefficients) and "Coefficients" in section
        return len(found["polynomials"]), "Polynomial" in section

    assert page("gam", [0.2, 0.05]) == (2, True)
    assert page("gam:normalize=true", [0.2, 0.05]) == (0, False)
    assert page("every:k=2,method=(gam:normalize=true)", [0.2, 0.05]) == (0, False)
    assert page("gam:directions=sized", [0.2, 0.05]) == page("gam:T=1,directions=unit", [0.2]) == (0, False)
    assert page("gam:T=1,normalize=true", [0.2]) == (2, True)  # the first direction is as long as it is


def test_missing_numbers_do_not_break_the_charts():
    one = record("SAM", 0.9, 0, curvature=flat())
    one["curvature"]["landscape"]["loss"][0][0] = "inf"
    one["curvature"]["density"]["density"][3] = "nan"
    one["epochs"][1]["test_loss"] = "nan"
    data = charts(summarise([one]), "test_accuracy")
    json.dumps(data, allow_nan=False)
    group = data["groups"][0]
    assert group["landscape"]["loss"][0][0] is None
    assert len(group["density"]["points"]) == 42
    assert [point[0] for point in group["curves"]["test_loss"]] == [1, 3, 4]


def test_long_curves_are_thinned_and_keep_their_ends():
    points = thinned(list(range(1001)))
    assert (len(points), points[0], points[-1]) == (POINTS, 0, 1000)
    assert points == sorted(set(points))
    assert thinned([1, 2, 3]) == [1, 2, 3]


def test_a_small_picture_of_a_difference():
    def against(value, low=None, high=None):
        return Difference("SGD", Mean(3, value, 0.1, low, high), 0.1)

    scale = Scale(2.0)
    assert [scale.at(x) for x in (-2, 0, 1, 5)] == [3.6, 60.0, 88.2, 116.4]
    assert (
        scale_of([against(0.01, -0.01, 0.03), against(0.02, 0.0, 0.04), against(-0.9, -1.0, -0.8), None]).reach == 0.04
    )
    drawn = forest(against(1.0, 0.0, 2.0), scale)
    assert 'cx="88.2"' in drawn and 'x1="60.0" x2="116.4"' in drawn
    assert 'class="outside"' in forest(against(5.0), scale)
    assert scale_of([]).reach == 1.0
    assert scale_of([against(0.0)]).reach == 1.0


def test_each_seed_has_a_curve_at_points_of_the_mean():
    (group,) = group_records([record("SAM", a, s, epochs=120) for s, a in enumerate((0.8, 0.9))])
    found: Any = seed_curves(group, "test_error")
    assert len(found["at"]) == SEED_POINTS and found["at"][0] == [1, 100, 0.5] and found["at"][-1] == [120, 12000, 60]
    assert [seed for seed, _ in found["curves"]] == [0, 1]
    assert [values[-1] for _, values in found["curves"]] == pytest.approx([20.0, 10.0], rel=1e-4)
    assert all(len(values) == SEED_POINTS for _, values in found["curves"])
    (single,) = group_records([record("SAM", 0.9, 0)])
    assert seed_curves(single, "test_error") is None


def test_runs_are_listed_with_their_finite_numbers():
    lost = record("SAM", 0.9, 1, curvature=flat())
    lost["final"]["test_loss"] = "nan"
    (row,) = summarise([record("SAM", 0.8, 0), lost, diverged("SAM", 2)])
    first, second, third = runs_of(row)
    assert (first["seed"], first["status"], first["test_accuracy"], first["test_loss"]) == (0, "done", 0.8, 0.5)
    assert "test_loss" not in second and second["top"] == 2.0
    assert third == {"seed": 2, "status": "diverged"}
    assert charts([row], "test_accuracy")["groups"][0]["runs"] == [first, second, third]


def test_over_epochs_no_base_trained_longer_is_drawn_not_even_averaged():
    """The average of a longer training is a rival: it used to stretch the axis, against the words below the chart."""
    runs = [record("SGD", 0.8, 0, role="base"), record("SGD, 2x longer", 0.85, 0, role="equal-cost")]
    runs += [record(f"SGD, {name}", 0.86, 0, role="rival") for name in ("nesterov", "2x longer, EMA")]
    for one, epochs in zip(runs, (4, 8, 4, 8), strict=True):
        one["recipe"] |= {"epochs": epochs, "nesterov": "nesterov" in one["label"]}
    runs[3]["recipe"]["average"] = "ema:0.99"
    rows = summarise(runs)
    groups = charts(rows, "test_accuracy")["groups"]
    assert {g["label"] for g in groups if g["longer"]} == {"SGD, 2x longer", "SGD, 2x longer, EMA"}
    assert subject([rows]) == "Training on digits, digits-mlp · 4 epochs · 1 seed"
