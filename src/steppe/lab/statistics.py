"""Statistics of runs with several seeds: means, intervals, paired differences, and verdicts in words.

A *group* is all runs of one recipe, which differ only in the seed; a *problem* is the task (data and model). Within a
problem every group is compared with the base, seed by seed: the same seed means the same initial weights and the same
batches, so the differences within a seed have less variance than the difference of the means. Intervals are 95 % t
intervals. Verdicts are based on the t test of the paired differences, with Holm's correction over all methods of the
problem.

>>> mean_of([1.0, 2.0, 3.0])
Mean(n=3, value=2.0, error=0.577..., low=-0.484..., high=4.484...)
>>> holm([0.01, 0.04, 0.03])
[0.03, 0.06, 0.06]
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Any

from ..support.student import t_quantile
from .records import number, seed_of, value_of

CONFIDENCE = 0.95
FEWEST = 3  # fewest pairs for a verdict
EQUAL = 0.05  # relative difference of gradient counts up to which two costs are equal
_METHOD = ("method", "auxiliary")
_LENGTH = ("epochs", "schedule", "warmup")


@dataclass(frozen=True)
class Mean:
    """A mean of n values. Without a spread (one value, or all equal) there is no interval."""

    n: int
    value: float
    error: float | None = None  # standard error
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Difference:
    """Paired differences, this group minus another. `adjusted` is p after Holm's correction."""

    against: str
    mean: Mean
    p: float
    adjusted: float = 1.0
    verdict: str = ""
    family: int = 1  # number of comparisons in Holm's correction

    @property
    def n(self) -> int:
        """The number of seeds that both groups have."""
        return self.mean.n


@dataclass
class Group:
    """The runs of one recipe, with different seeds."""

    label: str
    role: str
    recipe: dict[str, Any]  # without the seed
    records: list[Any] = field(default_factory=list)  # of runs, or the lines of a paper's results

    @property
    def problem(self) -> str:
        """The problem as text."""
        return problem_of(self.recipe)

    def finished(self, metric: str) -> dict[Any, float]:
        """The metric of each finished run, by seed."""
        found = {seed_of(r): value_of(r, metric) for r in self.records if r.get("status") == "done"}
        return {seed: value for seed, value in found.items() if value is not None}

    @property
    def done(self) -> list[Any]:
        """The finished runs with a finite loss or accuracy."""
        return [r for r in self.records if r.get("status") == "done" and not _lost(r)]

    @property
    def diverged(self) -> list[Any]:
        """The runs that diverged, or finished without a finite result."""
        return [r for r in self.records if r.get("status") == "diverged" or (r.get("status") == "done" and _lost(r))]

    @property
    def unfinished(self) -> int:
        """The number of runs that have not ended."""
        return len(self.records) - len(self.done) - len(self.diverged)

    def mean(self, metric: str) -> Mean | None:
        """The mean over finished runs."""
        values = list(self.finished(metric).values())
        return mean_of(values) if values else None


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
    difference: Difference | None
    equal_cost: Difference | None
    verdict: str
    reasons: tuple[str, ...]  # why runs diverged
    group: Group = field(repr=False, compare=False)


def summarise(
    records: Iterable[Any], metric: str = "test_accuracy", base: str | None = None, *, confidence: float = CONFIDENCE
) -> list[Row]:
    """One row per group: the base first, then the base trained longer, then the methods by mean, best first.

    `base` is the label of the group to compare with; by default it is the group with the role "base". A diverged run
    has no value: the row counts it, and a group with diverged runs is never called better.
    """
    rows = []
    groups = group_records(records)
    for problem in dict.fromkeys(group.problem for group in groups):
        rows += _rows([g for g in groups if g.problem == problem], metric, base, confidence)
    return rows


def _rows(groups: list[Group], metric: str, base: str | None, confidence: float) -> list[Row]:
    bases = [g for g in groups if (g.role == "base" if base is None else g.label == base)]
    references = bases + [g for g in groups if g.role == "equal-cost" and g not in bases]
    rows = []
    for group in groups:
        reference = None if group in bases else _base_of(group, bases)
        seconds, mine = group.mean("seconds"), _average(group, "gradients")
        against = group if group in bases else reference
        theirs = against and _average(against, "gradients")
        base_seconds = against and against.mean("seconds")
        equal = None if group in references else _equal_cost(group, references)
        row = Row(
            label=group.label,
            role="base" if group in bases else "method" if group.role == "base" else group.role,
            problem=group.problem,
            n=len(group.finished(metric)),
            diverged=len(group.diverged),
            unfinished=group.unfinished,
            mean=None if not group.finished(metric) else mean_of(list(group.finished(metric).values()), confidence),
            gradients=mine,
            seconds=seconds,
            cost=_ratio(mine, theirs),
            time=_ratio(seconds and seconds.value, base_seconds and base_seconds.value),
            difference=reference and paired(group, reference, metric, confidence),
            equal_cost=equal and paired(group, equal, metric, confidence),
            verdict="",
            reasons=tuple(str(r.get("verdict") or "diverged") for r in group.diverged),
            group=group,
        )
        rows.append(row)
    # Three families of comparisons: methods, training longer, methods at equal cost.
    for kind, role in (("difference", "method"), ("difference", "equal-cost"), ("equal_cost", "method")):
        _correct(rows, kind, role, larger_is_better(metric), confidence)
    rows = [replace(row, verdict=_verdict(row, _base_of(row.group, bases) is not None)) for row in rows]
    return sorted(rows, key=lambda row: _place(row, larger_is_better(metric)))


def _correct(rows: list[Row], kind: str, role: str, larger: bool, confidence: float) -> None:
    """Apply Holm's correction to one family of comparisons and set the verdicts."""
    found = [(i, d) for i, row in enumerate(rows) if row.role == role and (d := getattr(row, kind)) is not None]
    for (i, d), adjusted in zip(found, holm([d.p for _, d in found]), strict=True):
        if d.n < FEWEST:
            word = "n too small to tell"
        elif adjusted >= 1 - confidence:
            word = "no difference seen"
        else:
            word = "better" if (d.mean.value > 0) == larger else "worse"
        rows[i] = replace(rows[i], **{kind: replace(d, adjusted=adjusted, verdict=word, family=len(found))})


def _verdict(row: Row, has_base: bool) -> str:
    if row.n == 0:
        return "all diverged" if row.diverged else "unfinished" if row.unfinished else "not measured"
    if row.diverged:
        return "some diverged"
    if row.role == "base":
        return "base"
    if row.difference is None:
        return "no seed in common with the base" if has_base else "no base to compare with"
    return row.difference.verdict


def _place(row: Row, larger: bool) -> tuple[int, float]:
    order = {"base": 0, "equal-cost": 1}.get(row.role, 2)
    if order == 1:
        return order, row.gradients or math.inf
    value = math.inf if row.mean is None else -row.mean.value if larger else row.mean.value
    return order, value


def mean_of(values: Sequence[float], confidence: float = CONFIDENCE) -> Mean:
    """Mean, standard error and t interval."""
    n, value = len(values), math.fsum(values) / len(values)
    if n < 2:
        return Mean(n, value)
    spread = math.sqrt(math.fsum((x - value) ** 2 for x in values) / (n - 1))
    if spread <= 1e-12 * max(map(abs, values)):  # equal up to rounding: there is no estimate of the spread
        return Mean(n, value, 0.0)
    error = spread / math.sqrt(n)
    half = t_quantile(0.5 + confidence / 2, n - 1) * error
    return Mean(n, value, error, value - half, value + half)


def paired(one: Group, other: Group, metric: str, confidence: float = CONFIDENCE) -> Difference | None:
    """Differences over the seeds that both have; None if there are none."""
    mine, theirs = one.finished(metric), other.finished(metric)
    differences = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
    if not differences:
        return None
    mean = _unrounded(mean_of(differences, confidence), list(mine.values()) + list(theirs.values()))
    return Difference(other.label, mean, p_value(mean))


def p_value(mean: Mean) -> float:
    """The two-sided p value of the t test that the expected value is zero.

    The t test needs a spread, but accuracies on a few hundred examples are often equal. Without a spread it is the sign
    test, whose p is 2/2ⁿ if all values have the same sign.
    """
    if mean.value == 0 or mean.error is None:
        return 1.0
    if mean.error == 0:
        return 2.0 ** (1 - mean.n)
    from scipy.special import stdtr  # the same numbers as scipy.stats.t, which takes a second to import

    return float(2 * stdtr(mean.n - 1, -abs(mean.value) / mean.error))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the k-th smallest of m is multiplied by m − k + 1; results never decrease."""
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def group_records(records: Iterable[Any]) -> list[Group]:
    """Records grouped by recipe, in the order given. Of two records of the same run the last one counts."""
    groups: dict[str, Group] = {}
    for record in map(plain, records):
        recipe = {name: value for name, value in record["recipe"].items() if name != "seed"}
        key = json.dumps([recipe, record.get("role")], sort_keys=True, default=str)
        group = groups.setdefault(key, Group(str(record["label"]), record.get("role", "method"), recipe))
        group.records = [r for r in group.records if seed_of(r) != seed_of(record)] + [record]
    for group in groups.values():
        group.records.sort(key=lambda r: (str(type(seed_of(r))), seed_of(r)))
    _name_apart(list(groups.values()))
    return list(groups.values())


def plain(record: Any) -> dict[str, Any]:
    """A record as a dictionary, from a mapping, a dataclass or another object."""
    if isinstance(record, Mapping):
        return dict(record)
    if is_dataclass(record) and not isinstance(record, type):
        return asdict(record)
    return dict(vars(record))


def _name_apart(groups: list[Group]) -> None:
    """Add to the labels of groups with the same problem and label the settings in which they differ."""
    alike: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        alike.setdefault((group.problem, group.label), []).append(group)
    for same in alike.values():
        if len(same) > 1:
            differing = [k for k in same[0].recipe if any(g.recipe.get(k) != same[0].recipe[k] for g in same)]
            for group in same:
                said = ", ".join(f"{k}={group.recipe.get(k)}" for k in differing) or group.role
                group.label = f"{group.label} ({said})"


def larger_is_better(metric: str) -> bool:
    """Whether larger is better: for accuracies, but not for losses, times and curvature."""
    return metric.endswith("accuracy")


def problem_of(recipe: Mapping[str, Any]) -> str:
    """The problem as a short text: the data, the model, and changes to the data."""
    said = [str(recipe.get("data", "")), str(recipe.get("model", ""))]
    if recipe.get("model_settings"):
        settings = recipe["model_settings"]
        said.append(
            ", ".join(f"{k}={v}" for k, v in settings.items()) if isinstance(settings, Mapping) else str(settings)
        )
    if recipe.get("share") not in (None, 1, 1.0):
        said.append(f"first {100 * recipe['share']:g} %")
    if recipe.get("label_noise"):
        said.append(f"{100 * recipe['label_noise']:g} % label noise")
    if recipe.get("hold_out"):
        said.append(f"tested on {100 * recipe['hold_out']:g} % held out")
    return ", ".join(said)


def _base_of(group: Group, bases: list[Group]) -> Group | None:
    """The base with the same recipe except the method; else also except length and schedule; else the only base."""
    for own in (_METHOD, _METHOD + _LENGTH):
        alike = [base for base in bases if _same_recipe(group, base, own)]
        if alike:
            return min(alike, key=lambda base: _length_apart(group, base))
    return bases[0] if len(bases) == 1 else None


def _length_apart(group: Group, base: Group) -> tuple[float, bool]:
    """How far a run is from this base trained longer by the factor in its label: in epochs, then in the schedule."""
    mine, theirs = group.recipe, base.recipe
    epochs, short = number(mine.get("epochs")) or 0.0, number(theirs.get("epochs")) or 0.0
    said = re.search(r"(\d+\.?\d*)x longer", group.label) if group.role == "equal-cost" else None
    if said is None and group.role == "equal-cost":  # another label: prefer a base of which it is a multiple
        return epochs % short if short else math.inf, False
    factor = float(said[1]) if said else 1.0
    schedule = stretched(str(theirs.get("schedule")), factor)
    alike = (mine.get("schedule"), mine.get("warmup")) == (schedule, theirs.get("warmup"))
    return abs(epochs - factor * short), not alike


def stretched(schedule: str, factor: float) -> str:
    """The schedule of a run that is longer by a factor."""
    found = re.fullmatch(r"step:(.+)/((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?)", schedule)
    return f"step:{found[1]}/{float(found[2]) * factor:g}" if found else schedule


def _equal_cost(group: Group, references: list[Group]) -> Group | None:
    """The base, or the base trained longer, with the same number of gradient evaluations; None if there is none."""
    mine = _average(group, "gradients")
    references = [g for g in references if _same_recipe(group, g, _METHOD + _LENGTH)] or references
    counts = [(g, theirs) for g in references if (theirs := _average(g, "gradients"))]
    if not mine or not counts:
        return None
    nearest, theirs = min(counts, key=lambda pair: abs(pair[1] / mine - 1))
    return nearest if abs(theirs / mine - 1) <= EQUAL else None


def _same_recipe(one: Group, other: Group, apart_from: tuple[str, ...]) -> bool:
    names = (set(one.recipe) | set(other.recipe)).difference(apart_from)
    return all(one.recipe.get(name) == other.recipe.get(name) for name in names)


def _unrounded(mean: Mean, values: list[float]) -> Mean:
    """Treat a mean or a spread of the size of rounding errors as zero."""
    dust = 1e-12 * max(map(abs, values))
    if abs(mean.value) <= dust:
        mean = replace(mean, value=0.0)
    if mean.error is not None and mean.error <= dust:
        mean = replace(mean, error=0.0, low=None, high=None)
    return mean


def _average(group: Group, metric: str) -> float | None:
    values = list(group.finished(metric).values())
    return math.fsum(values) / len(values) if values else None


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def _lost(record: Mapping[str, Any]) -> bool:
    final = record.get("final") or {}
    return not any(number(final.get(name)) is not None for name in ("test_accuracy", "test_loss"))
