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

_FREED = "backward through the graph a second time"  # in torch's error
_NO_GRAPH = (
    "the closure's loss has no autograd graph, and the closure has left no gradients: return the loss itself, not a "
    "number or a detached tensor, or call backward in the closure"
)
_REACHES_NOTHING = (
    "the closure seems to call backward, but its loss reaches no parameter of this optimizer: nothing would be trained"
)
_ANEW = (
    "the closure must compute the loss anew each time, from the model's inputs on: a backward has freed the graph of "
    "what was computed outside of it (the loss, outputs, cached weights)"
)
_MIXED = (
    "the closures must all call backward, or none of them, and each must compute its loss from the model's inputs on: "
    "a backward has freed the graph of this one"
)


def evaluate(
    closures: Closures,
    params: Sequence[Tensor],
    model: nn.Module | None,
    scaler: GradScaler | None,
    members: int | None = None,
    later: bool = False,
) -> Tensor:
    """Compute the gradients of the micro-batches and return their loss, whether or not the closures call backward.

    With `members` there is one loss for each. `later` says that the look is not the first one of its step.
    """
    closures = _as_list(closures)
    total, calls_backward, refused = None, None, None
    for closure in closures:
        with contextlib.nullcontext() if closure is closures[-1] else replicas.no_sync(model):
            loss = _loss(closure, members)
            # The first gradient decides. A micro-batch may leave none: it may take a branch that reaches no parameter.
            if calls_backward is None and [p for p in params if p.grad is not None]:
                calls_backward = True
            if not calls_backward:
                total_loss = loss if members is None else loss.sum()  # members share no weights: no term mixes them
                error = _backward(total_loss if scaler is None else scaler.scale(total_loss), later, calls_backward)
                refused = refused or error
                if any(p.grad is not None for p in params):
                    calls_backward = False
        loss = loss.detach()
        loss = loss if loss.dim() == 0 or members is not None else loss.reshape(())
        total = loss if total is None else total + loss
    if refused is not None and not calls_backward:
        raise refused
    assert total is not None
    return total


def hessian_product(
    closures: Closures, vector: Vector, params: Sequence[Tensor], model: nn.Module | None, local_loss: bool = False
) -> Vector:
    """The Hessian times a vector, computed by double backward; that of this rank's own loss with `local_loss`."""
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
            if not loss.requires_grad:
                raise RuntimeError(_NO_GRAPH)
            try:  # None where unused
                grads: Any = torch.autograd.grad(loss.sum(), params, create_graph=True, allow_unused=True)
            except RuntimeError as error:
                if _FREED not in str(error):
                    raise
                raise RuntimeError(_ANEW) from error
            reached = [(g, v) for g, v in zip(grads, vector.tensors, strict=True) if g is not None and g.requires_grad]
            products: Sequence[Tensor | None] = [None] * len(params)  # zero: the loss is linear in all parameters
            if reached:
                dot = vector.space.total([(g * v).sum() for g, v in reached])
                products = torch.autograd.grad(dot, params, allow_unused=True)
            product = vector.space.vector(products)
            total = product if total is None else total + product
    assert total is not None
    if not local_loss and (ddp := replicas.data_parallel(model)) is not None:
        replicas.average_(total.tensors, model)
        ddp.require_forward_param_sync = True  # buffers, in the next look: this pass was not synchronised
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


def _backward(loss: Tensor, later: bool, calls_backward: bool | None) -> RuntimeError | None:
    """Run backward; or return what is wrong, if the loss has no graph or one that another backward has freed."""
    if not loss.requires_grad:
        return RuntimeError(_NO_GRAPH)
    try:
        loss.backward()
    except RuntimeError as error:
        if _FREED not in str(error):
            raise
        refused = RuntimeError(_ANEW if later else _MIXED if calls_backward is False else _REACHES_NOTHING)
        refused.__cause__ = error
        return refused
