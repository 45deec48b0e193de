"""A fair comparison of methods.

All methods with the same seed start from the same weights and get the same batches. The base is also trained longer, up
to as long as each method costs, and in the forms that cost nothing more: its rivals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...support.errors import UserError
from ..recipe.method_text import make_method
from ..recipe.recipe import Recipe
from ..records import label_for
from ..statistics import stretched
from .jobs import Job

DEFAULT_METHODS = ("sam:rho=0.1", "asam:rho=0.5", "gsam:rho=0.1", "looksam:rho=0.1")
FIRST_NOISE, FIRST_SEEDS = (0.6, 0.0), 10  # label noise and seeds of the comparison without any option


def plan(
    recipe: Recipe,
    methods: Sequence[str],
    seeds: Sequence[int],
    equal_cost: bool = True,
    rivals: Sequence[Mapping[str, Any]] = (),
) -> list[Job]:
    """The runs of a comparison, for each seed: the base, its rivals, the base trained longer, and the methods.

    A rival is the base with other fields of the recipe, such as {"nesterov": True} or {"weight_decay": 5e-4}. An
    average alone, {"average": "ema:10%"}, needs no training of its own: it is evaluated in the trainings of the base.
    """
    plain = replace(recipe, method="plain")
    base = label_for(plain)
    averages = [rival["average"] for rival in rivals if rival.keys() == {"average"}]
    if len(averages) > 1:
        raise UserError(f"one average of the base can be evaluated, not {len(averages)}")
    averaged = Recipe.of({**plain.as_dict(), "average": averages[0]}) if averages else plain
    rivals = [rival for rival in rivals if rival.keys() != {"average"}]
    jobs: dict[str, Job] = {}
    costs = lengths([float(make_method(method, recipe.lr).cost) for method in methods])
    for seed in seeds:
        wanted = [Job(averaged, "base", base)]
        wanted += [
            Job(Recipe.of({**plain.as_dict(), **rival}), "rival", f"{base}, {_fields(rival)}") for rival in rivals
        ]
        for cost in costs if equal_cost else ():
            longer = _longer(averaged, cost)
            if longer.epochs > plain.epochs:
                wanted.append(Job(longer, "equal-cost", f"{base}, {cost:.3g}x longer"))
        wanted += [Job(with_method(recipe, method)) for method in methods]
        for job in wanted:
            seeded = replace(job, recipe=replace(job.recipe, seed=seed))
            jobs.setdefault(seeded.recipe.key, seeded)
    return list(jobs.values())


def plan_all(
    recipe: Recipe,
    methods: Sequence[str],
    seeds: Sequence[int],
    equal_cost: bool,
    rivals: Sequence[Mapping[str, Any]] | None,
    first: bool,
) -> list[Job]:
    """The runs that `compare` was asked for: of one problem; of both, if it is the `first` comparison.

    Rivals that are None are the usual ones, if methods are compared at equal cost.
    """
    jobs: list[Job] = []
    for base in [replace(recipe, label_noise=noise) for noise in FIRST_NOISE] if first else [recipe]:
        others = usual_rivals(base) if rivals is None and equal_cost else rivals or ()
        jobs += plan(base, methods, seeds, equal_cost, others)
    return jobs


def lengths(costs: Sequence[float]) -> list[float]:
    """The factors by which the base is trained longer: the cost of each method, and 2, 4, 8 … up to the largest cost.

    >>> lengths([6.0, 1.2])
    [1.2, 2.0, 4.0, 6.0]
    """
    doubled = [2.0**k for k in range(1, 20) if 2.0**k < max(costs, default=0.0)]
    return sorted({*costs, *doubled})


AVERAGE = "ema:10%"  # average of the base's weights, a rival that needs no training of its own
WEIGHT_DECAY = 5e-4  # the usual value with SGD


def usual_rivals(recipe: Recipe) -> list[dict[str, Any]]:
    """Variants of the base that cost no more and are often better: averaged weights, Nesterov, weight decay."""
    found: list[dict[str, Any]] = [] if recipe.average else [{"average": AVERAGE}]
    if recipe.base == "sgd":
        found += [{"nesterov": True}] if recipe.momentum and not recipe.nesterov else []
        found += [{"weight_decay": WEIGHT_DECAY}] if not recipe.weight_decay else []
    return found


def _fields(rival: Mapping[str, Any]) -> str:
    """The fields of a rival as part of its label.

    >>> _fields({"nesterov": True, "weight_decay": 5e-4})
    'Nesterov, weight decay 0.0005'
    """
    names = {"nesterov": "Nesterov", "weight_decay": "weight decay"}
    shown = {name: names.get(name, name) for name in rival}
    return ", ".join(shown[name] if value is True else f"{shown[name]} {value}" for name, value in rival.items())


def with_method(recipe: Recipe, method: str) -> Recipe:
    """The recipe with another method, and without a schedule if the method sets the learning rate itself."""
    if "lr" in make_method(method, recipe.lr).needs:
        return replace(recipe, method=method, schedule="constant", warmup=0)
    return replace(recipe, method=method)


def notes(recipe: Recipe, jobs: Sequence[Job]) -> list[str]:
    """Notes that a reader of the results needs: methods that are trained without the requested schedule."""
    asked = [f"the {recipe.schedule} schedule"] if recipe.schedule != "constant" else []
    asked += ["warm-up"] if recipe.warmup else []
    methods = [job for job in jobs if job.role == "method"]
    kept = (recipe.schedule, recipe.warmup)
    alone = dict.fromkeys(job.name for job in methods if (job.recipe.schedule, job.recipe.warmup) != kept)
    return [f"{name} sets the learning rate itself: trained without {' and '.join(asked)}" for name in alone]


def _longer(recipe: Recipe, factor: float) -> Recipe:
    """The recipe with more epochs and a schedule stretched by the same factor."""
    schedule = stretched(recipe.schedule, factor)
    return replace(recipe, epochs=round(recipe.epochs * factor), schedule=schedule)
