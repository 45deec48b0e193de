"""Runs the user's closures: losses, gradients, and exact Hessian-vector products."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..vector import Vector
from . import replicas
from .shards import local

if TYPE_CHECKING:
    from .looks import Pass

Closure = Callable[[], Tensor]
Closures = Closure | Sequence[Closure]  # a sequence: one closure per micro-batch


def evaluate(
    closures: Closures,
    params: Sequence[Tensor],
    model: nn.Module | None,
    scaler: GradScaler | None,
    members: int | None = None,
) -> Tensor:
    """Compute the gradients of the micro-batches and return their loss, whether or not the closures call backward.

    With `members` there is one loss for each.
    """
    closures = _as_list(closures)
    total, calls_backward = None, None
    for closure in closures:
        with contextlib.nullcontext() if closure is closures[-1] else replicas.no_sync(model):
            loss = _loss(closure, members)
            if calls_backward is None:
                calls_backward = bool([p for p in params if p.grad is not None])
            if not calls_backward:
                _require_graph(loss)
                total_loss = loss if members is None else loss.sum()  # members share no weights: no term mixes them
                _backward(total_loss if scaler is None else scaler.scale(total_loss))
        loss = loss.detach()
        loss = loss if loss.dim() == 0 or members is not None else loss.reshape(())
        total = loss if total is None else total + loss
    assert total is not None
    return total


def hessian_product(closures: Closures, vector: Vector, params: Sequence[Tensor], model: nn.Module | None) -> Vector:
    """The Hessian times a vector, computed by double backward."""
    if any(local(p) is not p for p in params):
        raise RuntimeError(
            'hvp="exact" is not possible under FSDP2, which does not support double backward: use hvp="central"'
        )
    total = None
    with replicas.no_sync(model), sdpa_kernel(SDPBackend.MATH):  # other attention kernels have no second derivative
        for closure in _as_list(closures):
            loss = _loss(closure, vector.space.members)
            if any(p.grad is not None for p in params):
                raise RuntimeError('hvp="exact" needs a closure that returns the loss and does not call backward')
            _require_graph(loss)
            grads: Any = torch.autograd.grad(
                loss.sum(), params, create_graph=True, allow_unused=True
            )  # None where unused
            reached = [(g, v) for g, v in zip(grads, vector.tensors, strict=True) if g is not None and g.requires_grad]
            products: Sequence[Tensor | None] = [None] * len(params)  # zero: the loss is linear in all parameters
            if reached:
                dot = vector.space.total([(g * v).sum() for g, v in reached])
                products = torch.autograd.grad(dot, params, allow_unused=True)
            product = vector.space.vector(products)
            total = product if total is None else total + product
    assert total is not None
    if replicas.replicated(model) is not None:
        replicas.average_(total.tensors, model)
    return Vector(total.tensors, vector.space)


def closures_for(look: Pass, batches: dict[str, Any], method: str) -> Closures:
    """The closures of the batch that a look is wanted on."""
    if look.batch not in batches:
        raise RuntimeError(f"{method} looks at a batch called {look.batch!r}: there are only {', '.join(batches)}")
    closures = batches[look.batch]
    if closures is None:
        raise RuntimeError(
            f"{method} looks at a batch called {look.batch!r}: pass its closure to step or gradient as {look.batch}=..."
        )
    return closures if look.sample is None else lambda: closures(look.sample)


def _as_list(closures: Closures) -> list[Closure]:
    if callable(closures):
        return [closures]
    if isinstance(closures, Tensor):
        raise TypeError("pass a function that returns the loss, not the loss: step(lambda: criterion(model(x), y))")
    closures = list(closures)
    if not closures:
        raise ValueError("the list of closures is empty")
    return closures


def _loss(closure: Closure, members: int | None) -> Tensor:
    loss: Any = closure()  # whatever the user's function returns
    if members is not None:
        if not isinstance(loss, Tensor) or loss.shape != (members,):
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise TypeError(
                f"the closure must return one loss for each of the {members} members, a tensor of shape ({members},); "
                f"it returned {what}"
            )
        return loss
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise TypeError(f"the closure must return the loss, a tensor with one element; it returned {what}")
    return loss


def _backward(loss: Tensor) -> None:
    try:
        loss.backward()
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise RuntimeError(
            "the closure seems to call backward, but its loss reaches no parameter of this optimizer: nothing would be "
            "trained"
        ) from error


def _require_graph(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise RuntimeError(
            "the closure's loss has no autograd graph, and the closure has left no gradients: return the loss itself, "
            "not a number or a detached tensor, or call backward in the closure"
        )
