"""Simultaneous intervals, words that agree with them, and variances that rows share."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

scipy_stats = pytest.importorskip("scipy.stats")

from steppe.lab.statistics import Difference, difference_of, judged  # noqa: E402

numbers = st.floats(-10, 10).map(lambda x: round(x, 3))


def made(values: list[float]) -> Difference:
    found = difference_of(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0), "SGD")
    assert found is not None
    return found


@given(
    st.integers(3, 9).flatmap(lambda n: st.lists(st.lists(numbers, min_size=n, max_size=n), min_size=1, max_size=7)),
    st.booleans(),
)
def test_verdict_and_interval_agree(rows, larger):
    for one in judged([made(values) for values in rows], larger):
        if one.mean.low is None or one.mean.high is None:
            continue
        beyond = one.mean.low > 0 or one.mean.high < 0
        assert beyond == (one.verdict in ("better", "worse"))
        assert beyond == (one.adjusted < 0.05) or one.adjusted == pytest.approx(0.05, rel=1e-6)
        if "better" in one.verdict:
            assert (one.mean.value > 0) == larger
        assert (one.p < 0.05 and not beyond) == one.verdict.startswith("probably")


@given(st.lists(st.lists(numbers, min_size=4, max_size=4), min_size=2, max_size=6), st.randoms())
def test_the_order_of_rows_does_not_matter(rows, chance):
    order = chance.sample(range(len(rows)), len(rows))
    together = judged([made(values) for values in rows])
    for place, one in zip(order, judged([made(rows[k]) for k in order]), strict=True):
        assert one.verdict == together[place].verdict
        assert one.p == pytest.approx(together[place].p, rel=1e-9, abs=1e-12)


def test_many_seeds_are_judged_by_their_own_variance_with_sidak():
    draw = random.Random(0)
    rows = [[draw.gauss(k, 1 + k) for _ in range(8)] for k in range(5)]
    for values, one in zip(rows, judged([made(v) for v in rows]), strict=True):
        p = scipy_stats.ttest_1samp(values, 0.0).pvalue
        low, high = scipy_stats.ttest_1samp(values, 0.0).confidence_interval(0.95**0.2)
        assert one.p == pytest.approx(p, rel=1e-9)
        assert one.adjusted == pytest.approx(1 - (1 - p) ** 5, rel=1e-9)
        assert (one.mean.low, one.mean.high) == (pytest.approx(low, rel=1e-9), pytest.approx(high, rel=1e-9))


def test_few_seeds_share_a_variance_by_hand():
    """Three rows of three seeds, uncorrelated, variances 1, 4, 1: the shared one is 2, the second keeps its own 4."""
    rows = [[9.0, 10.0, 11.0], [-2.0, 4.0 - 2.0, 0.0], [1.0, 0.0, -1.0]]
    found = judged([made(values) for values in rows])
    assert found[0].mean.error == pytest.approx(math.sqrt(2 / 3))
    assert found[1].mean.error == pytest.approx(math.sqrt(4 / 3))
    # S = [[1, 1, -1], [1, 4, -1], [-1, -1, 1]]: tr 6, tr S² 24; corrected for bias 24 − 36/2 = 6; halfway 15
    degrees = min(2 * 36 / 15, 2 * 3 / 1.5)
    t = 10 / math.sqrt(2 / 3)
    assert found[0].p == pytest.approx(2 * scipy_stats.t.sf(t, degrees), rel=1e-9)


def test_several_noisy_rows_do_not_widen_the_others():
    """They hid each other from the test of the largest: the first row was +3 [−13.6, +19.6], "no difference seen"."""
    calm = [[3.0, 3.25, 2.75], [0.1, -0.2, 0.1], [-0.2, 0.1, 0.1]]
    wild = [[17.4, 22.3, 27.1], [5.0, 11.2, 17.0], [3.0, 9.0, 15.2], [16.0, 22.0, 27.0]]
    found = judged([made(v) for v in [*calm, *wild]])
    for values, one in zip([*calm, *wild], found, strict=True):
        assert one.mean.error == pytest.approx(scipy_stats.sem(values))
        assert one.p == pytest.approx(scipy_stats.ttest_1samp(values, 0.0).pvalue)
    assert found[0].verdict == "better"


def test_with_three_seeds_a_row_that_stands_out_ends_the_sharing():
    """Two degrees of freedom do not tell a quiet row from a noisy one that looks quiet by chance."""
    rows = [[0.9, 1.0, 1.1], [0.0, 0.1, -0.1], [0.5, 0.45, 0.4], [-127.0, -22.0, -75.0]]
    for values, one in zip(rows, judged([made(v) for v in rows]), strict=True):
        assert one.mean.error == pytest.approx(scipy_stats.sem(values))


def test_a_row_that_diverges_is_judged_on_its_own():
    calm = [[0.9, 1.0, 1.1, 1.0], [0.0, 0.1, -0.1, 0.1], [0.5, 0.45, 0.4, 0.5], [-0.1, 0.05, 0.1, 0.0]]
    wild = [-127.0, -22.0, -75.0, -10.0]
    without, beside = judged([made(v) for v in calm]), judged([made(v) for v in [*calm, wild]])
    assert beside[-1].mean.error == pytest.approx(scipy_stats.sem(wild))
    assert beside[-1].p == pytest.approx(scipy_stats.ttest_1samp(wild, 0.0).pvalue)
    assert [one.mean.error for one in beside[:-1]] == pytest.approx([one.mean.error for one in without])
    assert beside[0].verdict == "better"


def test_probably_names_the_number_of_seeds_that_would_decide():
    rows = [[1.0, 0.2, 0.9, 1.4, 0.3, 0.8, 0.1, 1.3]] + [[(-1.0) ** s * k for s in range(8)] for k in range(1, 90)]
    one = judged([made(v) for v in rows])[0]
    assert one.verdict == "probably better" and one.needed is not None and one.needed > 8
    assert one.mean.low is not None and one.mean.low < 0 < one.mean.value
    spread, level = scipy_stats.tstd(rows[0]), 1 - 0.95 ** (1 / 90)
    halves = [scipy_stats.t.ppf(1 - level / 2, n - 1) * spread / math.sqrt(n) for n in (one.needed - 1, one.needed)]
    assert halves[1] < one.mean.value <= halves[0]


def test_the_needed_seeds_of_equal_differences_are_those_of_the_sign_test():
    """The same gain in each seed, seven comparisons: 2/2⁷ and 2/2⁸ are not enough after the correction, 2/2⁹ is."""
    draw = random.Random(0)
    others = [[draw.gauss(0, 1) for _ in range(9)] for _ in range(6)]
    found = [judged([made([1.0] * n), *(made(values[:n]) for values in others)])[0] for n in (7, 8, 9)]
    assert [one.verdict for one in found] == ["probably better", "probably better", "better"]
    assert (found[0].p, found[0].mean.low, found[0].needed, found[1].needed) == (2.0**-6, None, 9, 9)


def test_the_same_comparison_counts_once():
    one, two = [1.0, 1.2, 0.9, 1.1, 1.0, 1.3, 0.8], [0.1, 0.3, -0.2, 0.2, 0.0, 0.1, -0.1]
    assert judged([made(one), made(two), made(one)])[0] == judged([made(one), made(two)])[0]


def test_type_i_error_with_a_diverging_row():
    """A small, seeded part of studies/verdicts: of 300 tables without any effect at most 5 % have a verdict."""
    draw = random.Random(1)
    wrong = 0
    for _ in range(300):
        base = [draw.gauss(0, 1) for _ in range(5)]
        rows = [[draw.gauss(0, spread) - b for b in base] for spread in (1, 1, 1, 30)]
        wrong += any(one.verdict in ("better", "worse") for one in judged([made(v) for v in rows]))
    assert wrong <= 15
