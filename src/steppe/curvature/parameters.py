"""Which parameters of a model are measured."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..engine.shards import sharded
from ..methods.norm_only import norm_only

One: TypeAlias = str | nn.Module | nn.Parameter
Selection: TypeAlias = One | Iterable[One] | Callable[[str, nn.Parameter], bool] | None


def select(model: nn.Module, params: Selection) -> dict[str, nn.Parameter]:
    """The selected parameters, each under its first name. A tied parameter can be selected by any of its names.

    A selection is a pattern of names, a module, a parameter, a list of such, or a test of name and parameter.
    """
    named = dict(model.named_parameters())
    if params is None:
        return {name: p for name, p in named.items() if p.requires_grad}
    if isinstance(params, (str, nn.Module, nn.Parameter)):  # before callables: a module is one
        params = [params]
    if callable(params):
        return {name: p for name, p in named.items() if params(name, p)}
    if not isinstance(params, Iterable):
        raise TypeError(f"params selects by names, modules, parameters or a function, not {type(params).__name__}")
    identities = {id(p) for one in params for p in _selected(model, one)}
    if identities - {id(p) for p in named.values()}:
        raise ValueError("some of the given params are not parameters of the model")
    return {name: p for name, p in named.items() if id(p) in identities}


def _selected(model: nn.Module, one: One) -> list[Tensor]:
    """The parameters that one part of a selection stands for."""
    if isinstance(one, nn.Module):
        return list(one.parameters())
    if isinstance(one, Tensor):
        return [one]
    if not isinstance(one, str):
        raise TypeError(f"params may contain names, modules and parameters, not {type(one).__name__}")
    named = list(model.named_parameters(remove_duplicate=False))
    called: list[Tensor] = [p for name, p in named if fnmatch.fnmatchcase(name, one)]
    if not called:
        names = ", ".join(name for name, _ in model.named_parameters())
        raise ValueError(f"no parameter is called {one!r}; the model has {names}")
    return called


def normalisation(model: nn.Module) -> set[str]:
    """The names of the parameters of normalisation layers. Some are matrices: those of LayerNorm((2, 2))."""
    try:
        found = {id(p) for p in norm_only(model)[0]["params"]}
    except ValueError:  # there are none
        return set()
    return {name for name, p in model.named_parameters() if id(p) in found}


def require_measurable(params: Mapping[str, Tensor]) -> None:
    """Raise for parameters that have no usable Hessian: none at all, sharded ones, low precision."""
    if not params:
        raise ValueError("no parameters to measure: none requires a gradient, or the selection is empty")
    for name, p in params.items():
        if sharded(p):
            raise TypeError(
                f"{name} is sharded (DTensor), and Hessian products need whole weights: on every rank, load "
                "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
                "options=StateDictOptions(full_state_dict=True)) into a plain copy of the model, and measure the copy "
                "with group=, so that each rank uses its share of the data"
            )
        if p.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name} is {p.dtype}, too coarse for curvature: use model.float() or model.double()")
