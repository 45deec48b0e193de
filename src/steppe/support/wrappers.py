"""Models without what DDP and `torch.compile` wrap around them."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def uncompiled(model: nn.Module | None) -> Any:
    """The module without the wrappers of `torch.compile`."""
    inner: Any = model
    while hasattr(inner, "_orig_mod"):
        inner = inner._orig_mod
    return inner


def unwrapped(model: nn.Module) -> nn.Module:
    """The module without the wrappers of DDP and `torch.compile`, in whatever order they are."""
    while True:
        inner = uncompiled(model)
        if not isinstance(inner, DistributedDataParallel):
            return inner
        model = inner.module
