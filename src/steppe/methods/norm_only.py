"""Parameter groups that restrict perturbations to the normalisation layers."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_KNOWN = (_NormBase, nn.LayerNorm, nn.GroupNorm)  # _NormBase: BatchNorm and InstanceNorm
_NAMED = re.compile(r"norm(\d?d)?$", re.IGNORECASE)  # layers of other libraries: LlamaRMSNorm, LayerNorm2d


def norm_only(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups: the normalisation layers, and all other parameters with ``perturb=False``.

    A method then perturbs only the scales and biases of the normalisation layers (SAM-ON: Mueller, Vlaar, Rolnick,
    Hein; NeurIPS 2023; arXiv 2306.04226). The base trains all weights as usual. Use a larger radius than for all
    weights. Every method of this library respects ``perturb=False``.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    >>> [(len(group["params"]), group.get("perturb", True)) for group in norm_only(model)]
    [(2, True), (4, False)]

    A layer counts if it is one of torch's normalisation layers, or if the name of its class ends with "Norm", "Norm2d"
    and so on. If you have parameter groups of your own (for weight decay, for example), set ``perturb=False`` in them
    instead.
    """
    layers = [m for m in model.modules() if isinstance(m, _KNOWN) or _NAMED.search(type(m).__name__)]
    norms = {id(p): p for layer in layers for p in layer.parameters(recurse=False)}
    if not norms:
        raise ValueError("norm_only: the model has no normalisation layer with parameters, so nothing can be perturbed")
    rest = [p for p in model.parameters() if id(p) not in norms]
    return [{"params": list(norms.values())}, {"params": rest, "perturb": False}]
