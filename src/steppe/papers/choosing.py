"""A radius for SAM that is chosen on held-out training data: the runs that choose it, and the choice.

The cells `NAME/choose/RADIUS` train on a part of the training data and are tested on the rest. Once their results are
kept, the cells at the chosen radius are part of the definition (`Experiment.follows`). Nothing is chosen on test data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from ..lab.recipe.method_text import canonical
from ..lab.recipe.recipe import Recipe
from .experiment import Cell

CHOOSING = "choosing"  # the role of runs that choose the radius on held-out data


def choosing_cells(name: str, recipe: Recipe, radii: Sequence[float], hold_out: float, seeds: int) -> Iterator[Cell]:
    """SAM at every radius, trained without a share of the training data and tested on that share."""
    for rho in radii:
        own = replace(recipe, method=canonical(f"sam:rho={rho}"), hold_out=hold_out)
        yield Cell(f"{name}/choose/{rho}", own, f"SAM, ρ = {rho}, on held-out data", CHOOSING, seeds=seeds)


def chosen_radii(
    lines: Iterable[Mapping[str, Any]], radii: Sequence[float], seeds: Mapping[str, int]
) -> dict[str, float]:
    """The radius with the best mean on held-out data, by name, once every radius has all its seeds at full scale.

    `seeds` has the number of seeds that choose, by name. A diverged run counts as the worst. Of equally good radii the
    smallest is taken.
    """
    found: dict[str, dict[float, dict[int, float]]] = {}
    for line in lines:
        if line["role"] == CHOOSING and line["scale"] == "full":
            name, _, rho = line["cell"].partition("/choose/")
            found.setdefault(name, {}).setdefault(float(rho), {})[line["seed"]] = _score(line)
    chosen = {}
    for name, count in seeds.items():
        scores = {rho: _mean(by_seed, count) for rho, by_seed in found.get(name, {}).items()}
        if all(scores.get(rho) is not None for rho in radii):
            chosen[name] = max(radii, key=lambda rho, scores=scores: (scores[rho], -rho))
    return chosen


def _mean(by_seed: Mapping[int, float], seeds: int) -> float | None:
    """The mean over the first seeds, which choose the radius; None if one is missing."""
    return fmean(by_seed[seed] for seed in range(seeds)) if by_seed.keys() >= set(range(seeds)) else None


def _score(line: Mapping[str, Any]) -> float:
    """The held-out accuracy, or minus the held-out loss of a language model; minus infinity if the run diverged."""
    final = line["final"]
    value = final.get("test_accuracy", -final["test_loss"] if isinstance(final["test_loss"], float) else None)
    return float(value) if line["status"] == "done" and isinstance(value, float) else float("-inf")
