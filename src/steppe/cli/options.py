"""The options that the lab's commands share, and how they become a recipe and a place to train in."""

from __future__ import annotations

import inspect
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..support.devices import require_device
from ..support.errors import UserError, one_line
from .errors import GO_ON, helpful

if TYPE_CHECKING:
    from ..lab.recipe.recipe import Recipe
    from ..lab.runner.local import Place

# Fields of the recipe, and what changes no result; both are options of every command that trains.
RECIPE_OPTIONS: dict[str, tuple[Any, str]] = {
    "data": (str, "A data set (`steppe list data`) or your own, package.module:function."),
    "model": (str, "A model (`steppe list models`) or your own, package.module:function."),
    "base": (str, "Base optimizer: sgd, adam, adamw, adabelief."),
    "lr": (float, "Learning rate."),
    "momentum": (float, "Of sgd."),
    "weight_decay": (float, "Weight decay."),
    "batch": (int, "Batch size."),
    "epochs": (int, "Epochs."),
    "schedule": (str, "constant, cosine, linear, or step:0.25/10 (x 0.25 every 10 epochs)."),
    "warmup": (int, "Steps in which the learning rate rises from zero."),
    "augment": (str, "Augmentation: none, basic, cutout, randaugment, autoaugment, joined by +."),
    "mixup": (float, "Mixup's alpha; 0 for none."),
    "precision": (str, "float32, tf32, bf16, fp16, fp16-fixed (a loss scale of 1024) or float64."),
    "clip": (float, "Largest norm of the direction; 0 for any."),
    "share": (float, "Train on this share of the data, the first."),
    "label_noise": (float, "Share of the training labels that are made wrong."),
    "auxiliary": (str, "The second batch of methods that look at two: fresh, fixed or previous."),
    "model_settings": (str, "For the model: hidden=256,..."),
}
PLACE_OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "compile": (bool, False, "Compile the model."),
    "data_dir": (Path | None, None, "Where data sets are; by default $STEPPE_DATA, else ~/.cache/steppe."),
    "download": (bool, False, "Fetch a data set that is not there."),
    "device": (str, "cpu", "cpu, cuda, cuda:1, mps."),
    "threads": (int, 1, "Threads of a process on a CPU. Another number rounds differently."),
    "curvature": (bool, True, "Measure curvature at the end of every run."),
    "log": (str, "", "tensorboard, or your own logger, package.module:function."),
    "keep_weights": (bool, False, "Keep the trained weights beside the record."),
}


def trains(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of recipe and place; it gets them together, as its arguments `recipe` and `place`."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name not in ("recipe", "place")]
    added = [_option(name, kind | None, None, text) for name, (kind, text) in RECIPE_OPTIONS.items()] + [
        _option(name, kind, default, text) for name, (kind, default, text) in PLACE_OPTIONS.items()
    ]

    def called(**given: Any) -> None:
        with helpful(GO_ON):
            recipe = {name: given.pop(name) for name in RECIPE_OPTIONS}
            place = {name: given.pop(name) for name in PLACE_OPTIONS}
            command(**given, recipe=recipe, place=place)

    called.__name__, called.__doc__ = command.__name__, command.__doc__
    parameters = [*own, *added]
    called.__signature__ = inspect.Signature(parameters)
    called.__annotations__ = {p.name: p.annotation for p in parameters}
    return called


def _option(name: str, kind: Any, default: Any, text: str) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=Annotated[kind, typer.Option(help=text)])


def make_recipe(given: dict[str, Any], compiled: bool = False) -> Recipe:
    """The recipe of the command line: what was given, and what is sensible for the rest."""
    from ..lab.recipe.recipe import Recipe, read_settings, suggested, suggested_model

    given = {name: value for name, value in given.items() if value is not None}
    data = _data_name(given.get("data", "digits"))
    model = given.get("model") or suggested_model(data)
    if "augment" in given:
        given["augmentation"] = given.pop("augment")
    if "model_settings" in given:
        given["model_settings"] = read_settings([given["model_settings"]], "--model-settings")
    defaults = suggested(data, model)
    if given.get("base", defaults["base"]) != defaults["base"]:
        defaults |= _own_defaults(given["base"])
    return Recipe.of({**defaults, **given, "data": data, "model": model, "compile": compiled})


def command_for(recipe: Recipe) -> str:
    """The `steppe train` command that trains a recipe on all its training data."""
    from ..lab.recipe.recipe import Recipe, suggested

    words = ["steppe", "train", "--data", recipe.data, "--model", recipe.model, "--method", recipe.method]
    usual = {**Recipe().as_dict(), **suggested(recipe.data, recipe.model)}
    if recipe.base != usual["base"]:
        usual |= _own_defaults(recipe.base)
    for option in (name for name in RECIPE_OPTIONS if name not in ("data", "model")):
        name = "augmentation" if option == "augment" else option
        value = recipe.as_dict()[name]
        if value != usual[name]:
            text = ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value
            words += [f"--{option.replace('_', '-')}", str(text)]
    return shlex.join([*words, *(["--compile"] if recipe.compile else []), "--seed", str(recipe.seed)])


def _own_defaults(base: str) -> dict[str, float]:
    """Another optimizer than the usual one needs its own learning rate."""
    return {"lr": 0.1, "momentum": 0.9} if base == "sgd" else {"lr": 1e-3, "momentum": 0.0}


def _data_name(name: str) -> str:
    """The name as it is listed: cifar10 is cifar-10."""
    from ..lab.data import data_names

    alike = {listing.name.replace("-", ""): listing.name for listing in data_names()}
    set_, colon, part = name.partition(":")
    return alike.get(set_.lower().replace("-", ""), set_) + colon + part


def make_place(given: dict[str, Any], recipe: Recipe, out: Path) -> Place:
    """Where to train; looked at before anything long begins."""

    from ..lab.data import load
    from ..lab.runner.local import Place, logger_maker
    from ..lab.training.batches import data_for
    from ..lab.training.measuring import Measuring

    device = given["device"]
    require_device(device)
    if given["threads"] < 1:
        raise UserError(f"--threads must be at least 1, not {given['threads']}")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be made: {one_line(error)}") from None
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")  # as python -m does: modules in the folder that the command is run from
    if given["download"]:
        load(recipe.data, given["data_dir"], download=True)
    data = data_for(recipe, given["data_dir"])
    _try_model(recipe, data)
    logger_maker(given["log"])
    return Place(
        out, device, given["data_dir"], given["threads"], log=given["log"], keep_weights=given["keep_weights"],
        measuring=Measuring() if given["curvature"] else None,
    )  # fmt: skip


def _try_model(recipe: Recipe, data: Any) -> None:
    """One small batch through the model, so that what does not fit is said at once and in one line."""
    import torch

    from ..lab.models import build
    from ..lab.training.base_optimizers import make_base
    from ..lab.training.batches import Batches
    from ..support.errors import describe

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


def at_once(recipe: Any, device: str) -> int:
    """How many runs one process trains in turns: small nets leave room for each other on a GPU."""
    from ..lab.recipe.recipe import SMALL_MODELS

    return 5 if device.startswith("cuda") and recipe.model in SMALL_MODELS else 1


def how_many_jobs(jobs: int | None, device: str) -> int:
    """Processes at a time."""
    if jobs is None:
        return len(os.sched_getaffinity(0)) if device == "cpu" and hasattr(os, "sched_getaffinity") else 1
    if jobs < 1:
        raise UserError(f"--jobs must be at least 1, not {jobs}")
    return jobs
