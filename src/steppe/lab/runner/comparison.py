"""A fair comparison of methods.

All methods with the same seed start from the same weights and get the same batches. For each method, the base is also
trained longer, so that both cost the same number of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..recipe.method_text import make_method
from ..recipe.recipe import Recipe
from ..records import label_for
from ..statistics import stretched
from .local import Job

DEFAULT_METHODS = ("sam", "asam", "gsam", "gnamfast", "gam", "crsam")


def plan(recipe: Recipe, methods: Sequence[str], seeds: Sequence[int], equal_cost: bool = True) -> list[Job]:
    """The runs of a comparison, for each seed: the base, the base trained longer, and the methods."""
    plain = replace(recipe, method="plain")
    base = label_for(plain)
    jobs: dict[str, Job] = {}
    costs = sorted({float(make_method(method, recipe.lr).cost) for method in methods})
    for seed in seeds:
        wanted = [Job(plain, "base", base)]
        for cost in costs if equal_cost else ():
            longer = _longer(plain, cost)
            if longer.epochs > plain.epochs:
                wanted.append(Job(longer, "equal-cost", f"{base}, {cost:.3g}x longer"))
        wanted += [Job(with_method(recipe, method)) for method in methods]
        for job in wanted:
            seeded = replace(job, recipe=replace(job.recipe, seed=seed))
            jobs.setdefault(seeded.recipe.key, seeded)
    return list(jobs.values())


def with_method(recipe: Recipe, method: str) -> Recipe:
    """The recipe with another method, and without a schedule if the method sets the learning rate itself."""
    if "lr" in make_method(method, recipe.lr).needs:
        return replace(recipe, method=method, schedule="constant", warmup=0)
    return replace(recipe, method=method)


def notes(recipe: Recipe, jobs: Sequence[Job]) -> list[str]:
    """Remarks that a reader of the results needs."""
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
