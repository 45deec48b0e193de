"""The reference for every trainer: the same training as a loop in plain torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import steppe
from steppe import SharpnessAware

# SAM; one that remembers; one with three looks; one that needs the losses; one that looks at a second batch.
METHODS = {
    "SAM": steppe.SAM(rho=0.1),
    "LookSAM": steppe.LookSAM(rho=0.1, k=2),
    "CRSAM": steppe.CRSAM(rho=0.1),
    "FrobSAM": steppe.FrobSAM(),
    "GAM": steppe.GAM(T=1),
}


def plain_loop(
    optimizer: SharpnessAware,
    windows: Sequence[Sequence[Any]],
    loss_of: Callable[[Any], Tensor],
    clip: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    autocast: torch.dtype | None = None,
    scheduler: Any = None,
    waits: bool = False,
    held_out: Any = None,
) -> list[float]:
    """Train with one window of micro-batches per step; return the losses of all micro-batches at w.

    `loss_of` gives a micro-batch's share of the loss. The second batch is the previous step's, or `held_out` for
    each micro-batch. With `waits`, the scheduler steps only if the optimizer did.
    """
    assert optimizer.model is not None
    params = [p for p in optimizer.model.parameters() if p.requires_grad]
    losses: list[float] = []
    for window, previous in zip(windows, [windows[0], *windows], strict=False):
        steps = optimizer.steps
        previous = previous if held_out is None else [held_out] * len(window)
        for look in optimizer.passes(scaler):
            micro_batches = window if look.batch == "main" else previous
            for i, micro_batch in enumerate(micro_batches):
                with contextlib.ExitStack() as around:
                    if isinstance(optimizer.model, DistributedDataParallel) and i < len(micro_batches) - 1:
                        around.enter_context(optimizer.model.no_sync())
                    with contextlib.nullcontext() if autocast is None else torch.autocast("cpu", autocast):
                        loss = loss_of(micro_batch)
                    (loss if scaler is None else scaler.scale(loss)).backward()
                look.report(loss)
                if look.index == 0:
                    losses.append(loss.item())
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(params, clip)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        if scheduler is not None and (optimizer.steps > steps or not waits):
            scheduler.step()
        optimizer.zero_grad()
    return losses


def assert_same(model: nn.Module, expected: nn.Module, tolerance: float = 1e-7) -> None:
    """Weights and buffers agree."""
    theirs = dict(expected.state_dict())
    ours = {name: value for name, value in model.state_dict().items() if name in theirs}
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def windows_of(batches: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Consecutive groups; the last may be smaller."""
    return [batches[i : i + size] for i in range(0, len(batches), size)]
