"""Base optimizers by name."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from ...support.errors import UserError
from ..recipe.recipe import Recipe

_ADABELIEF = (("adabelief_pytorch", "AdaBelief"), ("pytorch_optimizer", "AdaBelief"), ("timm.optim", "AdaBelief"))


def make_base(recipe: Recipe, params: Iterable[Any]) -> Optimizer:
    """The recipe's base optimizer. Only SGD takes `momentum`."""
    params = list(params)
    if recipe.base == "sgd":
        return torch.optim.SGD(params, recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay)
    if recipe.momentum:
        raise UserError(f"momentum is for sgd; {recipe.base} has its own")
    if recipe.base == "adam":
        return torch.optim.Adam(params, recipe.lr, weight_decay=recipe.weight_decay)
    if recipe.base == "adamw":
        return torch.optim.AdamW(params, recipe.lr, weight_decay=recipe.weight_decay)
    for package, name in _ADABELIEF:
        try:
            found = getattr(importlib.import_module(package), name)
        except (ImportError, AttributeError):
            continue
        quiet = {"print_change_log": False} if package == "adabelief_pytorch" else {}
        return found(params, lr=recipe.lr, weight_decay=recipe.weight_decay, **quiet)
    raise UserError("base adabelief comes from another package: pip install timm (or pytorch-optimizer)")
