"""Which parameters of a model are measured."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..engine.shards import sharded

Selection: TypeAlias = "str | nn.Module | Iterable[str | nn.Parameter] | Callable[[str, nn.Parameter], bool] | None"


def select(model: nn.Module, params: Selection) -> dict[str, nn.Parameter]:
    """The selected parameters, each under its first name. A tied parameter can be selected by any of its names."""
    named = dict(model.named_parameters())
    if params is None:
        return {name: p for name, p in named.items() if p.requires_grad}
    if isinstance(params, nn.Module):
        params = list(params.parameters())
    if callable(params):
        return {name: p for name, p in named.items() if params(name, p)}
    wanted = [params] if isinstance(params, str) else list(params)
    patterns = [w for w in wanted if isinstance(w, str)]
    identities = {id(w) for w in wanted if isinstance(w, Tensor)}
    for pattern in patterns:
        called = [p for name, p in model.named_parameters(remove_duplicate=False) if fnmatch.fnmatchcase(name, pattern)]
        if not called:
            raise ValueError(f"no parameter is called {pattern!r}; the model has {', '.join(named)}")
        identities |= {id(p) for p in called}
    if identities - {id(p) for p in named.values()}:
        raise ValueError("some of the given params are not parameters of the model")
    return {name: p for name, p in named.items() if id(p) in identities}


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
