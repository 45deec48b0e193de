"""The table of a comparison: one row per group, with its cost and how it compares with the base."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .family import FEWEST, Difference, difference_of, judged
from .groups import Group, average, base_of, group_records, larger_is_better, ratio
from .means import Mean, mean_of
from .rivals import against_rivals, hardest

BASE_ROLES = ("base", "equal-cost", "rival")  # the base and its variants: what a user could do without a method


@dataclass(frozen=True)
class Row:
    """One row of the table: a group's result, its cost, and how it compares with the base."""

    label: str
    role: str
    problem: str
    n: int
    diverged: int
    unfinished: int
    mean: Mean | None
    gradients: float | None
    seconds: Mean | None
    cost: float | None  # gradient evaluations relative to the base
    time: float | None  # seconds relative to the base
    difference: Difference | None  # to the base
    equal_cost: Difference | None  # to the best base at no more than its cost
    verdict: str
    reasons: tuple[str, ...]  # why runs diverged
    group: Group = field(repr=False, compare=False)


def summarise(records: Iterable[Any], metric: str = "test_accuracy", base: str | None = None) -> list[Row]:
    """One row per group: the base first, then its rivals and the base trained longer, then the methods, best first.

    `base` is the label of the group to compare with; by default it is the group with the role "base". A diverged run
    has no value: the row counts it, and a group with diverged runs is never called better.
    """
    rows = []
    groups = group_records(records)
    for problem in dict.fromkeys(group.problem for group in groups):
        rows += _rows([g for g in groups if g.problem == problem], metric, base)
    return rows


def paired(one: Group, other: Group, metric: str) -> Difference | None:
    """The difference of two groups, paired over the seeds that both have; None if there are none."""
    return difference_of(one.finished(metric), other.finished(metric), other.label)


def against_best(best: Group, others: Sequence[Group], metric: str) -> list[Difference | None]:
    """Each other group minus the best, paired by seed, with simultaneous intervals; None without a common seed.

    A group is tied with the best unless its verdict is "worse".
    """
    found = [paired(group, best, metric) for group in others]
    judged_ones = iter(judged([one for one in found if one is not None], larger_is_better(metric)))
    return [None if one is None else next(judged_ones) for one in found]


def _rows(groups: list[Group], metric: str, base: str | None) -> list[Row]:
    bases = [g for g in groups if (g.role == "base" if base is None else g.label == base)]
    variants = bases + [g for g in groups if g.role in BASE_ROLES[1:] and g not in bases]
    rows = [_row(group, bases, metric) for group in groups]
    rivals = [[] if g in variants else against_rivals(g, variants, metric) for g in groups]
    rows = _with_verdicts(rows, rivals, larger_is_better(metric))
    rows = [replace(row, verdict=_verdict(row, base_of(row.group, bases) is not None)) for row in rows]
    return sorted(rows, key=lambda row: _sort_key(row, larger_is_better(metric)))


def _row(group: Group, bases: list[Group], metric: str) -> Row:
    reference = None if group in bases else base_of(group, bases)
    seconds, mine = group.mean("seconds"), average(group, "gradients")
    against = group if group in bases else reference
    base_seconds = against and against.mean("seconds")
    values = list(group.finished(metric).values())
    return Row(
        label=group.label,
        role="base" if group in bases else "method" if group.role == "base" else group.role,
        problem=group.problem,
        n=len(values),
        diverged=len(group.diverged),
        unfinished=group.unfinished,
        mean=mean_of(values) if values else None,
        gradients=mine,
        seconds=seconds,
        cost=ratio(mine, against and average(against, "gradients")),
        time=ratio(seconds and seconds.value, base_seconds and base_seconds.value),
        difference=reference and paired(group, reference, metric),
        equal_cost=None,
        verdict="",
        reasons=tuple(str(r.get("verdict") or "diverged") for r in group.diverged),
        group=group,
    )


def _with_verdicts(rows: list[Row], rivals: list[list[Difference]], larger: bool) -> list[Row]:
    """The rows with judged differences. All comparisons of the table are one family.

    Each row with the base is one comparison; each method with all its rivals is one more.
    """
    to_base = [row.difference for row in rows if row.difference is not None]
    to_rivals = [one for some in rivals for one in some]
    among = [1] * len(to_base) + [len(some) for some in rivals for _ in some]
    family = sum(one.n >= FEWEST for one in to_base)
    for row, some in zip(rows, rivals, strict=True):  # if the base is the only rival, it is the same comparison
        same = row.difference and row.difference.by_seed
        family += any(one.n >= FEWEST and one.by_seed != same for one in some)
    found = iter(judged([*to_base, *to_rivals], larger, among, family))
    rows = [row if row.difference is None else replace(row, difference=next(found)) for row in rows]
    judged_rivals = [[next(found) for _ in some] for some in rivals]
    return [replace(row, equal_cost=hardest(some, larger)) for row, some in zip(rows, judged_rivals, strict=True)]


def _verdict(row: Row, has_base: bool) -> str:
    if row.n == 0:
        all_diverged = row.diverged and row.diverged == len(row.group.records)
        return "all diverged" if all_diverged else "unfinished" if row.unfinished else "not measured"
    if row.diverged:
        return "some diverged"
    if row.role == "base":
        return "base"
    if row.difference is None:
        return "no seed in common with the base" if has_base else "no base to compare with"
    return row.difference.verdict


def _sort_key(row: Row, larger: bool) -> tuple[int, float]:
    order = {"base": 0, "rival": 1, "equal-cost": 2}.get(row.role, 3)
    if order == 2:
        return order, row.gradients or math.inf
    value = math.inf if row.mean is None else -row.mean.value if larger else row.mean.value
    return order, value
