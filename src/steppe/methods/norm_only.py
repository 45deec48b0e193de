"""Parameter groups that let looks move the normalisation layers only."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_KNOWN = (_NormBase, nn.LayerNorm, nn.GroupNorm)  # BatchNorm and InstanceNorm are the first
_NAMED = re.compile(r"norm(\d?d)?$", re.IGNORECASE)  # LlamaRMSNorm, LayerNorm2d: of other libraries


def norm_only(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups: normalisation layers, and all the rest with ``perturb=False``.

    A method then looks around in the scales and biases of the normalisation layers alone (SAM-ON: Mueller, Vlaar,
    Rolnick, Hein; NeurIPS 2023; arXiv 2306.04226). The base trains all weights as usual. Take a larger radius than for
    all weights. Works with every method that respects ``perturb=False``, which are all of this library.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    >>> [(len(group["params"]), group.get("perturb", True)) for group in norm_only(model)]
    [(2, True), (4, False)]

    A layer counts if it is one of torch's, or if the name of its class ends with "Norm" ("Norm2d", and so on). If your
    groups differ otherwise too (weight decay, say), set ``perturb=False`` in your own: nothing else is needed.
    """
    layers = [m for m in model.modules() if isinstance(m, _KNOWN) or _NAMED.search(type(m).__name__)]
    norms = {id(p): p for layer in layers for p in layer.parameters(recurse=False)}
    if not norms:
        raise ValueError("norm_only: the model has no normalisation layer with parameters, so no look could move")
    rest = [p for p in model.parameters() if id(p) not in norms]
    return [{"params": list(norms.values())}, {"params": rest, "perturb": False}]
