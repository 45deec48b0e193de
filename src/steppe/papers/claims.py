"""What a paper claims, and whether our runs agree.

A `Claim` is one number of a paper with its cell. A `Trend` is a statement of the paper in words, with a function that
checks it against our results. The verdict on a statement has three separate parts: the direction (in how many columns
our results point the same way as the paper's), the evidence (in how many of them the difference is significant, and
with which n), and the scale of our runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..lab.report.formatting import is_share
from ..lab.statistics import FEWEST, Difference, Group, Mean, judged, mean_of, paired
from .experiment import Experiment
from .store import Results

REPRODUCED, NOT_REPRODUCED, SMALLER, NOT_RUN = "reproduced", "not reproduced", "run at smaller scale", "not run"
OPEN = "in the paper's direction, not beyond doubt"  # a verdict on statements only
NEAR = 2.0  # two numbers agree if they are within this many combined standard errors


@dataclass(frozen=True)
class Claim:
    """One number of a paper. Accuracies are shares, from 0 to 1."""

    experiment: str
    cell: str
    value: float
    error: float | None = None  # the number after ± in the paper, see `spread`
    n: int | None = None  # the number of runs in the paper; None if it is not stated
    metric: str = "test_accuracy"
    spread: str = "standard error"  # the meaning of the paper's ±; "unstated" is taken for a standard error


@dataclass(frozen=True)
class Judged:
    """A claim with our result and the verdict."""

    claim: Claim
    verdict: str
    ours: Mean | None = None
    scale: str = ""
    apart: float | None = None  # ours minus the paper's, in combined standard errors
    note: str = ""

    @property
    def n(self) -> int:
        """The number of runs behind our result."""
        return 0 if self.ours is None else self.ours.n


def judge(claim: Claim, experiments: dict[str, Experiment], results: Results) -> Judged:
    """The verdict on a claim: reproduced if our number is within two combined standard errors of the paper's."""
    experiment = experiments[claim.experiment]
    scale, group = results.largest(experiment, claim.cell)
    ours = group.mean(claim.metric)
    diverged = f"{len(group.diverged)} of {len(group.records)} runs diverged" if group.diverged else ""
    if ours is None:
        return Judged(claim, NOT_REPRODUCED if diverged and scale == "full" else NOT_RUN, scale=scale, note=diverged)
    if ours.error is None or ours.n < FEWEST or scale != "full" or experiment.stands_in:
        few = f"n = {ours.n}, too few to tell" if ours.n < FEWEST else ""
        return Judged(claim, SMALLER, ours, scale, note=", ".join(filter(None, (few, diverged))))
    combined = math.hypot(ours.error, claim.error or 0.0)
    difference = ours.value - claim.value
    apart = difference / combined if combined else math.copysign(math.inf, difference) if difference else 0.0
    same = abs(apart) <= NEAR and not diverged
    note = diverged if claim.error is not None else ", ".join(filter(None, (diverged, "the paper gives no spread")))
    return Judged(claim, REPRODUCED if same else NOT_REPRODUCED, ours, scale, apart, note)


# Trends


@dataclass(frozen=True)
class Finding:
    """Whether a trend holds in our results. `holds` is None if nothing was run."""

    holds: bool | None
    details: str = ""  # the numbers behind it
    n: int = 0
    scale: str = "full"
    missing: int = 0  # number of comparisons of the trend that were not run
    part: str = ""  # direction and evidence: in how many columns
    towards: bool = False  # whether every column that was run points in the paper's direction
    at: str = ""  # the scale in words

    def short(self, verdict: str) -> str:
        """Direction, evidence with n, and scale."""
        if self.holds is None:
            return verdict
        seen = self.part or f"{'it holds' if self.holds else 'it does not hold'} (n = {self.n})"
        return "; ".join(filter(None, (seen, self.at)))

    def words(self, verdict: str) -> str:
        """Direction, evidence and scale, with the numbers behind them."""
        first = self.details[:1]
        details = (first.upper() if first.isascii() else first) + self.details[1:]  # a Greek letter keeps its case
        return f"{self.short(verdict)}. {details}" if details else self.short(verdict)


NOTHING = Finding(None)


@dataclass(frozen=True)
class Trend:
    """A statement of a paper in words, and how to check it."""

    name: str
    experiment: str
    text: str
    check: Callable[[Experiment, Results], Finding]
    ours: bool = False  # a question of ours, which the paper does not answer

    def judge(self, experiments: dict[str, Experiment], results: Results) -> tuple[str, Finding]:
        """The verdict, and what it is based on."""
        experiment = experiments[self.experiment]
        found = self.check(experiment, results)
        if found.holds is None:
            return NOT_RUN, found
        found = replace(found, at=_scale(experiment, found))
        if found.scale != "full" or experiment.stands_in or found.n < FEWEST or (found.holds and found.missing):
            return SMALLER, found  # if it holds in some columns, it need not hold in those that were not run
        return (REPRODUCED if found.holds else OPEN if found.towards else NOT_REPRODUCED), found


def _scale(experiment: Experiment, found: Finding) -> str:
    """The scale of our runs in words."""
    if found.scale == "full":
        text = "at full scale"
    else:
        part = "" if experiment.share == 1 else f" on {100 * experiment.share:g} % of the data"
        text = (
            f"at 1/{experiment.shorter} of the paper's length" if experiment.shorter > 1 else "at small scale"
        ) + part
    return f"{text}, in place of the paper's problem" if experiment.stands_in else text


@dataclass(frozen=True)
class Contest:
    """Two cells that a paper ranks: `better` above `worse` in the metric (`larger=False`: below)."""

    better: str
    worse: str
    where: str = ""  # name of the column in texts
    stands_in: bool = False  # runs in place of the paper's: counts if it was run, but is not missing otherwise

    @property
    def cells(self) -> tuple[str, str]:
        """The names of both cells."""
        return self.better, self.worse


def contests(
    pairs: Iterable[Contest],
    metric: str = "test_accuracy",
    larger: bool = True,
    way: str = "in the paper's direction",
) -> Any:
    """A check that compares pairs of cells seed by seed, with simultaneous 95 % intervals for all of them.

    The trend holds if for every pair that was run the interval is beyond zero in the direction that the paper states.
    `way` is what the finding calls this direction.
    """
    listed = list(pairs)

    def check(experiment: Experiment, results: Results) -> Finding:
        for scale in ("full", "small"):
            tried = [(c, _difference(experiment, results, c, metric, larger, scale)) for c in listed]
            found = [(contest, difference) for contest, difference in tried if difference is not None]
            cells = {cell for contest, _ in found for cell in contest.cells}
            if found:
                return weigh(found, {cell: len(results.of(experiment, cell, scale).diverged) for cell in cells}, scale)
        return NOTHING

    def weigh(found: list[tuple[Contest, Difference]], gone: dict[str, int], scale: str) -> Finding:
        """A cell with diverged runs does not count as better: only its other runs can be compared."""
        found = [(c, d) for (c, _), d in zip(found, judged([d for _, d in found]), strict=True)]
        held = sum(d.verdict == "better" and not gone[c.better] for c, d in found)
        lines = [
            f"{c.where or c.better}: {interval_text(d.mean, metric, larger)}{_diverged(c, gone)}" for c, d in found
        ]
        missing = sum(not c.stands_in for c in listed) - sum(not c.stands_in for c, _ in found)
        same = sum(d.mean.value > 0 for _, d in found)
        n, total = min(d.n for _, d in found), len(found)
        columns = f"in {same} of {total} comparisons" if len(listed) > 1 else "" if same else "not "
        seen = f"{way} {columns}" if len(listed) > 1 else f"{columns}{way}"
        doubt = f"in {held or 'none'}" if len(listed) > 1 else "" if held else "not "
        sure = f"beyond doubt {doubt}" if len(listed) > 1 else f"{doubt}beyond doubt"
        part = f"{seen}; {sure} (n = {n})" + (f"; {missing} not run" if missing else "")
        holds = held == total > 0
        return Finding(holds, "; ".join(lines), n, scale, missing, part, same == total)

    return check


def _diverged(contest: Contest, gone: dict[str, int]) -> str:
    """How many runs of both cells diverged, in words."""
    mine, other = gone[contest.better], gone[contest.worse]
    return (f", {mine} diverged" if mine else "") + (f", {other} of the other diverged" if other else "")


def _difference(
    experiment: Experiment, results: Results, contest: Contest, metric: str, larger: bool, scale: str
) -> Difference | None:
    if experiment.follows is not None and not {cell.name for cell in experiment.cells}.issuperset(contest.cells):
        return None  # other results decide whether there is such a cell: it is not there yet
    one, other = (results.of(experiment, cell, scale) for cell in contest.cells)
    return paired(one, other, metric) if larger else paired(other, one, metric)


def lost(group: Group, reference: float) -> int:
    """How many trainings are lost: diverged, or ended below half of the accuracy `reference`."""
    return len(group.diverged) + sum(record["final"]["test_accuracy"] < reference / 2 for record in group.done)


def interval_text(mean: Mean, metric: str, larger: bool = True) -> str:
    """A difference with its interval and n. Where smaller is better, it was computed with the opposite sign."""
    factor, unit = (100, " points") if is_share(metric) else (1, "")
    sign = 1 if larger else -1
    shown = f"{sign * factor * mean.value:+.3g}{unit}"
    if mean.low is None or mean.high is None:
        return f"{shown} (n = {mean.n}, no interval)"
    ends = sorted((sign * factor * mean.low, sign * factor * mean.high))
    return f"{shown} ({ends[0]:+.3g} to {ends[1]:+.3g}, n = {mean.n})"


def falls_along(cells: Sequence[str], metric: str) -> Any:
    """A check that a number falls from cell to cell, by the t interval of its slope over their ranks."""

    def check(experiment: Experiment, results: Results) -> Finding:
        for scale in ("full", "small"):
            groups = [results.of(experiment, cell, scale) for cell in cells]
            values = [group.finished(metric) for group in groups]
            seeds = sorted(set.intersection(*(set(v) for v in values))) if values else []
            if seeds:
                slopes = [-_slope([v[seed] for v in values]) for seed in seeds]
                mean = mean_of(slopes)
                ends = " → ".join(f"{sum(v[s] for s in seeds) / len(seeds):.3g}" for v in values)
                sure = mean.low is not None and mean.low > 0 and len(seeds) >= FEWEST
                clear = "significant" if sure else "not significant"
                return Finding(sure, f"{ends}: {'falls' if mean.value > 0 else 'does not'}, {clear}", len(seeds), scale)
        return NOTHING

    return check


def _slope(values: Sequence[float]) -> float:
    middle = (len(values) - 1) / 2
    weights = [i - middle for i in range(len(values))]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(w * w for w in weights)


def claims_table(
    experiment: str, columns: Sequence[str], rows: dict[str, str], *, percent: bool = False, **common: Any
) -> list[Claim]:
    """Claims from a table as printed: a row's numbers in the order of the columns, `-` where there is none.

    >>> claims_table("s0/table1", ("a", "b"), {"sam": "95.3±0.1 -"}, percent=True)[0]
    Claim(experiment='s0/table1', cell='a/sam', value=0.953, error=0.001, ...)
    """
    found = []
    for row, text in rows.items():
        numbers = text.split()
        if len(numbers) != len(columns):
            raise ValueError(f"{experiment}, {row}: {len(numbers)} numbers for {len(columns)} columns")
        for column, number in zip(columns, numbers, strict=True):
            if number != "-":
                value, _, error = number.partition("±")
                scale = 100 if percent else 1
                shown = round(float(value) / scale, 7), round(float(error) / scale, 7) if error else None
                found.append(Claim(experiment, f"{column}/{row}", *shown, **common))
    return found
