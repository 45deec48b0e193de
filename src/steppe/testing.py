"""Running a method without a model."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .engine.finite_difference import by_difference
from .engine.random_vectors import Draws
from .method import Context, Method, Seen, one_by_one
from .vector import Vector


def drive(
    method: Method,
    gradient: Callable[[Tensor], Tensor],
    w: Tensor,
    ctx: Context | None = None,
    loss: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The direction of one step of a method, from a gradient function of one tensor: for tests and for new ideas.

    `loss` is needed by methods that use it. A second batch and single examples are not distinguished.
    """
    weights = Vector([w])
    if ctx is None:
        space = weights.space
        ctx = Context(0, 1.0, lambda: weights, Draws(space, seed=0, step=0), method.memory(space))
    precision = str(w.dtype).removeprefix("torch.")
    asks = by_difference(one_by_one(method.at(ctx.step, ctx.lr).looks(ctx)), weights.norm(), lambda: precision)
    look = next(asks)
    while True:
        if look.linear:
            raise TypeError("drive knows no model, whose outputs a linear look needs: use SharpnessAware")
        at = w if look.offset is None else w + look.offset.tensors[0]
        ctx.losses.append(None if loss is None else loss(at))
        try:
            look = asks.send(Seen(Vector([gradient(at)], weights.space), ctx.losses[-1]))
        except StopIteration as end:
            return end.value.tensors[0]
