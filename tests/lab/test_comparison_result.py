"""The best method of a comparison, and the methods that it is tied with."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")

from helpers.report_records import diverged, record
from steppe.lab.comparison_result import choice_among
from steppe.lab.statistics import paired, summarise
from steppe.support.errors import UserError

NOISE = [0.0, 0.004, 0.001, 0.003, 0.002, 0.005, 0.0035, 0.0015]


def test_tied_means_not_worse_by_the_simultaneous_intervals():
    """Of six methods each is 0.3 points below SAM; alone, each would be significantly worse."""
    records = [record("SAM", 0.93 + noise, seed) for seed, noise in enumerate(NOISE)]
    for k in range(6):
        gap = [0.003 + 1.6 * (NOISE[(seed + k) % 8] - 0.0025) for seed in range(8)]
        records += [record(f"M{k}", 0.93 + noise - gap[seed], seed) for seed, noise in enumerate(NOISE)]
    records += [record("SGD", 0.80 + noise, (seed + 3) % 8, role="base") for seed, noise in enumerate(NOISE)]
    rows = summarise(records)
    groups = {row.label: row.group for row in rows}
    alone = paired(groups["SAM"], groups["M0"], "test_accuracy")
    assert alone is not None and alone.mean.low is not None and alone.mean.low > 0
    best = choice_among(rows, "test_accuracy")
    assert best.label == "SAM" and sorted(best.tied) == [f"M{k}" for k in range(6)]


def test_a_method_that_loses_the_same_in_every_seed_is_not_tied():
    """There is no interval without a spread; the sign test of ten seeds is enough."""
    records = [record("SAM", 0.93, seed) for seed in range(10)]
    records += [record("SGD", 0.92, seed, role="base") for seed in range(10)]
    assert choice_among(summarise(records), "test_accuracy").tied == ()


def test_without_a_complete_method_there_is_no_best():
    with pytest.raises(UserError, match="every run diverged or is unfinished"):
        choice_among(summarise([diverged("SAM", 0), record("SGD", 0.9, 0, status="running")]), "test_accuracy")
