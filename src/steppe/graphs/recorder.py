"""What a recorded step (see capture.py) needs of the optimizer, which runs while it is recorded but not in a replay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..engine.random_vectors import seed_of
from ..method import Context
from ..optimizer import SEED, STEP, SharpnessAware
from ..vector import Space


def pin(opt: SharpnessAware) -> None:
    """From now on, keep what the method remembers where it is in memory: a recorded step reads it there."""
    opt._space()  # makes the memory, if no step has yet
    opt._store.pin()


def generators(opt: SharpnessAware) -> list[torch.Generator]:
    """Those that the method draws from, seeded for the coming step."""
    seed = seed_of(opt._first().setdefault(SEED, 0), opt.steps)
    return [generator.manual_seed(seed) for generator in opt._generators.values()]


def draw_looks_from(opt: SharpnessAware, states: list[torch.Generator]) -> None:
    """While a step is recorded: the random state of each of its looks, in place of one that is put back."""
    if opt._quiet is not None:
        opt._quiet.spare = states


@dataclass
class Left:
    """What a step, or its first half, has left behind on the Python side when it was recorded, not run."""

    loss: Tensor
    params: list[Tensor]
    grads: list[Tensor | None]
    pending: tuple[Space, Context] | None
    metrics: dict[str, Any]
    lrs: list[Any] | None

    @classmethod
    def by(cls, opt: SharpnessAware, loss: Tensor) -> Left:
        """Take it from the optimizer."""
        params = opt._trainable()
        if opt._pending is None:
            opt.param_groups[0][STEP] = opt.steps - 1
        lrs = [group["lr"] for group in opt.param_groups] if "lr" in opt.method.needs else None
        metrics = opt.metrics if opt._pending is None else opt._pending[1].metrics
        return cls(loss, params, [p.grad for p in params], opt._pending, metrics, lrs)

    def give_to(self, opt: SharpnessAware) -> Tensor:
        """The device has run the recorded step, or its first half, again: be as if it had been run here.

        Loss and metrics are copies: the next replay, of this recording or another, writes over the originals.
        """
        names = [name for name, value in self.metrics.items() if isinstance(value, Tensor)]
        loss, *values = torch._foreach_mul([self.loss, *(self.metrics[name] for name in names)], 1)
        metrics = {**self.metrics, **dict(zip(names, values, strict=True))}
        for p, grad in zip(self.params, self.grads, strict=True):
            p.grad = grad
        if self.pending is not None:
            space, ctx = self.pending
            opt._pending = space, replace(ctx, metrics=metrics)
            return loss
        if self.lrs is not None:
            opt._lr_set = self.lrs[0]
            for group, lr in zip(opt.param_groups, self.lrs, strict=True):
                group["lr"] = lr
        opt.metrics = metrics
        opt.param_groups[0][STEP] = opt.steps + 1
        return loss
