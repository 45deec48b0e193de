"""The base optimizer of a recipe."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ...support.errors import UserError, describe, one_line, unknown
from ..recipe.base_names import find_base
from ..recipe.recipe import Recipe

_FIELDS = ("momentum", "nesterov", "weight_decay")  # fields of a recipe that are settings of most optimizers
_MODEL = ("model", "net", "module")  # names of a first argument that gets the model instead of the parameters
_NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)


def make_base(recipe: Recipe, params: Iterable[Any], model: Any = None) -> Any:
    """The recipe's base optimizer, or a list of them, each with its own parameters.

    A user's function gets the parameters, or the model if its first argument is called `model`. Of lr, momentum,
    nesterov, weight_decay and the base's settings it gets those that it takes.
    """
    make = find_base(recipe.base)
    accepted = _parameters(make)
    first = next(iter(accepted), "params")
    settings = _settings(recipe, make, accepted)
    if recipe.bias_lr != 1:
        params = _groups(recipe, make, list(params), model)
    try:
        made = make(model if first in _MODEL and model is not None else list(params), **settings)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"base {recipe.base} could not be built: {describe(error)}") from error
    several = list(made) if isinstance(made, (list, tuple)) else [made]
    for one in several:
        if not isinstance(one, Optimizer):
            raise UserError(f"base {recipe.base} returned a {type(one).__name__}, not a torch.optim.Optimizer")
    if not several:
        raise UserError(f"base {recipe.base} returned no optimizer")
    return several if isinstance(made, (list, tuple)) else made


def _groups(recipe: Recipe, make: Callable[..., Any], params: list[Any], model: Any) -> list[dict[str, Any]]:
    """Two parameter groups: biases of normalisation layers have their own learning rate, but the same decay."""
    if not isinstance(make, type):
        raise UserError(f"bias_lr needs an optimizer that takes groups of parameters; base {recipe.base} is a function")
    biases = {id(m.bias) for m in model.modules() if isinstance(m, _NORMS) and m.bias is not None}
    own = {"lr": recipe.lr * recipe.bias_lr, "weight_decay": recipe.weight_decay / recipe.bias_lr}
    parts = [[p for p in params if id(p) not in biases], [p for p in params if id(p) in biases]]
    return [{"params": part, **more} for part, more in zip(parts, ({}, own), strict=True) if part]


def _settings(recipe: Recipe, make: Callable[..., Any], accepted: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments for a base: a class gets all settings that it takes, a function only those given."""
    given = dict(recipe.base_settings)
    anything = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    settings: dict[str, Any] = {}
    for name, value in given.items():
        if name not in accepted and not anything:
            known = [p for p in list(accepted)[1:] if p not in ("lr", *_FIELDS)]
            raise UserError(f"base {recipe.base}: {one_line(unknown('setting', name, known))}")
        settings[name] = tuple(value) if isinstance(value, list) else value
    if "lr" in accepted or anything:
        settings.setdefault("lr", recipe.lr)
    for name in _FIELDS:
        value = getattr(recipe, name)
        if name in accepted and (value or isinstance(make, type)):
            settings.setdefault(name, value)
        elif value and name not in settings:
            if name == "momentum":
                raise UserError(f"base {recipe.base} takes no momentum: it is for sgd and others that do")
            raise UserError(f"{name} is not a setting of base {recipe.base}")
    if "print_change_log" in accepted:  # adabelief_pytorch
        settings["print_change_log"] = False
    return settings


def _parameters(make: Callable[..., Any]) -> dict[str, Any]:
    try:
        return dict(inspect.signature(make).parameters)
    except (TypeError, ValueError):  # a function written in C may have no signature
        return {}
