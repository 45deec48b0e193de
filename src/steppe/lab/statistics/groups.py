"""Records in groups: all runs of one recipe, which differ only in the seed, and the base that each is compared with.

A *problem* is the task: the data, changes to them, and the model.
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
METHOD = ("method", "auxiliary", "average")
LENGTH = ("epochs", "schedule", "warmup")


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


def group_records(records: Iterable[Any]) -> list[Group]:
    """Records grouped by recipe, in the order given. Of two records of the same run the last one counts.

    A run whose weights were averaged too is in two groups: as it is, and averaged.
    """
    groups: dict[str, Group] = {}
    for record in (one for given in records for one in with_average(plain(given))):
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
    """Whether larger is better: for accuracies and names with an arrow, but not for losses, times and curvature."""
    return metric.endswith(("accuracy", "↑"))


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


def base_of(group: Group, bases: list[Group]) -> Group | None:
    """The base with the same recipe except the method; else also except length and schedule; else the only base."""
    for own in (METHOD, METHOD + LENGTH):
        alike = [base for base in bases if same_recipe(group, base, own)]
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


def _lost(record: Mapping[str, Any]) -> bool:
    final = record.get("final") or {}
    return not any(number(final.get(name)) is not None for name in ("test_accuracy", "test_loss"))
