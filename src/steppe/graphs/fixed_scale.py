"""A loss scale for float16 that never changes."""

from __future__ import annotations

from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer


class FixedScale(GradScaler):
    """A `GradScaler` whose scale never changes, for steps that must not synchronise with the device.

    A `GradScaler` finds its scale by trial: it skips a step whose gradient overflows, and to decide that the host
    synchronises with the device in every step. If a scale is known to work, this is unnecessary: with this class
    `capture` records the whole step, and several runs on one GPU overlap. float16 rounds eight times finer than
    bfloat16 and is about as fast.

    No step is skipped: if a gradient overflows, the weights become NaN. Gradients of activations below 6e-8 / `scale`
    underflow, gradients above 65504 / `scale` overflow. Use it for methods that look close to w, not for GAM, which
    looks far away.

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
        step: Any = optimizer.step
        return step(*args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        """Prepare for the next step. The scale does not change."""
        self._per_optimizer_states.clear()
