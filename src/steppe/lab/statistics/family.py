"""Verdicts on all differences of a table together.

The intervals of a table are simultaneous: with probability 95 % all of them contain their true difference (Šidák's
inequality over the number of comparisons). A difference is called better or worse exactly if its interval excludes
zero. "Probably better" means that the interval of this comparison alone would exclude zero, but its simultaneous
interval does not.

With up to `POOLED` seeds the variance of a single row is a poor estimate: three seeds have two degrees of freedom. Rows
then share one variance, with three safeguards. A row whose variance is significantly larger than that of the others,
for example of a method that diverges, is left out and judged by its own. If several stand out, or with three seeds if
one does, all rows are judged by their own. No row is judged by less than its own variance. Correlated rows do not
count as independent: the degrees of freedom are Box's, ν tr(S)²/tr(S²), with S the covariance of the differences; for
few seeds tr(S²) is partly corrected for its bias. `studies/verdicts/simulate.py` simulates the type I error and the
power.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .means import CONFIDENCE, Mean, mean_of

FEWEST = 3  # a verdict needs at least this many seeds
POOLED = 6  # rows share a variance if there are at most this many seeds
# Levels of the F tests whether the row with the largest variance, or the several with the largest ones, differ from the
# others. How many are several is chosen by their variances: the level makes up for that.
_F_LEVEL, _F_LEVEL_OF_SEVERAL = 0.05, 0.001
_MOST_SEEDS = 99  # a larger number of needed seeds is not named


@dataclass(frozen=True)
class Difference:
    """The paired difference of two groups, this one minus the other, with its verdict among all of the table."""

    against: str
    mean: Mean  # after `judged`: with the table's error and simultaneous interval
    p: float  # p value of this comparison alone
    adjusted: float = 1.0  # p value corrected for all comparisons of the table
    verdict: str = ""  # "better", "probably worse", "no difference seen", ...
    family: int = 1  # number of comparisons of the table
    needed: int | None = None  # with "probably": about how many seeds would be enough for "better" or "worse"
    by_seed: Mapping[Hashable, float] = field(default_factory=dict, repr=False)

    @property
    def n(self) -> int:
        """The number of seeds that both groups have in common."""
        return self.mean.n


def difference_of(mine: Mapping[Hashable, float], theirs: Mapping[Hashable, float], against: str) -> Difference | None:
    """The difference `mine` minus `theirs`, paired over the seeds that both have; None if there are none."""
    by_seed = {seed: mine[seed] - theirs[seed] for seed in mine if seed in theirs}
    if not by_seed:
        return None
    rounding = 1e-12 * max(map(abs, [*mine.values(), *theirs.values()]))  # smaller differences count as zero
    mean = mean_of(list(by_seed.values()))
    if abs(mean.value) <= rounding:
        mean = replace(mean, value=0.0)
    if mean.error is not None and mean.error <= rounding:
        mean = replace(mean, error=0.0, low=None, high=None)
    return Difference(against, mean, p_value(mean), by_seed=by_seed)


def p_value(mean: Mean, degrees: float | None = None) -> float:
    """The two-sided p value of the t test that the expected value is zero.

    The t test needs a spread, but accuracies on a few hundred examples are often equal. Without a spread the p value is
    that of the sign test, 2/2ⁿ if all n values have the same sign.
    """
    if mean.value == 0 or mean.error is None:
        return 1.0
    if mean.error == 0:
        return 2.0 ** (1 - mean.n)
    from scipy.special import stdtr  # the same numbers as scipy.stats.t, which takes a second to import

    return float(2 * stdtr(mean.n - 1 if degrees is None else degrees, -abs(mean.value) / mean.error))


def judged(
    differences: Sequence[Difference],
    larger: bool = True,
    among: Sequence[int] = (),
    family: int | None = None,
) -> list[Difference]:
    """The differences with simultaneous intervals and verdicts. `larger`: larger values are better.

    `family` is the number of comparisons to correct for; by default the number of distinct differences.

    `among` has for each difference the number of rivals of which this is one. A method is called better than the best
    rival only if it is better than every one of them, which needs no further correction. To be worse than any one of
    them is more likely by chance the more there are, which does.

    >>> a = difference_of({0: 3.0, 1: 3.1, 2: 3.2, 3: 2.9}, {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.1}, "SGD")
    >>> judged([a])[0].verdict
    'better'
    """
    enough = [one for one in differences if one.n >= FEWEST]
    distinct = len({tuple(sorted(one.by_seed.items(), key=str)) for one in enough})  # the same comparison counts once
    size = max(distinct if family is None else family, 1)
    shared = _shared_errors(differences)
    rivals = among or [1] * len(differences)
    return [
        _judge(one, shared.get(index), size, larger, many)
        for index, (one, many) in enumerate(zip(differences, rivals, strict=True))
    ]


def _judge(one: Difference, shared: tuple[float, float] | None, family: int, larger: bool, rivals: int) -> Difference:
    if one.n < FEWEST:  # one or two seeds: no interval and no verdict
        mean = replace(one.mean, low=None, high=None)
        return replace(one, mean=mean, adjusted=1.0, verdict="n too small to tell", family=family)
    error, degrees = shared or (one.mean.error, one.n - 1.0)
    mean = replace(one.mean, error=error)
    level = 1 - CONFIDENCE ** (1 / family)
    good = (mean.value > 0) == larger
    p = p_value(mean, degrees) * (1 if good else rivals)
    p = min(p, 1.0)
    adjusted = 1 - (1 - p) ** family
    if error:
        better, worse = (_quantile(1 - level / 2 / many, degrees) * error for many in (1, rivals))
        below, above = (better, worse) if larger else (worse, better)
        mean = replace(mean, low=mean.value - below, high=mean.value + above)
        sure = abs(mean.value) > (better if good else worse)
    else:
        sure = adjusted < 1 - CONFIDENCE
    word = "better" if good else "worse"
    if sure:
        verdict, needed = word, None
    elif p < 1 - CONFIDENCE:
        verdict, needed = f"probably {word}", _seeds_needed(mean, degrees, level if good else level / rivals)
    else:
        verdict, needed = "no difference seen", None
    return replace(one, mean=mean, p=p, adjusted=adjusted, verdict=verdict, family=family, needed=needed)


def _quantile(probability: float, degrees: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))


def _seeds_needed(mean: Mean, degrees: float, level: float) -> int | None:
    """About how many seeds would be enough for a verdict, if mean and spread stay as they are; None for very many."""
    spread = (mean.error or 0.0) * math.sqrt(mean.n)
    for n in range(mean.n + 1, _MOST_SEEDS + 1):
        known = degrees / (mean.n - 1) * (n - 1) if n <= POOLED else n - 1
        if spread:
            enough = _quantile(1 - level / 2, known) * spread / math.sqrt(n) < abs(mean.value)
        else:  # the same difference in every seed: the sign test decides
            enough = 2.0 ** (1 - n) < level
        if enough:
            return n
    return None


# A variance that rows share


def _shared_errors(differences: Sequence[Difference]) -> dict[int, tuple[float, float]]:
    """Standard error and degrees of freedom of the rows that share a variance, by their index."""
    seeds = {k: frozenset(one.by_seed) for k, one in enumerate(differences) if one.n >= FEWEST}
    if not seeds:
        return {}
    common = max(seeds.values(), key=list(seeds.values()).count)
    rows = [k for k, found in seeds.items() if found == common]
    n = len(common)
    if n > POOLED or len(rows) < 3:
        return {}
    order = sorted(common, key=str)
    values = {k: [differences[k].by_seed[seed] for seed in order] for k in rows}
    constant = [k for k in rows if not differences[k].mean.error]  # often by chance: accuracies are coarse
    agreeing = _agreeing({k: values[k] for k in rows if k not in constant}, n - 1)
    if len(agreeing) < 3:
        return {}
    variance, degrees = _pooled([values[k] for k in agreeing], n - 1)
    own = {k: _covariance(values[k], values[k]) for k in agreeing}
    return {k: (math.sqrt(max(variance, own.get(k, 0.0)) / n), degrees) for k in [*agreeing, *constant]}


def _agreeing(values: Mapping[int, list[float]], freedom: int) -> list[int]:
    """The rows whose variances agree: those with the largest are dropped until an F test finds no difference.

    None, if more than one stands out clearly. Several noisy rows hide each other if only the largest is tested. And of
    several, one will look quiet by chance: judged by the variance of the quiet rows, it would be an error. With three
    seeds this is likely even if only one stands out.
    """
    from scipy.special import fdtrc

    rows = sorted(values, key=lambda k: _covariance(values[k], values[k]))
    dropped = 0  # clearly: also for the largest of as many rows

    def probability(many: int) -> float:
        """The p value of the last rows having the variance of the others."""
        rest, last = (_pooled([values[k] for k in some], freedom) for some in (rows[:-many], rows[-many:]))
        return float(fdtrc(last[1], rest[1], last[0] / rest[0]))

    while len(rows) > 1 and (p := probability(1)) < _F_LEVEL:
        dropped += p < _F_LEVEL / len(rows)
        rows.pop()
    # Up to two thirds: the few smallest of many variances are small by chance.
    apart = any(probability(many) < _F_LEVEL_OF_SEVERAL for many in range(2, 2 * len(rows) // 3 + 1))
    return [] if apart or dropped > (freedom > FEWEST - 1) else rows


def _pooled(rows: Sequence[list[float]], freedom: int) -> tuple[float, float]:
    """The mean variance of rows and its degrees of freedom."""
    matrix = [[_covariance(a, b) for b in rows] for a in rows]
    trace, count = sum(matrix[k][k] for k in range(len(rows))), len(rows)
    squares = sum(x * x for row in matrix for x in row)
    unbiased = freedom**2 / ((freedom - 1) * (freedom + 2)) * (squares - trace**2 / freedom)
    squares += (unbiased - squares) / freedom  # the full correction would be too noisy
    most = freedom * count / (1 + (count - 1) / 4)  # of independent rows whose only common part is the base
    return trace / count, min(most, freedom * trace**2 / squares) if squares > 0 else most


def _covariance(a: Sequence[float], b: Sequence[float]) -> float:
    x, y = math.fsum(a) / len(a), math.fsum(b) / len(b)
    return math.fsum((p - x) * (q - y) for p, q in zip(a, b, strict=True)) / (len(a) - 1)
