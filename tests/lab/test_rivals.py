"""The best base at no more than a method's cost. The accuracy of the helper's runs rises to their end."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("scipy")

from helpers.report_records import record, rows
from steppe.lab.statistics import difference_of, judged


def test_a_method_is_compared_with_the_base_that_costs_no_more():
    records = []
    for seed in range(4):
        bump = (0.0, 0.004, 0.001, 0.003)[seed]
        records.append(record("SGD", 0.90 + bump, seed, role="base"))
        records.append(record("SGD, 2x longer", 0.93 + bump / 2, seed, role="equal-cost", epochs=8))
        longest = record("SGD, 6x longer", 0.99 + bump / 2, seed, role="equal-cost", epochs=24)
        records.append({**longest, "epochs": []})  # what it had reached before is not known
        records.append(record("SAM", 0.95 + bump, seed, cost=2.0))
    equal = rows(records)["SAM"].equal_cost
    assert equal.against == "SGD, 2x longer" and equal.mean.value == pytest.approx(0.02 + 0.002 / 2)


def test_where_longer_training_hurts_the_shorter_base_is_the_rival():
    """GAM at six times the cost was called 19.8 points better only because the base six times as long had fallen."""
    records = []
    for seed in range(4):
        bump = (0.0, 0.004, 0.001, 0.003)[seed]
        records.append(record("SGD", 0.90 + bump, seed, role="base"))
        records.append(record("SGD, 6x longer", 0.70 + bump / 2, seed, role="equal-cost", epochs=24))
        records.append(record("GAM", 0.899 + bump * 0.9, seed, cost=6.0))
    gam = rows(records)["GAM"]
    assert gam.equal_cost.against == "SGD"
    assert gam.equal_cost.by_seed == gam.difference.by_seed
    assert gam.equal_cost.verdict != "better"


def test_the_rival_that_is_hardest_to_beat_is_shown():
    """Not the one with the best mean, but the one against which the least is certain."""
    draw = [0.0, 0.004, 0.001, 0.003, 0.002, 0.005, 0.0035, 0.0015]
    records = []
    for seed, bump in enumerate(draw):
        records.append({**record("SGD", 0.90 + bump, seed, role="base"), "epochs": []})
        unsteady = record("SGD, 2x longer", 0.89 + 9 * draw[-1 - seed], seed, role="equal-cost", epochs=8)
        records.append({**unsteady, "epochs": []})
        records.append(record("SAM", 0.93 + 1.1 * bump, seed, cost=2.0))
    found = rows(records)["SAM"]
    assert found.equal_cost.against == "SGD, 2x longer" and found.difference.verdict == "better"
    assert found.equal_cost.mean.low < found.difference.mean.low


def test_a_rival_that_is_not_beaten_is_shown_even_if_it_has_no_interval():
    """Better than the best rival means better than each of them. One has too few seeds in common to say so."""
    steps = [0.0, 0.004, 0.001, 0.003, 0.002, 0.005, 0.0035]
    records = []
    for seed, bump in enumerate(steps):
        records.append({**record("SGD", 0.90 + bump, seed, role="base"), "epochs": []})
        records.append(record("MSAM", 0.93 + 1.1 * bump, seed))
    for seed in range(2):
        rival = record("SGD weight_decay=0.01", 0.89 + steps[seed], seed, role="rival", weight_decay=0.01)
        records.append({**rival, "epochs": []})
    found = rows(records)["MSAM"]
    assert found.difference.verdict == "better" and found.difference.mean.low < 0.04
    assert found.equal_cost.against == "SGD weight_decay=0.01"
    assert (found.equal_cost.n, found.equal_cost.verdict) == (2, "n too small to tell")


def test_better_than_all_needs_no_correction_and_worse_than_one_of_many_does():
    values = [1.0, 1.2, 0.9, 1.1, 1.0, 1.3, 0.8]
    one = difference_of(dict(enumerate(values)), dict.fromkeys(range(7), 0.0), "SGD")
    assert one is not None
    (alone,), (among,) = judged([one]), judged([one], among=[5])
    assert alone.mean.high is not None and among.mean.high is not None
    assert alone.mean.low == among.mean.low and among.mean.high > alone.mean.high
    (alone,), (among,) = judged([one], larger=False), judged([one], larger=False, among=[5])
    assert alone.mean.high == among.mean.high and among.p == pytest.approx(5 * alone.p)


def test_stopping_early_is_free():
    records = []
    for seed in range(3):
        base = record("SGD", 0.80 + seed / 100, seed, role="base")
        base["epochs"][1]["test_accuracy"] = 0.90 + seed / 100  # of four epochs the second is best
        records += [base, record("MSAM", 0.85 + seed / 90, seed)]
    found = rows(records)["MSAM"]
    assert found.equal_cost.against == "SGD, stopped early"
    assert found.equal_cost.mean.value == pytest.approx(0.85 - 0.90 + (1 / 90 - 1 / 100))
    assert found.difference.mean.value > 0


def test_rivals_that_were_run_count_and_diverged_ones_do_not():
    records = []
    for seed in range(3):
        records.append(record("SGD", 0.90 + seed / 100, seed, role="base"))
        records.append(record("SGD weight_decay=0.01", 0.92 + seed / 90, seed, role="rival", weight_decay=0.01))
        lost: Any = {} if seed else {"status": "diverged"}
        records.append(record("SGD momentum=0.99", 0.99, seed, role="rival", momentum=0.99, **lost))
        records.append(record("SA-SGD", 0.91 + seed / 95, seed))
    found = rows(records)
    assert found["SA-SGD"].equal_cost.against == "SGD weight_decay=0.01"
    assert found["SGD weight_decay=0.01"].difference.against == "SGD"
    assert found["SGD weight_decay=0.01"].equal_cost is None


def test_without_a_base_of_its_cost_nothing_is_compared():
    records = [record("SGD", 0.9 + s / 100, s, role="base") for s in range(3)]
    records += [record("SAM", 0.92 + s / 80, s, cost=2.0) for s in range(3)]
    assert rows(records)["SAM"].equal_cost is None
    records += [record("SGD, 2x longer", 0.91 + s / 90, s, role="equal-cost", epochs=8) for s in range(3)]
    records += [record("GNP", 0.92 + s / 80, s, cost=1.6) for s in range(3)]
    assert rows(records)["SAM"].equal_cost.against == "SGD, 2x longer"
    assert rows(records)["GNP"].equal_cost is None


def test_equal_cost_allows_five_percent_and_a_stretched_schedule():
    records = []
    for seed in range(3):
        records.append(record("SGD", 0.9 + seed / 100, seed, role="base", schedule="step:0.1/4"))
        longer = {"role": "equal-cost", "epochs": 8, "schedule": "step:0.1/8"}
        records.append(record("SGD, 2x longer", 0.91 + seed / 90, seed, **longer))
        records.append(record("SAM", 0.92 + seed / 80, seed, cost=1.95, schedule="step:0.1/4"))
    assert rows(records)["SAM"].equal_cost.against == "SGD, 2x longer"
