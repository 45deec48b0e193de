"""Groups of records: the runs of one recipe, which differ only in the seed; and the base that a group is compared with.

A *problem* is the data, changes to the data, and the model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

from ..records import number, seed_of, value_of, with_average
from .means import Mean, mean_of

EQUAL = 0.05  # relative difference of gradient counts up to which two costs are equal
METHOD = ("method", "auxiliary", "average")  # fields in which a method's recipe differs from its base's
LENGTH = ("epochs", "schedule", "warmup")  # fields in which the base trained longer differs from the base


@dataclass
class Group:
    """The runs of one recipe, with different seeds."""

    label: str
    role: str
    recipe: dict[str, Any]  # without the seed
    records: list[Any] = field(default_factory=list)  # records of runs, or lines of a paper's kept results

    @property
    def problem(self) -> str:
        """The problem as text, such as "digits, digits-mlp, 60 % label noise"."""
        return problem_of(self.recipe)

    def finished(self, metric: str) -> dict[Any, float]:
        """The metric of each finished run, by seed."""
        found = {seed_of(r): value_of(r, metric) for r in self.records if r.get("status") == "done"}
        return {seed: value for seed, value in found.items() if value is not None}

    @property
    def done(self) -> list[Any]:
        """The finished runs with a finite loss or accuracy."""
        return [r for r in self.records if r.get("status") == "done" and not _has_diverged(r)]

    @property
    def diverged(self) -> list[Any]:
        """The runs that diverged, or finished without a finite result."""
        return [r for r in self.records if _has_diverged(r)]

    @property
    def unfinished(self) -> int:
        """The number of runs that have not ended."""
        return len(self.records) - len(self.done) - len(self.diverged)

    def mean(self, metric: str) -> Mean | None:
        """The mean over finished runs."""
        values = list(self.finished(metric).values())
        return mean_of(values) if values else None


def group_records(records: Iterable[Any]) -> list[Group]:
    """Records grouped by recipe, in the given order. Of two records of the same run the last one counts.

    A run that also evaluated an average of its weights is in two groups: one for its last weights, one for the average.
    """
    groups: dict[str, Group] = {}
    for record in (one for given in records for one in with_average(plain(given))):
        recipe = {name: value for name, value in record["recipe"].items() if name != "seed"}
        key = json.dumps([recipe, record.get("role")], sort_keys=True, default=str)
        group = groups.setdefault(key, Group(str(record["label"]), record.get("role", "method"), recipe))
        group.records = [r for r in group.records if seed_of(r) != seed_of(record)] + [record]
    for group in groups.values():
        group.records.sort(key=lambda r: (str(type(seed_of(r))), seed_of(r)))
    _make_labels_distinct(list(groups.values()))
    return list(groups.values())


def plain(record: Any) -> dict[str, Any]:
    """A record as a dictionary, from a mapping, a dataclass or another object."""
    if isinstance(record, Mapping):
        return dict(record)
    if is_dataclass(record) and not isinstance(record, type):
        return asdict(record)
    return dict(vars(record))


def _make_labels_distinct(groups: list[Group]) -> None:
    """Where groups of one problem have the same label, add the settings in which they differ."""
    alike: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        alike.setdefault((group.problem, group.label), []).append(group)
    for same in alike.values():
        if len(same) > 1:
            differing = [k for k in same[0].recipe if any(g.recipe.get(k) != same[0].recipe[k] for g in same)]
            for group in same:
                settings = ", ".join(f"{k}={group.recipe.get(k)}" for k in differing) or group.role
                group.label = f"{group.label} ({settings})"


def larger_is_better(metric: str) -> bool:
    """Whether larger is better: for accuracies and names with an arrow, but not for losses, times and curvature."""
    return metric.endswith(("accuracy", "↑"))


def problem_of(recipe: Mapping[str, Any]) -> str:
    """The problem as a short text: the data, the model, and changes to the data."""
    parts = [str(recipe.get(name, "")).removeprefix("python:") for name in ("data", "model")]  # of a Python program
    if recipe.get("model_settings"):
        settings = recipe["model_settings"]
        parts.append(
            ", ".join(f"{k}={v}" for k, v in settings.items()) if isinstance(settings, Mapping) else str(settings)
        )
    if recipe.get("share") not in (None, 1, 1.0):
        parts.append(f"first {100 * recipe['share']:g} %")
    if recipe.get("label_noise"):
        parts.append(f"{100 * recipe['label_noise']:g} % label noise")
    if recipe.get("hold_out"):
        parts.append(f"tested on {100 * recipe['hold_out']:g} % held out")
    return ", ".join(parts)


def base_of(group: Group, bases: list[Group]) -> Group | None:
    """The base that a group is compared with.

    It has the same recipe except for the method; failing that, also except for length and schedule; failing that, it
    is the only base; None if there are several.
    """
    for own in (METHOD, METHOD + LENGTH):
        alike = [base for base in bases if same_recipe(group, base, own)]
        if alike:
            return min(alike, key=lambda base: _distance_in_length(group, base))
    return bases[0] if len(bases) == 1 else None


def _distance_in_length(group: Group, base: Group) -> tuple[float, bool]:
    """How far a run is from this base trained longer by the factor in its label: in epochs, then in the schedule."""
    mine, theirs = group.recipe, base.recipe
    epochs, short = number(mine.get("epochs")) or 0.0, number(theirs.get("epochs")) or 0.0
    named = re.search(r"(\d+\.?\d*)x longer", group.label) if group.role == "equal-cost" else None
    if named is None and group.role == "equal-cost":  # another label: prefer a base of which it is a multiple
        return epochs % short if short else math.inf, False
    factor = float(named[1]) if named else 1.0
    schedule = stretched(str(theirs.get("schedule")), factor)
    alike = (mine.get("schedule"), mine.get("warmup")) == (schedule, theirs.get("warmup"))
    return abs(epochs - factor * short), not alike


def stretched(schedule: str, factor: float) -> str:
    """The schedule of a run that is longer by this factor: the period of a step schedule grows with it.

    >>> stretched("step:0.1/30", 2.0), stretched("cosine", 2.0)
    ('step:0.1/60', 'cosine')
    """
    found = re.fullmatch(r"step:(.+)/((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?)", schedule)
    return f"step:{found[1]}/{float(found[2]) * factor:g}" if found else schedule


def same_recipe(one: Group, other: Group, apart_from: tuple[str, ...]) -> bool:
    """Whether two groups have the same recipe apart from these fields."""
    names = (set(one.recipe) | set(other.recipe)).difference(apart_from)
    return all(one.recipe.get(name) == other.recipe.get(name) for name in names)


def average(group: Group, metric: str) -> float | None:
    """The mean over finished runs, without its error."""
    values = list(group.finished(metric).values())
    return math.fsum(values) / len(values) if values else None


def ratio(one: float | None, other: float | None) -> float | None:
    """One number relative to another; None if either is missing."""
    return one / other if one is not None and other else None


def _has_diverged(record: Mapping[str, Any]) -> bool:
    """Whether a run diverged, or finished with neither a finite loss nor a finite accuracy."""
    if record.get("status") != "done":
        return record.get("status") == "diverged"
    final = record.get("final") or {}
    return not any(number(final.get(name)) is not None for name in ("test_accuracy", "test_loss"))
