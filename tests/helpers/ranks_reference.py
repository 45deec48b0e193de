"""SAM and GSAM implemented again in plain torch, in one process: the reference for two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from helpers.ranks import Batch, loss_of

TINY = 1e-12  # guards every division by a norm

Gradients = list[Tensor | None]
Loss = Callable[[], Tensor]
Direction = Callable[[Loss, Sequence[Tensor]], Gradients]


def gradients(loss: Loss, params: Sequence[Tensor]) -> Gradients:
    return list(torch.autograd.grad(loss(), params, allow_unused=True))


def length(grads: Iterable[Tensor | None]) -> Tensor:
    return torch.stack([g.square().sum() for g in grads if g is not None]).sum().sqrt() + TINY


def gradients_at(loss: Loss, params: Sequence[Tensor], offset: Gradients) -> Gradients:
    """The gradients at w + offset."""
    before = [p.detach().clone() for p in params]
    with torch.no_grad():
        for p, e in zip(params, offset, strict=True):
            if e is not None:
                p += e
    seen = gradients(loss, params)
    with torch.no_grad():
        for p, w in zip(params, before, strict=True):
            p.copy_(w)
    return seen


def sam(rho: float) -> Direction:
    def direction(loss: Loss, params: Sequence[Tensor]) -> Gradients:
        g = gradients(loss, params)
        size = length(g)
        return gradients_at(loss, params, [None if x is None else rho * x / size for x in g])

    return direction


def gsam(rho: float, alpha: float) -> Direction:
    def direction(loss: Loss, params: Sequence[Tensor]) -> Gradients:
        g = gradients(loss, params)
        size = length(g)
        g_p = gradients_at(loss, params, [None if x is None else rho * x / size for x in g])
        pairs = [(a, b) for a, b in zip(g, g_p, strict=True) if a is not None and b is not None]
        share = sum((a * b).sum() for a, b in pairs) / length(g_p) ** 2
        return [None if a is None or b is None else b - alpha * (a - share * b) for a, b in zip(g, g_p, strict=True)]

    return direction


def grouped_sam(rhos: Sequence[float | None]) -> Direction:
    """One ρ per parameter; None for one that stays where it is and does not count in the norm."""

    def direction(loss: Loss, params: Sequence[Tensor]) -> Gradients:
        g = gradients(loss, params)
        size = length(x for x, rho in zip(g, rhos, strict=True) if rho is not None)
        offset = [None if x is None or rho is None else rho * x / size for x, rho in zip(g, rhos, strict=True)]
        return gradients_at(loss, params, offset)

    return direction


def descend(base: Optimizer, params: Sequence[Tensor], direction: Gradients) -> None:
    for p, d in zip(params, direction, strict=True):
        p.grad = d
    base.step()


def mean_direction(net: nn.Module, parts: Sequence[Batch], direction: Direction) -> Gradients:
    """The mean of the directions found on each part alone: with two parts, what two ranks with local looks do."""

    def loss_on(part: Batch) -> Loss:
        return lambda: loss_of(net, part)

    params = list(net.parameters())
    columns = zip(*[direction(loss_on(part), params) for part in parts], strict=True)
    return [_mean(column) for column in columns]


def _mean(column: Sequence[Tensor | None]) -> Tensor | None:
    known = [d for d in column if d is not None]
    return sum(known[1:], known[0]) / len(column) if known else None


def train_alone(
    net: nn.Module,
    base: Optimizer,
    batches: Iterable[Batch],
    direction: Direction,
    parts: int = 1,
    clip: float | None = None,
) -> nn.Module:
    """Train in this process, on whole batches."""
    params = list(net.parameters())
    for batch in batches:
        d = mean_direction(net, [batch.part(i, parts) for i in range(parts)], direction)
        if clip is not None:
            factor = (clip / length(d)).clamp(max=1.0)
            d = [None if x is None else x * factor for x in d]
        descend(base, params, d)
    return net
