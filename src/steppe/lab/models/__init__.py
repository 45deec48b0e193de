"""Models by name.

>>> import torch
>>> build("cnn-5", input_shape=(3, 32, 32), classes=10)(torch.zeros(2, 3, 32, 32)).shape
torch.Size([2, 10])
"""

from __future__ import annotations

import importlib
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ...support.errors import UserError, describe, unknown, user_function
from . import dense, fast, residual, small, transformer

MODELS: dict[str, Callable[..., nn.Module]] = {
    "digits-mlp": small.digits_mlp,
    "mlp-3": small.mlp_3,
    "mlp-6": small.mlp_6,
    "cnn-3": small.cnn_3,
    "cnn-5": small.cnn_5,
    "cnn-14": small.cnn_14,
    "fast-cnn": fast.fast_cnn,
    **residual.BUILDERS,
    "densenet-121": dense.densenet_121,
    "vgg-19": dense.vgg_19,
    "vit-small": transformer.vit_small,
    "vit-tiny": transformer.vit_tiny,
    "gpt-tiny": transformer.gpt_tiny,
}


_made: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models of the user's functions that are still there


def model_names() -> list[tuple[str, str]]:
    """The name of each model and one line about it."""
    return [(name, (inspect.getdoc(make) or "").split("\n")[0]) for name, make in MODELS.items()]


def build(name: str, input_shape: Sequence[int], classes: int, **settings: Any) -> nn.Module:
    """The model, initialised with torch's random state.

    "timm:NAME" makes a model of timm; "package.module:function" calls your own function as
    `function(input_shape, classes)` or, if it takes no arguments, as `function()`.
    """
    shape = tuple(input_shape)
    try:
        if name.startswith("timm:"):
            model = _timm(name.removeprefix("timm:"), shape, classes, settings)
        elif ":" in name:
            model = _call_users(user_function("model", name), shape, classes, settings)
        else:
            make = MODELS.get(name.lower())
            if make is None:
                raise unknown("model", name, [*MODELS, "timm:NAME"])
            model = make(shape, classes, **settings)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"model {name!r} for inputs {shape} could not be built: {describe(error)}") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"model {name!r} returned a {type(model).__name__}, not a torch.nn.Module")
    if model in _made:  # a run would go on from the weights of another
        raise UserError(f"model {name!r} gave the same module again: make a new one each time it is called")
    _made.add(model)
    return model


def _call_users(function: Callable[..., Any], shape: tuple[int, ...], classes: int, settings: dict[str, Any]) -> Any:
    try:
        inspect.signature(function).bind(**settings)
    except TypeError:
        return function(shape, classes, **settings)
    return function(**settings)


def _timm(name: str, shape: tuple[int, ...], classes: int, settings: dict[str, Any]) -> nn.Module:
    try:
        timm = importlib.import_module("timm")
    except Exception as error:  # not only ImportError: a torchvision for another torch fails in other ways
        raise UserError(f"model 'timm:{name}' needs timm, which cannot be imported: {describe(error)}") from error
    if not timm.is_model(name):
        raise unknown("timm model", name, timm.list_models())
    return timm.create_model(name, num_classes=classes, in_chans=shape[0], **settings)


__all__ = ["MODELS", "build", "model_names"]
