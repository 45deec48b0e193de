"""Sharpness-aware training with Lightning Fabric.

optimizer = steppe.SharpnessAware(base, steppe.SAM(rho=0.05), model=model)
model, optimizer = fabric.setup(model, optimizer)

for x, y in loader:
    for look in passes(fabric, optimizer):
        fabric.backward(criterion(model(x), y))
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..engine.looks import Pass


def passes(fabric: Any, optimizer: Any) -> Iterator[Pass]:
    """`SharpnessAware.passes` for an optimizer that ``fabric.setup`` has wrapped, with Fabric's GradScaler if any.

    To accumulate gradients, loop over the micro-batches in the body; run all but the last in
    ``fabric.no_backward_sync(model)``.
    """
    return optimizer.optimizer.passes(getattr(fabric.strategy.precision, "scaler", None))
