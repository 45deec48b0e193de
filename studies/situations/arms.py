"""What is trained in each situation, and what the runs on held-out data choose. Nothing is trained here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from steppe import SAM
from steppe.lab.recipe.recipe import Recipe

Line = Mapping[str, Any]  # a run in a record file
RADII = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
SEEDS = range(10, 20)  # not those of the pretrained nets: their last layer would start from the same random numbers
STAGES = ("lr", "radius", "final")  # the first two are tested on held-out training images


@dataclass(frozen=True)
class Situation:
    """A problem and its base."""

    name: str
    recipe: Recipe  # of the base; its learning rate is chosen
    examples: int
    rates: tuple[float, ...]  # learning rates of the base to choose from
    choosing: tuple[int, ...]  # seeds of the runs that choose
    pretrained: bool = False
    stops: int = 1  # how often the base is tested during training, to stop it early


@dataclass(frozen=True)
class Job:
    """One training. `arm` is its name, without the seed."""

    situation: Situation
    stage: str
    arm: str
    recipe: Recipe
    examples: int
    pretrained: bool

    @property
    def key(self) -> tuple[str, str, int]:
        """What it is called in a record file."""
        return self.stage, self.arm, self.recipe.seed

    @property
    def stops(self) -> frozenset[int]:
        """The epochs after which it is tested: methods and choosing runs after the last one only."""
        parts = self.situation.stops if self.recipe.average else 1
        return frozenset(round(k * self.recipe.epochs / parts) for k in range(1, parts + 1))


BASE = Recipe(data="cifar-10", model="cnn-5", base="adam", schedule="cosine", average="ema:0.99")
SITUATIONS = {
    one.name: one
    for one in (
        Situation(
            "fine-tuning", replace(BASE, batch=50, epochs=10), 1000, (1e-4, 3e-4, 1e-3, 3e-3), (100, 101, 102), True, 5
        ),
        Situation("once", replace(BASE, batch=100, epochs=1), 20_000, (1e-3, 3e-3, 1e-2), (100, 101)),
    )
}


def jobs(situation: Situation, stage: str, lines: Iterable[Line]) -> Iterator[Job]:
    """The trainings of a stage, which depend on what the stages before it chose."""
    found = list(lines)
    if stage == "lr":
        recipes = {f"lr={lr:g}": replace(situation.recipe, lr=lr, average="") for lr in situation.rates}
        return _all(situation, stage, recipes, situation.choosing)
    base = replace(situation.recipe, lr=chosen(found, "lr"))
    if stage == "radius":
        recipes = {f"rho={rho:g}": _with(base, f"sam:rho={rho:g}") for rho in RADII}
        return _all(situation, stage, recipes, situation.choosing)
    return _final(situation, base, chosen(found, "radius"))


def chosen(lines: Iterable[Line], stage: str) -> float:
    """The learning rate or radius with the best mean accuracy on held-out images; of equal ones the smallest."""
    found: dict[float, list[float]] = {}
    for line in lines:
        if line["stage"] == stage:
            found.setdefault(float(line["arm"].partition("=")[2]), []).append(line["accuracy"][-1])
    return max(found, key=lambda value: (fmean(found[value]), -value))


def _final(situation: Situation, base: Recipe, rho: float) -> Iterator[Job]:
    """The arms that are compared on the test set."""
    longer = replace(base, epochs=2 * base.epochs)
    recipes = {"base": base, "base-2": longer, "sam": _with(base, f"sam:rho={rho:g}")}
    if rho != SAM().rho:
        recipes["sam-default"] = _with(base, "sam")
    yield from _all(situation, "final", recipes, SEEDS)
    for seed in SEEDS:
        own, examples = replace(base, seed=seed), situation.examples
        if situation.pretrained:
            gap = replace(_with(own, "gapsam"), auxiliary="held-out")
            yield Job(situation, "final", "gapsam", gap, examples, True)
            yield Job(situation, "final", "scratch", replace(own, average=""), examples, False)
        else:
            yield Job(situation, "final", "base-data", own, 2 * examples, False)


def _all(situation: Situation, stage: str, recipes: Mapping[str, Recipe], seeds: Iterable[int]) -> Iterator[Job]:
    for seed in seeds:
        for arm, recipe in recipes.items():
            own = replace(recipe, seed=seed)
            yield Job(situation, stage, arm, own, situation.examples, situation.pretrained)


def _with(recipe: Recipe, method: str) -> Recipe:
    """The recipe with a method, and without an average: that is for the base only, as in the map."""
    return replace(recipe, method=method, average="")
