"""Numbers and rows as text."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")

from helpers.report_records import comparison, diverged, record, rows
from steppe.lab.report import formatting as w
from steppe.lab.report.settings import display_value
from steppe.lab.statistics import Mean


def test_a_row_in_a_sentence():
    sam, gam = rows(comparison(3))["SAM rho=0.1"], rows(comparison(3))["GAM T=2"]
    one, equal = (w.difference(d, "test_accuracy") for d in (sam.difference, sam.equal_cost))
    assert w.sentence(sam, "test_accuracy") == (
        f"{one.replace(' ', ' points ', 1)} over the base, 2.0× the gradients: better (n = 3). "
        f"Against the best base at no more cost, SGD, 2x longer, {equal}: better (n = 3)."
    )
    assert w.sentence(gam, "test_accuracy").endswith("(n = 3). Not compared at equal cost.")


def test_sentences_for_few_seeds_and_diverged_runs():
    one = [record("SGD", 0.9, 0, role="base"), record("SAM", 0.88, 0, cost=2.0), diverged("GAM", 0)]
    assert w.sentence(rows(one)["SAM"], "test_accuracy") == (
        "−2.00 points against the base, 2.0× the gradients: n too small to tell (n = 1). Not compared at equal cost."
    )
    assert w.sentence(rows(one)["GAM"], "test_accuracy") == "all diverged (1 of 1 runs)."
    assert w.base_sentence(rows(one)["SGD"], "test_accuracy") == "90.00 % test accuracy (n = 1), 400 gradients, 2 s."
    some = [record("SGD", 0.9 + s / 100, s, role="base") for s in range(4)]
    some += [record("SAM", 0.8 + s / 90, s) for s in range(3)] + [diverged("SAM", 3)]
    assert w.sentence(rows(some)["SAM"], "test_accuracy").startswith("1 of 4 runs diverged; the others: −9.8")
    assert w.verdict(rows(some)["SAM"]) == "1 of 4 diverged; the others: worse"


def test_probably_is_followed_by_the_number_of_seeds_that_would_decide():
    base = [0.90, 0.91, 0.92, 0.93, 0.92, 0.91, 0.9, 0.94]
    records = [record("SGD", a, s, role="base") for s, a in enumerate(base)]
    gain = [0.010, 0.016, 0.001, 0.012, -0.001, 0.002, 0.001, 0.012]  # p = 0.03 alone
    for k in range(3):
        records += [record(f"M{k}", a + gain[(s + k) % 8], s) for s, a in enumerate(base)]
    row = rows(records)["M0"]
    assert row.difference.p < 0.05 < row.difference.adjusted and row.difference.mean.low < 0
    assert w.verdict(row) == f"probably better; about {row.difference.needed} seeds would tell"
    assert f": {w.verdict(row)} (n = 8)" in w.sentence(row, "test_accuracy")


def test_numbers_as_text():
    assert w.mean(Mean(3, 0.95347, 0.00148), "test_accuracy") == "95.35 ± 0.15"
    assert w.mean(Mean(3, 2.7223, 0.0783)) == "2.722 ± 0.078"
    assert w.mean(Mean(3, -120.4, 35.0)) == "−120 ± 35"
    assert w.mean(Mean(1, 2.5)) == "2.5"
    assert w.mean(None) == "–"
    assert [w.signed_value(x, "accuracy") for x in (0.011, -0.011, 0.0, -1e-9)] == ["+1.10", "−1.10", "0.00", "0.00"]
    assert [w.p_value(p) for p in (None, 1e-5, 0.0123, 0.25)] == ["–", "< 0.001", "0.012", "0.25"]
    assert [w.duration(x) for x in (0.13, 42.0, 600.0, 36000.0)] == ["0.13 s", "42 s", "10.0 min", "10.0 h"]
    assert w.count(12345) == "12\u202f345"
    assert [display_value(x) for x in (None, True, 5e-4, 123456, {"a": 1.0})] == [
        "none",
        "yes",
        "0.0005",
        "123\u202f456",
        "a=1",
    ]
