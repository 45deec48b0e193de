"""From options to a recipe and a place to train in. Everything that can fail is tried before training begins."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..support.devices import require_device
from ..support.errors import UserError, describe, one_line
from .options import FIELDS, RECIPE

if TYPE_CHECKING:
    from ..lab.recipe.recipe import Recipe
    from ..lab.runner.local import Place


def make_recipe(given: dict[str, Any], compiled: bool = False) -> Recipe:
    """The recipe of the command line: what was given, and what is suggested for the rest."""
    from ..lab.recipe.recipe import Recipe, read_settings, suggested, suggested_model

    given = {FIELDS.get(name, name): value for name, value in given.items() if value is not None}
    data = _data_name(given.get("data", "digits"))
    model = given.get("model") or suggested_model(data)
    if "model_settings" in given:
        given["model_settings"] = read_settings([given["model_settings"]], "--model-settings")
    defaults = suggested(data, model)
    if given.get("base", defaults["base"]) != defaults["base"]:
        defaults |= _defaults_of_base(given["base"])
    return Recipe.of({**defaults, **given, "data": data, "model": model, "compile": compiled})


def command_for(recipe: Recipe) -> str:
    """The `steppe train` command that trains a recipe on all its training data."""
    from ..lab.recipe.recipe import Recipe, suggested

    words = ["steppe", "train", "--data", recipe.data, "--model", recipe.model, "--method", recipe.method]
    usual = {**Recipe().as_dict(), **suggested(recipe.data, recipe.model)}
    if recipe.base != usual["base"]:
        usual |= _defaults_of_base(recipe.base)
    for option in (name for name in RECIPE if name not in ("data", "model")):
        name = FIELDS.get(option, option)
        value = recipe.as_dict()[name]
        if value != usual[name]:
            text = ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value
            words += [f"--{option.replace('_', '-')}", str(text)]
    return shlex.join([*words, *(["--compile"] if recipe.compile else []), "--seed", str(recipe.seed)])


def _defaults_of_base(base: str) -> dict[str, float]:
    """Another optimizer than the suggested one needs its own learning rate."""
    return {"lr": 0.1, "momentum": 0.9} if base == "sgd" else {"lr": 1e-3, "momentum": 0.0}


def _data_name(name: str) -> str:
    """The name as it is listed: cifar10 is cifar-10."""
    from ..lab.data import data_names

    alike = {listing.name.replace("-", ""): listing.name for listing in data_names()}
    set_, colon, part = name.partition(":")
    return alike.get(set_.lower().replace("-", ""), set_) + colon + part


def make_place(given: dict[str, Any], recipe: Recipe, out: Path) -> Place:
    """Where to train. Device, folder, data, model and logger are tried."""
    from ..lab.data import load
    from ..lab.runner.local import Place, logger_maker
    from ..lab.training.batches import data_for
    from ..lab.training.final_curvature import Measuring

    require_device(given["device"])
    if given["threads"] < 1:
        raise UserError(f"--threads must be at least 1, not {given['threads']}")
    make_folder(out)
    import_from_current_folder()
    if given["download"]:
        load(recipe.data, given["data_dir"], download=True)
    data = data_for(recipe, given["data_dir"])
    _try_model(recipe, data)
    logger_maker(given["log"])
    same = {field.name: given[field.name] for field in fields(Place) if field.name in given}
    return Place(out, data_root=given["data_dir"], measuring=Measuring() if given["curvature"] else None, **same)


def make_folder(out: Path) -> None:
    """Make the folder of --out, or raise one line that says why it cannot be made."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be made: {one_line(error)}") from None


def import_from_current_folder() -> None:
    """Let package.module:function name a module in the folder that the command is run from, as python -m does."""
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")


def _try_model(recipe: Recipe, data: Any) -> None:
    """One small batch through the model, so that a model that does not fit the data is reported at once."""
    import torch

    from ..lab.models import build
    from ..lab.training.base_optimizers import make_base
    from ..lab.training.batches import Batches

    model = build(recipe.model, data.input_shape, data.classes, **dict(recipe.model_settings))
    make_base(recipe, model.parameters())
    batches = Batches(recipe, data, False, torch.device("cpu"), 0, 1)
    inputs, _, _ = next(batches.of_epoch(1))
    try:
        with torch.no_grad():
            answer = model.train().to(batches.dtype)(inputs[:2])
    except Exception as error:
        raise UserError(f"model {recipe.model} does not fit data {recipe.data}: {describe(error)}") from None
    count = min(recipe.batch, 2)
    if tuple(answer.shape) != (count, data.classes):
        given = "1 input" if count == 1 else "2 inputs"
        raise UserError(f"model {recipe.model} gives {tuple(answer.shape)} for {given}, not ({count}, {data.classes})")


def runs_at_once(together: int | None, recipes: list[Recipe], device: str) -> int:
    """How many runs one process trains in turns. Small nets share a GPU well."""
    from ..lab.recipe.recipe import SMALL_MODELS

    if together is not None and together < 1:
        raise UserError(f"--together must be at least 1, not {together}")
    small = device.startswith("cuda") and bool(recipes) and all(recipe.model in SMALL_MODELS for recipe in recipes)
    return together or (5 if small else 1)


def how_many_jobs(jobs: int | None, device: str) -> int:
    """Processes at a time."""
    if jobs is None:
        return len(os.sched_getaffinity(0)) if device == "cpu" and hasattr(os, "sched_getaffinity") else 1
    if jobs < 1:
        raise UserError(f"--jobs must be at least 1, not {jobs}")
    return jobs
