"""Jobs, where they are trained, and which of them one process trains at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..recipe.recipe import Recipe
from ..records import label_for
from ..training.final_curvature import Measuring


@dataclass(frozen=True)
class Job:
    """A recipe to train, with its role and its name in tables."""

    recipe: Recipe
    role: str = "method"
    label: str = ""

    @property
    def name(self) -> str:
        """The label; if none was given, one made from the recipe."""
        return self.label or label_for(self.recipe)

    @property
    def work(self) -> float:
        """The amount of work, in epochs of plain training."""
        return self.recipe.epochs * float(self.recipe.build_method().cost)


@dataclass(frozen=True)
class Place:
    """Where and how runs are trained. It does not change their results, except for rounding with `threads`."""

    folder: Path
    device: str = "cpu"
    data_root: Path | None = None
    threads: int = 1
    together: int = 1  # runs per process, trained in round robin
    measuring: Measuring | None = None  # what is measured at the end of a run
    log: str = ""  # name of the logger
    keep_weights: bool = False
    # Hashes of the user's own code when the command began, by the key of the run:
    code: Mapping[str, Any] = field(default_factory=dict)
    asked: Any = None  # for a queued run: the entry "asked" of its record
    stacked: int = 20  # runs per process that are trained as one net, where that is faster


def groups_of(jobs: Sequence[Job], place: Place, workers: int = 1) -> list[list[Job]]:
    """Groups of jobs that one process trains at once: with the same amount of work, so that they end together.

    Runs that differ only in their seed may be stacked; there is at least one group for each worker.
    """
    from ..training.stack import worth_stacking

    most = min(place.stacked, -(-len(jobs) // max(workers, 1)))
    stacks: dict[Any, list[Job]] = {}
    others: dict[Any, list[Job]] = {}
    for job in jobs:
        if place.stacked > 1 and worth_stacking(job.recipe, place.device):
            stacks.setdefault((job.name, job.role, replace(job.recipe, seed=0)), []).append(job)
        else:
            alone = place.together == 1
            others.setdefault(job.recipe.key if alone else (job.name, job.role, job.recipe.epochs), []).append(job)
    groups = _parts(stacks, most)
    if place.device.startswith("cuda"):
        groups = _merged(groups, most)
    return groups + _parts(others, place.together)


def _parts(alike: Mapping[Any, list[Job]], most: int) -> list[list[Job]]:
    return [group[i : i + most] for group in alike.values() for i in range(0, len(group), most)]


def _merged(groups: list[list[Job]], most: int) -> list[list[Job]]:
    """Small stacks with the same data and amount of work as one group: side by side they fill a GPU."""
    found: list[list[Job]] = []
    last: dict[Any, list[Job]] = {}
    for group in groups:
        first = group[0]
        like = first.recipe.data, first.recipe.model, first.work
        if like in last and len(last[like]) + len(group) <= most:
            last[like] += group
        else:
            last[like] = list(group)
            found.append(last[like])
    return found
