"""Means, intervals, paired differences and the table: against scipy, by hand, and by their properties."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

scipy_stats = pytest.importorskip("scipy.stats")

from helpers.report_records import comparison, diverged, flat, record  # noqa: E402
from steppe.lab.records import number  # noqa: E402
from steppe.lab.report.formatting import sentence  # noqa: E402
from steppe.lab.statistics import Mean, group_records, mean_of, p_value, summarise  # noqa: E402

numbers = st.floats(-1e3, 1e3)


def row_of(rows, label) -> Any:
    (found,) = [row for row in rows if row.label == label]
    return found


# Means


def test_mean_by_hand():
    found = mean_of([1.0, 2.0, 3.0, 4.0])
    error = math.sqrt((2.25 + 0.25 + 0.25 + 2.25) / 3) / 2
    assert found.value == 2.5
    assert found.error == pytest.approx(error, rel=1e-15)
    assert found.high == pytest.approx(2.5 + 3.182446305284263 * error, rel=1e-12)  # t, 3 degrees, 97.5 %
    assert found.low == pytest.approx(2.5 - 3.182446305284263 * error, rel=1e-12)


@given(st.lists(numbers, min_size=2, max_size=12, unique_by=lambda x: round(x, 3)))
def test_mean_against_scipy(values):
    found = mean_of(values)
    error = scipy_stats.sem(values)
    low, high = scipy_stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=error)
    assert found.value == pytest.approx(np.mean(values), rel=1e-12, abs=1e-12)
    assert found.error == pytest.approx(error, rel=1e-9)
    assert (found.low, found.high) == (pytest.approx(low, rel=1e-9, abs=1e-9), pytest.approx(high, rel=1e-9, abs=1e-9))


@given(st.lists(numbers, min_size=1, max_size=12), st.randoms())
def test_mean_does_not_depend_on_the_order(values, chance):
    shuffled = chance.sample(values, len(values))
    assert mean_of(values) == mean_of(shuffled)


def test_without_spread_there_is_no_interval():
    assert mean_of([0.3]) == Mean(1, 0.3)
    assert mean_of([0.5, 0.5, 0.5]) == Mean(3, 0.5, 0.0)


# p values


@given(st.lists(numbers, min_size=2, max_size=10, unique_by=lambda x: round(x, 2)))
def test_p_against_scipy(values):
    assert p_value(mean_of(values)) == pytest.approx(scipy_stats.ttest_1samp(values, 0.0).pvalue, rel=1e-7, abs=1e-12)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_equal_differences_are_judged_by_their_signs(n):
    # The t test would say p = 0 of three equal differences of one example in 360.
    assert p_value(mean_of([1 / 360] * n)) == scipy_stats.binomtest(n, n, 0.5).pvalue
    assert p_value(mean_of([0.0] * n)) == 1.0


# The table


def test_differences_are_paired_by_seed_and_corrected():
    base, one, two = [0.90, 0.92, 0.91, 0.95], [0.92, 0.935, 0.93, 0.975], [0.91, 0.91, 0.92, 0.95]
    records = [record("SGD", a, s, role="base") for s, a in enumerate(base)]
    records += [record("SAM", a, s, cost=2.0) for s, a in enumerate(one)]
    records += [record("ASAM", a, s, cost=2.0) for s, a in enumerate(two)]
    random.Random(0).shuffle(records)
    rows: list[Any] = summarise(records)
    assert [row.label for row in rows] == ["SGD", "SAM", "ASAM"]
    raw = [scipy_stats.ttest_rel(x, base).pvalue for x in (one, two)]
    low, high = scipy_stats.ttest_rel(one, base).confidence_interval(math.sqrt(0.95))  # Šidák, two comparisons
    sam, asam = rows[1].difference, rows[2].difference
    assert sam.mean.value == pytest.approx(np.mean(np.subtract(one, base)), rel=1e-12)
    assert (sam.mean.low, sam.mean.high) == (pytest.approx(low, rel=1e-9), pytest.approx(high, rel=1e-9))
    assert (sam.p, asam.p) == (pytest.approx(raw[0], rel=1e-9), pytest.approx(raw[1], rel=1e-9))
    assert (sam.adjusted, asam.adjusted) == tuple(pytest.approx(1 - (1 - p) ** 2, rel=1e-9) for p in raw)
    assert (sam.family, sam.n) == (2, 4)
    assert [row.verdict for row in rows] == ["base", "better", "no difference seen"]
    assert [row.cost for row in rows] == [1.0, 2.0, 2.0]
    assert [row.time for row in rows] == [1.0, 2.0, 2.0]


def test_only_seeds_that_both_have_are_paired():
    records = [record("SGD", 0.9, s, role="base") for s in (0, 1, 2)]
    records += [record("SAM", 0.9 + 0.01 * s, s) for s in (1, 2, 3)]
    row = row_of(summarise(records), "SAM")
    assert row.n == 3
    assert row.difference.n == 2
    assert row.difference.mean.value == pytest.approx(0.015, rel=1e-12)
    records = [record("SGD", 0.9, 0, role="base"), record("SAM", 0.9, 1)]
    assert row_of(summarise(records), "SAM").verdict == "no seed in common with the base"


@pytest.mark.parametrize(("n", "verdict"), [(1, "n too small to tell"), (2, "n too small to tell"), (3, "better")])
def test_there_is_no_verdict_below_three_seeds(n, verdict):
    base = (0.90, 0.91, 0.905)[:n]
    records = [record("SGD", a, s, role="base") for s, a in enumerate(base)]
    records += [record("SAM", a + 0.05 + 0.0001 * s, s) for s, a in enumerate(base)]
    row = row_of(summarise(records), "SAM")
    assert row.verdict == verdict
    assert (row.difference.mean.low is None) == (n < 3)  # no verdict, no interval


def test_worse_and_metrics_of_which_smaller_is_better():
    records = [record("SGD", 0.9 + 0.001 * s, s, role="base", curvature=flat(2.0 + s / 10)) for s in range(4)]
    records += [record("SAM", 0.8 + 0.002 * s, s, curvature=flat(1.0 + s / 7)) for s in range(4)]
    assert row_of(summarise(records), "SAM").verdict == "worse"
    top = row_of(summarise(records, "top"), "SAM")
    assert top.mean.value == pytest.approx(2 * (1 + 6 / 4 / 7), rel=1e-12)
    assert top.verdict == "better"  # a smaller eigenvalue
    assert top.difference.mean.value < 0


def test_diverged_runs_are_counted_and_never_better():
    records = [record("SGD", 0.90 + 0.01 * s, s, role="base") for s in range(5)]
    records += [record("SAM", 0.95 + 0.0101 * s, s) for s in range(4)] + [diverged("SAM", 4, "loss became NaN")]
    records += [diverged("GAM", s) for s in range(5)]
    records += [record("ASAM", float("nan"), 0), record("WSAM", 0.9, 0, status="running")]
    records[-2]["final"]["test_loss"] = None
    rows = summarise(records)
    sam, gam = row_of(rows, "SAM"), row_of(rows, "GAM")
    assert (sam.n, sam.diverged, sam.verdict, sam.reasons) == (4, 1, "some diverged", ("loss became NaN",))
    assert sam.difference.verdict == "better"
    assert (gam.n, gam.diverged, gam.verdict, gam.mean) == (0, 5, "all diverged", None)
    assert len(gam.reasons) == 5
    asam, wsam = row_of(rows, "ASAM"), row_of(rows, "WSAM")
    assert (asam.n, asam.diverged, asam.verdict) == (0, 1, "all diverged")
    assert (wsam.n, wsam.unfinished, wsam.verdict) == (0, 1, "unfinished")


def test_all_diverged_means_all_of_them():
    records = [record("SGD", 0.9, s, role="base") for s in range(3)]
    records += [diverged("SAM", 0), record("SAM", 0.9, 1, status="running"), record("SAM", 0.9, 2, status="running")]
    records += [diverged("GAM", 0), record("GAM", 0.9, 1)]
    sam = row_of(summarise(records), "SAM")
    assert (sam.n, sam.diverged, sam.unfinished, sam.verdict) == (0, 1, 2, "unfinished")
    assert sentence(sam, "test_accuracy") == "unfinished (1 of 3 runs diverged)."
    gam = row_of(summarise(records, "top"), "GAM")  # its curvature was not measured
    assert (gam.n, gam.diverged, gam.verdict) == (0, 1, "not measured")


def test_without_a_matching_base_there_is_no_relative_cost():
    """Two bases, and a method that was trained otherwise than both."""
    records = [record("SGD", 0.9, s, role="base", lr=0.1) for s in range(3)]
    records += [record("SGD", 0.9, s, role="base", lr=0.2) for s in range(3)]
    records += [record("SAM", 0.9, s, lr=0.3) for s in range(3)]
    sam = row_of(summarise(records), "SAM")
    assert (sam.cost, sam.time, sam.difference, sam.verdict) == (None, None, None, "no base to compare with")


def test_the_same_in_every_seed_is_no_difference_and_a_constant_gain_needs_many_seeds():
    values = [0.9 + 0.1 / 3 * s for s in range(3)]
    records = [record("SGD", a, s, role="base") for s, a in enumerate(values)]
    records += [record("SAM rho=0", a, s) for s, a in enumerate(values)]
    records += [record("SAM", a + 1 / 360, s) for s, a in enumerate(values)]
    same, gain = row_of(summarise(records), "SAM rho=0"), row_of(summarise(records), "SAM")
    assert (same.difference.mean.value, same.difference.p, same.verdict) == (0.0, 1.0, "no difference seen")
    assert (gain.difference.p, gain.difference.mean.error, gain.verdict) == (0.25, 0.0, "no difference seen")
    assert gain.difference.mean.low is None


# Groups


def test_groups_are_recipes_and_problems_are_kept_apart():
    records = [record("SGD", 0.9, s, role="base") for s in (1, 0)]
    records += [record("SAM", 0.9, 0, lr=0.1), record("SAM", 0.8, 0, lr=0.2)]
    records += [record("SGD", 0.5, 0, role="base", data="mnist", share=0.1, model_settings={"width": 8})]
    groups = group_records(records)
    assert [g.label for g in groups] == ["SGD", "SAM (lr=0.1)", "SAM (lr=0.2)", "SGD"]
    assert groups[-1].problem == "mnist, digits-mlp, width=8, first 10 %"
    assert [r["recipe"]["seed"] for r in groups[0].records] == [0, 1]
    assert len({row.problem for row in summarise(records)}) == 2


def test_methods_are_compared_with_the_base_of_their_own_recipe():
    records = []
    for seed in range(3):
        for lr, value in ((0.1, 0.9), (0.2, 0.7)):
            records.append(record("SGD", value + seed / 100, seed, role="base", lr=lr))
            records.append(record("SAM", value + 0.01 + seed / 90, seed, lr=lr))
    rows = summarise(records)
    assert row_of(rows, "SAM (lr=0.2)").difference.against == "SGD (lr=0.2)"
    assert row_of(rows, "SAM (lr=0.1)").difference.against == "SGD (lr=0.1)"


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("said", ["SGD, {}x longer", "SGD for as long"])
def test_a_longer_base_is_paired_with_the_base_whose_epochs_it_multiplies(order, said):
    """Two lengths in one folder; a method without the schedule has its own length too."""
    records = []
    for seed in range(3):
        for epochs, value in ((2, 0.7), (3, 0.9)):
            schedule = f"step:0.1/{epochs}"
            records.append(record("SGD", value + seed / 100, seed, role="base", epochs=epochs, schedule=schedule))
            records.append(record("SASGD", value + seed / 90, seed, epochs=epochs, schedule="constant"))
            if said != "SGD for as long":
                longer = {"role": "equal-cost", "epochs": 2 * epochs, "schedule": f"step:0.1/{2 * epochs}"}
                records.append(record(said.format(2), value + 0.01 + seed / 90, seed, **longer))
        records.append(record(said.format(1.33), 0.7, seed, role="equal-cost", epochs=4, schedule="step:0.1/3.99"))
        records.append(record(said.format(5), 0.9, seed, role="equal-cost", epochs=15, schedule="step:0.1/15"))
    rows: list[Any] = summarise(records[::order])
    against = {
        (row.group.recipe["epochs"], row.group.recipe["schedule"]): row.difference.against
        for row in rows
        if row.role != "base"
    }
    names = {epochs: f"SGD (epochs={epochs}, schedule=step:0.1/{epochs})" for epochs in (2, 3)}
    assert against[2, "constant"] == names[2] and against[3, "constant"] == names[3]
    if said == "SGD for as long":
        assert against[4, "step:0.1/3.99"] == names[2] and against[15, "step:0.1/15"] == names[3]
    else:
        assert against[4, "step:0.1/4"] == names[2] and against[6, "step:0.1/6"] == names[3]
        assert against[4, "step:0.1/3.99"] == names[3] and against[15, "step:0.1/15"] == names[3]


def test_the_base_can_be_named_by_label_or_be_missing():
    records = [record("SGD", 0.9, 0, role="base"), record("SAM", 0.91, 0), record("GSAM", 0.93, 0)]
    rows = summarise(records, base="SAM")
    assert row_of(rows, "GSAM").difference.mean.value == pytest.approx(0.02, rel=1e-12)
    assert [row.role for row in rows] == ["base", "method", "method"]
    rows = summarise(records[1:])
    assert [row.verdict for row in rows] == ["no base to compare with"] * 2
    assert [row.cost for row in rows] == [None, None]
    assert summarise([]) == []


def test_of_two_records_of_a_run_the_last_counts():
    (group,) = group_records([record("SGD", 0.1, 0, role="base"), record("SGD", 0.9, 0, role="base")])
    assert group.finished("test_accuracy") == {0: 0.9}


@settings(max_examples=25)
@given(st.randoms())
def test_the_table_does_not_depend_on_the_order_of_records(chance):
    records = [*comparison(3), diverged("SAM rho=0.1", 7, cost=2.0)]
    assert summarise(chance.sample(records, len(records))) == summarise(records)


def test_values_that_are_not_finite_numbers_become_none():
    assert [number(x) for x in (1, 0.5, "nan", None, float("inf"), True)] == [1.0, 0.5, None, None, None, None]
