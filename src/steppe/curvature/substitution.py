"""Evaluating a model with other weights, without changing it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def substituted(model: nn.Module, values: Mapping[int, Tensor]) -> Generator[None, None, None]:
    """A context in which other tensors take the places of parameters and buffers, given by the `id` of each.

    A parameter is replaced wherever it is: tied to another module, or in a module that has several names, for which
    `torch.func.functional_call` does not put it back. At the end all tensors of the modules are what they were: also
    buffers that a forward has created, and plain attributes, which `nn.utils.weight_norm` writes to.
    """
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        for places in (vars(module)["_parameters"], vars(module)["_buffers"]):
            before.append((places, dict(places)))
    plain = [(vars(module), _tensors_of(module)) for module in model.modules()]
    try:
        for places, tensors in before:
            for name, tensor in tensors.items():
                places[name] = values.get(id(tensor), tensor)
        yield
    finally:
        for places, tensors in before:
            places.clear()
            places.update(tensors)
        for places, tensors in plain:
            places.update(tensors)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
