"""A loss scale for float16 that never changes."""

from __future__ import annotations

from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer


class FixedScale(GradScaler):
    """In the place of a `GradScaler`, where no step may wait for the device.

    A `GradScaler` finds its scale by trying: gradients that overflow skip the step, and to know that the host waits
    for the device in every one. Where a scale is known to do, that wait is for nothing: with this, `capture` records
    the whole step, and several runs on one GPU overlap. float16 rounds eight times finer than bfloat16 and is about as
    fast.

    Nothing is skipped: if a gradient does overflow, the weights become NaN. Activations' gradients below 6e-8 / `scale`
    are lost, gradients above 65504 / `scale` overflow: take this for methods that stay close to w, not for GAM, whose
    looks go far.

    >>> import torch
    >>> from torch import nn
    >>> from steppe import SAM, SharpnessAware
    >>> model = nn.Linear(2, 1)
    >>> opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), SAM(), model=model)
    >>> scaler = FixedScale("cpu", 512.0)
    >>> loss = opt.gradient(lambda: model(torch.ones(4, 2)).square().mean(), scaler=scaler)
    >>> scaler.step(opt)
    >>> scaler.update()
    >>> scaler.get_scale()
    512.0
    """

    def __init__(self, device: str = "cuda", scale: float = 2.0**10):
        super().__init__(device, init_scale=scale)

    def _maybe_opt_step(self, optimizer: Optimizer, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        """Begin the next step; the scale stays."""
        self._per_optimizer_states.clear()
