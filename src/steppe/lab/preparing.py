"""From what a user requests to a recipe, and checks that data, model and loss fit together before training begins."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..support.errors import UserError, describe
from .data import DataSet, data_names
from .models import build
from .recipe.base_names import full_name
from .recipe.recipe import SMALL_MODELS, Recipe, is_users, suggested, suggested_model
from .runner.jobs import Place
from .training.base_optimizers import make_base
from .training.batches import Batches
from .training.tasks import task_of

_OF_A_RECIPE = ("lr", "momentum", "nesterov", "weight_decay")  # settings of a base that are fields of a recipe
FEW_STEPS = 100  # with fewer training steps there is a warning: they say little about a method


def recipe_for(given: Mapping[str, Any]) -> Recipe:
    """The recipe with the given values, and suggested values for the rest. None counts as not given."""
    asked = {name: value for name, value in given.items() if value is not None}
    data = data_name(asked.get("data", "digits"))
    model = asked.get("model") or suggested_model(data)
    defaults = suggested(data, model)
    if "base" in asked:
        asked["base"] = full_name(asked["base"])
    settings = dict(asked.get("base_settings") or {})
    for name in _OF_A_RECIPE:
        if name in settings:
            if name in asked:
                raise UserError(f"{name} is given twice: as an option and among the base's settings")
            asked[name] = settings.pop(name)
    asked["base_settings"] = settings
    if asked.get("base", defaults["base"]) != defaults["base"]:
        defaults |= defaults_of_base(asked["base"])
    own = str(defaults.get("task", "classification"))
    if asked.get("task", own) != own and not is_users(data):
        raise UserError(f"data set {data} is for {own}: --task {asked['task']} needs your own --data")
    return Recipe.of({**defaults, **asked, "data": data, "model": model})


def defaults_of_base(base: str) -> dict[str, float]:
    """Default learning rate and momentum of a base optimizer that is not the suggested one."""
    own = {"lr": 0.1, "momentum": 0.9} if base == "sgd" else {"lr": 1e-3, "momentum": 0.0}
    return {**own, "nesterov": False, "bias_lr": 1.0}


def data_name(name: str) -> str:
    """The name of a data set as it is listed: "cifar10" becomes "cifar-10"."""
    alike = {listing.name.replace("-", ""): listing.name for listing in data_names()}
    set_, colon, part = name.partition(":")
    return alike.get(set_.lower().replace("-", ""), set_) + colon + part


def try_out(recipe: Recipe, data: DataSet) -> None:
    """Run one small batch through model, loss and metric, so that errors are reported before training."""
    task = task_of(recipe)
    model = build(recipe.model, data.input_shape, data.classes, **dict(recipe.model_settings))
    make_base(recipe, model.parameters(), model)
    batches = Batches(recipe, data, frozenset(), torch.device("cpu"), 0, 1)
    inputs, targets, _ = next(batches.of_epoch(1))
    model.to(batches.dtype)
    for when, training in (("in training", True), ("in evaluation", False)):
        try:
            with torch.no_grad():
                outputs = model.train(training)(inputs[:2])
        except Exception as error:
            fit = f"model {recipe.model} does not fit data {recipe.data} {when}"
            raise UserError(f"{fit}: {describe(error)}") from None
        _check_outputs(recipe, data, outputs, len(inputs[:2]), when)
        try:
            with torch.no_grad():
                task.loss(outputs, targets[:2])
                if task.of_all is not None:
                    task.of_all(outputs, targets[:2])
        except UserError:
            raise
        except Exception as error:
            fit = f"the loss does not fit model {recipe.model} and data {recipe.data} {when}"
            raise UserError(f"{fit}: {describe(error)}") from None


def _check_outputs(recipe: Recipe, data: DataSet, outputs: Any, count: int, when: str) -> None:
    if recipe.loss and recipe.task == "classification" and recipe.metric:
        return  # the user's own loss and metric may take any outputs
    outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor):
        raise UserError(f"model {recipe.model} returns a {type(outputs).__name__} {when}, not a tensor")
    inputs = "1 input" if count == 1 else f"{count} inputs"
    shape = tuple(outputs.shape)
    wanted = (count, *data.input_shape, data.classes) if recipe.task == "language" else (count, data.classes)
    if recipe.task in ("classification", "language") and shape[-1:] > wanted[-1:]:
        wanted = (*wanted[:-1], *shape[-1:])  # there may be classes and tokens that the data does not have
    flat = recipe.task != "classification" and data.classes == 1 and shape == (count,)
    if shape != wanted and not flat:
        largest = f": the largest class is {data.classes - 1}" if recipe.task == "classification" else ""
        raise UserError(f"model {recipe.model} returns {shape} for {inputs} {when}, not {wanted}{largest}")


def warnings_for(recipe: Recipe, data: DataSet) -> list[str]:
    """Warnings about a training from which little can be learnt about methods: few steps, few test examples."""
    steps = len(data.train) // recipe.batch
    found = []
    if steps * recipe.epochs < FEW_STEPS:
        batches = "batch" if steps == 1 else "batches"
        few = f"{steps} {batches} per epoch, {steps * recipe.epochs} steps in all"
        smaller = max(1, min(recipe.batch // 2, len(data.train) // 10))
        found.append(f"{few}: that is too short to compare methods; try a batch of {smaller}, or more epochs")
    if len(data.test) < 30:
        found.append(f"only {len(data.test)} test examples: differences between methods will be mostly chance")
    return found


def with_runs_at_once(place: Place, together: int | None, recipes: Sequence[Recipe]) -> Place:
    """The place with the number of runs that one process trains at once.

    By default ten small nets, which leave much of a GPU idle alone; those that can be stacked may be more.
    """
    if together is not None and together < 1:
        raise UserError(f"--together must be at least 1, not {together}")
    if together is not None:
        return replace(place, together=together, stacked=together)
    on_gpu = place.device.startswith("cuda") and bool(recipes)
    small = on_gpu and all(recipe.model in SMALL_MODELS for recipe in recipes)
    return replace(place, together=10 if small else 1)


def how_many_jobs(jobs: int | None, device: str) -> int:
    """The number of worker processes: by default one per core on a CPU, else one."""
    if jobs is None:
        return len(os.sched_getaffinity(0)) if device == "cpu" and hasattr(os, "sched_getaffinity") else 1
    if jobs < 1:
        raise UserError(f"--jobs must be at least 1, not {jobs}")
    return jobs
