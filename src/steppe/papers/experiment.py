"""Cells, the tables and figures that consist of them, and the scales at which they are run.

A cell is one complete, frozen configuration with a name, such as ``cifar10/cnn-5/gam``; an experiment, such as
``s0/table1``, is a grid of cells. At full scale a cell is what the paper did; "small" is the same with fewer epochs;
"smoke" is a step or two on a few real images, to check that it runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from ..curvature.trace import FEWEST_PRODUCTS
from ..lab.recipe.recipe import HOLDING_OUT, Recipe
from ..lab.training.final_curvature import Measuring
from ..support.errors import UserError, unknown
from .epoch_measurements import Watch

SCALES = ("full", "small", "smoke")
SETS = "steppe.papers.sets"


@dataclass(frozen=True)
class Cell:
    """One configuration. A cell without a recipe is computed by its experiment, not trained by the lab."""

    name: str
    recipe: Recipe | None  # at full scale, seed 0
    label: str
    role: str = "method"
    stands_for: str = ""  # the paper's cell in whose place it is run, if it is not the paper's
    seeds: int = 0  # number of seeds; 0: that of the experiment
    note: str = ""  # what a table says beside its number, such as a radius that was chosen


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of a paper."""

    name: str  # "s0/table1"
    title: str
    shows: str  # what the paper's version shows
    cells: tuple[Cell, ...]
    seeds: int = 1
    measuring: Measuring | None = None  # what is measured at the end of every run
    measuring_small: Measuring | None = None  # the same at small scale, if it would take too long there
    watch: Watch | None = None  # what is measured after chosen epochs
    watch_small: Watch | None = None  # the same at small scale
    compute: Callable[[str, str, int], dict[str, Any]] | None = None  # a result without training: (cell, scale, seed)
    choices: tuple[str, ...] = ()  # what the paper leaves open, and what was chosen here
    shorter: int = 10  # at small scale epochs, warm-up and schedule are divided by this
    share: float = 1.0  # share of the training data at small scale
    stands_in: bool = False  # whether it is smaller than the paper's experiment even at full scale
    needs: str = ""  # data and packages that it needs beyond the lab's
    follows: Callable[[Iterable[Mapping[str, Any]]], Experiment] | None = None  # the experiment given these results
    stops: int = 0  # number of epochs of a run, evenly spread, whose numbers are kept; 0: all
    rows: tuple[tuple[str, str], ...] = ()  # of its table: the last part of a cell's name, and how the table says it

    @property
    def paper(self) -> str:
        """s0 … s4, or extra."""
        return self.name.split("/")[0]

    @property
    def slug(self) -> str:
        """The name, for files."""
        return self.name.replace("/", "-")

    def cell(self, name: str) -> Cell:
        """The cell of that name."""
        found = next((cell for cell in self.cells if cell.name == name), None)
        if found is None:
            raise unknown(f"cell of {self.name}", name, [cell.name for cell in self.cells])
        return found

    def recipe(self, cell: Cell, scale: str, seed: int = 0) -> Recipe:
        """What a cell trains at a scale."""
        assert cell.recipe is not None
        key = (cell.recipe, scale)
        if key not in self._scaled:
            self._scaled[key] = _SCALED[scale](self, cell.recipe)
        return replace(self._scaled[key], seed=seed) if seed else self._scaled[key]

    def identity(self, cell: Cell, scale: str) -> str:
        """A text that all runs of a cell at a scale have in common, and runs of other recipes do not."""
        assert cell.recipe is not None
        key = (cell.recipe, scale)
        if key not in self._identities:
            self._identities[key] = without_seed(self.recipe(cell, scale).as_dict())
        return self._identities[key]

    @cached_property
    def _scaled(self) -> dict[tuple[Recipe, str], Recipe]:
        return {}  # a cache: making a recipe checks all its fields, and results are looked up by it many times

    @cached_property
    def _identities(self) -> dict[tuple[Recipe, str], str]:
        return {}

    def measuring_at(self, scale: str) -> Measuring | None:
        """What is measured at the end of a run at a scale; at smoke scale on very little, to check that it works."""
        if scale == "small" and self.measuring_small is not None:
            return self.measuring_small
        if self.measuring is None or scale != "smoke":
            return self.measuring
        small = {"samples": 4, "probes": 2, "dimension": 4, "products": FEWEST_PRODUCTS, "points": 3, "directions": 2}
        return replace(self.measuring, **{name: n for name, n in small.items() if hasattr(self.measuring, name)})

    def measured_in(self, record: Mapping[str, Any]) -> bool:
        """Whether a run, as a lab record or as a kept result, has all measurements of this experiment."""
        if self.measuring is not None:
            name = getattr(self.measuring, "gives", "top")  # None: its measurements are optional
            if name is not None and name not in (record.get("curvature") or {}):
                return False
        if self.watch is not None:
            name, epochs = self.watch.gives, record["epochs"]
            return any(name in e for e in epochs) if isinstance(epochs, list) else name in record["metrics"]
        return True

    def watch_at(self, scale: str) -> Watch | None:
        """What is measured during training at a scale."""
        if scale == "small" and self.watch_small is not None:
            return self.watch_small
        return self.watch if self.watch is None or scale != "smoke" else self.watch.tiny()


def select(experiment: Experiment, patterns: Iterable[str] = ()) -> tuple[Cell, ...]:
    """The cells that match: whole names, beginnings (``cifar10/cnn-5``), parts (``gam``) or ``*/cnn-*/gam``."""
    patterns = [piece for pattern in patterns for piece in pattern.split(",") if piece]
    chosen: dict[str, Cell] = {}
    for pattern in patterns:
        found = [cell for cell in experiment.cells if _matches(cell.name, pattern)]
        if not found:
            names = {part for cell in experiment.cells for part in (cell.name, *_beginnings(cell.name))}
            raise unknown(f"cell of {experiment.name}", pattern, names)
        chosen |= {cell.name: cell for cell in found}
    return tuple(chosen.values()) if patterns else experiment.cells


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}/") or pattern in name.split("/")


def _beginnings(name: str) -> list[str]:
    parts = name.split("/")
    return [*("/".join(parts[:i]) for i in range(1, len(parts))), *parts]


# Scales


def _full(experiment: Experiment, recipe: Recipe) -> Recipe:
    return recipe


def _small(experiment: Experiment, recipe: Recipe) -> Recipe:
    by = experiment.shorter
    every = re.fullmatch(r"step:(.+)/(.+)", recipe.schedule)
    schedule = f"step:{every[1]}/{max(float(every[2]) / by, 1):g}" if every else recipe.schedule
    share = min(recipe.share, experiment.share)
    epochs = max(recipe.epochs // by, 2)
    return replace(recipe, epochs=epochs, warmup=recipe.warmup // by, schedule=schedule, share=share)


_SMOKE_DATA = {
    "mnist": "grey", "fashion-mnist": "grey", "fashion": "grey", "cifar-10": "colour", "cifar10": "colour",
    "svhn": "colour", "cifar-100": "colour_100", "digits": "grey", "text": "text",
}  # fmt: skip
_SMOKE_MODELS: dict[str, dict[str, Any]] = {
    "mlp-3": {"hidden": 16}, "mlp-6": {"hidden": 16}, "cnn-3": {}, "cnn-5": {},
    "gpt-tiny": {"width": 16, "depth": 1, "heads": 2},
}  # fmt: skip


def _smoke(experiment: Experiment, recipe: Recipe) -> Recipe:
    """Two steps on eight images. Large models become cnn-3; method, optimizer, augmentation and data format stay."""
    data = f"{SETS}:smoke_{_SMOKE_DATA.get(recipe.data.split(':')[-1], 'folder')}"
    measured = experiment.measuring is not None or experiment.watch is not None
    keep_model = recipe.model in _SMOKE_MODELS and not (measured and recipe.model.startswith("cnn"))
    model = recipe.model if keep_model else "cnn-3"
    base = "adamw" if recipe.base == "adabelief" else recipe.base  # adabelief comes from another package
    holds_out = bool(recipe.hold_out) or recipe.auxiliary.startswith(HOLDING_OUT)  # some of eight images must be left
    return replace(
        recipe, data=data, model=model, model_settings=_SMOKE_MODELS[model], epochs=1,
        batch=min(recipe.batch, 2 if holds_out else 4), warmup=min(recipe.warmup, 1), share=max(recipe.share, 0.5),
        compile=False, base=base, hold_out=0.25 if recipe.hold_out else 0.0,
    )  # fmt: skip


_SCALED = {"full": _full, "small": _small, "smoke": _smoke}


def check_scale(scale: str) -> str:
    """The scale, if its name is known."""
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES)
    return scale


def trained(name: str, label: str, *, stands_for: str = "", role: str = "", **fields: Any) -> Cell:
    """A cell that the lab trains."""
    recipe = Recipe.of(fields)
    return Cell(name, recipe, label, role or ("base" if recipe.method == "plain" else "method"), stands_for)


def without_seed(recipe: dict[str, Any]) -> str:
    """A text that identifies a recipe without its seed: the fields that differ from the defaults, as JSON."""
    return json.dumps(differing({k: v for k, v in recipe.items() if k != "seed"}), sort_keys=True)


_DEFAULT = Recipe().as_dict()


def differing(recipe: dict[str, Any]) -> dict[str, Any]:
    """The fields that differ from the defaults."""
    return {name: value for name, value in recipe.items() if value != _DEFAULT.get(name)}


def by_name(*papers: Iterable[Experiment]) -> dict[str, Experiment]:
    """Experiments by name. Two experiments, or two cells of one, must not have the same name."""
    found: dict[str, Experiment] = {}
    for experiment in (one for paper in papers for one in paper):
        names = [cell.name for cell in experiment.cells]
        if experiment.name in found or len(set(names)) < len(names):
            raise UserError(f"{experiment.name}: a name occurs twice")
        found[experiment.name] = experiment
    return found
