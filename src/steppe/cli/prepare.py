"""From options to a recipe and a place to train in. Data, model and device are checked before training begins."""

from __future__ import annotations

import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..lab.preparing import how_many_jobs, with_runs_at_once
from ..support.devices import require_device
from ..support.errors import UserError, one_line
from .errors import say
from .options import FIELDS, RECIPE

__all__ = [
    "command_for", "how_many_jobs", "import_from_current_folder", "make_folder", "make_place", "make_recipe",
    "with_runs_at_once",
]  # fmt: skip

if TYPE_CHECKING:
    from ..lab.recipe.recipe import Recipe
    from ..lab.runner.jobs import Place


def make_recipe(given: dict[str, Any], compiled: bool = False) -> Recipe:
    """The recipe for the given options, with suggested values for the others."""
    from ..lab.preparing import recipe_for
    from ..lab.recipe.recipe import read_settings

    given = {FIELDS.get(name, name): value for name, value in given.items() if value is not None}
    for name in ("model_settings", "base_settings"):
        if name in given:
            given[name] = read_settings([given[name]], f"--{name.replace('_', '-')}")
    return recipe_for({**given, "compile": compiled})


def command_for(recipe: Recipe) -> str:
    """The `steppe train` command that trains a recipe on all its training data."""
    from ..lab.preparing import defaults_of_base
    from ..lab.recipe.recipe import Recipe, suggested

    words = ["steppe", "train", "--data", recipe.data, "--model", recipe.model, "--method", recipe.method]
    usual = {**Recipe().as_dict(), **suggested(recipe.data, recipe.model)}
    if recipe.base != usual["base"]:
        usual |= defaults_of_base(recipe.base)
    for option in (name for name in RECIPE if name not in ("data", "model")):
        name = FIELDS.get(option, option)
        value = recipe.as_dict()[name]
        if value != usual[name]:
            if value is True:
                words.append(f"--{option.replace('_', '-')}")
                continue
            text = ",".join(f"{k}={_option_text(v)}" for k, v in value.items()) if isinstance(value, dict) else value
            words += [f"--{option.replace('_', '-')}", str(text)]
    return shlex.join([*words, *(["--compile"] if recipe.compile else []), "--seed", str(recipe.seed)])


def _option_text(value: Any) -> str:
    return f"({','.join(map(str, value))})" if isinstance(value, list) else str(value)


def make_place(given: dict[str, Any], recipe: Recipe, out: Path, compared: bool = True) -> Place:
    """The place to train in, after a check of device, folder, data, model and logger.

    With `compared`, there are warnings about a training that is too short to compare methods.
    """
    from ..lab.data import load
    from ..lab.preparing import try_out, warnings_for
    from ..lab.runner.jobs import Place
    from ..lab.runner.loggers import logger_maker
    from ..lab.training.batches import data_for
    from ..lab.training.final_curvature import Measuring

    require_device(given["device"])
    if given["threads"] < 1:
        raise UserError(f"--threads must be at least 1, not {given['threads']}")
    make_folder(out)
    if given["download"]:
        load(recipe.data, given["data_dir"], download=True)
    data = data_for(recipe, given["data_dir"])
    try_out(recipe, data)
    for warning in warnings_for(recipe, data) if compared else ():
        say(warning)
    logger_maker(given["log"])
    same = {field.name: given[field.name] for field in fields(Place) if field.name in given}
    return Place(out, data_root=given["data_dir"], measuring=Measuring() if given["curvature"] else None, **same)


def make_folder(out: Path) -> None:
    """Create the folder of --out; raise a `UserError` if that is not possible."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file: name a folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be created: {one_line(error)}") from None


def import_from_current_folder() -> None:
    """Let package.module:function name a module in the current folder, as with python -m."""
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")
