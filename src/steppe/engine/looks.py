"""One step's looks: out with the weights, look, home again."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from ..method import HERE, HVP, Context, Look, Method, Seen
from ..vector import Space, Vector
from . import replicas
from .finite_difference import by_difference
from .isolation import Quiet
from .shards import local


@dataclass
class Pass:
    """One round of `SharpnessAware.passes`: which look it is, and on which batch the method wants it."""

    index: int
    batch: str = "main"
    sample: int | None = None  # on batch "sample": which example
    loss: Tensor | None = None
    product: HVP | None = None  # the exact product that is wanted in place of a gradient

    def report(self, loss: Tensor) -> None:
        """Tell the method the loss of this look (the unscaled one). Called several times, it adds up."""
        self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()


class WithoutStep(Exception):
    """Thrown into the looks by who goes on without a step, but with what the first look did to buffers and the like."""


class Scale:
    """A GradScaler's loss scale: methods see true gradients, the scaler gets a scaled direction back.

    A gradient that overflowed in any look makes the whole direction NaN, also where the method does not use it:
    then the scaler skips the step, on every rank, and nothing here has to wait for the device to decide.
    """

    def __init__(self, scaler: GradScaler, device: torch.device):
        self._scale = scaler.scale(torch.ones((), device=device))
        self._poison = torch.zeros_like(self._scale)

    def remove(self, grad: Vector) -> None:
        """Make a scaled gradient a true one."""
        grad.mul_(1 / self._scale)
        self._poison = self._poison + 0 * grad.norm()

    def put_back(self, direction: Vector) -> None:
        """Scale a direction, or spoil it if a gradient had overflowed."""
        direction.mul_(self._scale + self._poison)


class Walk:
    """Moves the weights to where a method looks and tells it what is seen there.

    Whatever happens, the weights are back when `passes` ends: copied from `home`, never computed back.
    """

    def __init__(
        self,
        method: Method,
        space: Space,
        ctx: Context,
        quiet: Quiet,
        model: nn.Module | None,
        scale: Scale | None,
        alone: bool,
        hvp: str,
        room: Vector | None,
    ):
        self.method, self.space, self.ctx, self.scale = method, space, ctx, scale
        self.home: Vector | None = None  # where the weights were, once they have left
        self.used = [False] * len(space.params)  # which parameters a look saw a gradient of
        self._quiet, self._model, self._hvp, self._room = quiet, model, hvp, room
        self._weights = space.live()
        self._alone = alone
        ctx.weights = self._start

    def passes(self, first_done: bool) -> Generator[Pass, None, Vector]:
        """Yield once for every look, with the weights where the method wants them; return the direction."""
        apart = self._alone and replicas.can_skip_sync(self._model)
        if apart:
            replicas.sync_buffers_next(self._model)
        index = 0
        try:
            asks = self._looks()
            ask = [next(asks)]  # in a list that is emptied before the look: an offset is as large as the model
            while True:
                if index > 0:
                    self._quiet.rewind()
                elif not first_done:
                    self._clear_gradients()
                elif ask[0] != HERE:
                    raise RuntimeError(f"first_done=True, but {self.method.name} does not look at the weights first")
                report = self._go(index, ask.pop())
                with self._around(report, apart):
                    yield report
                index += 1
                ask = [asks.send(self._answer(report))]
        except StopIteration as end:
            self._quiet.settle()
            self.ctx.metrics["looks"] = index
            return end.value
        except WithoutStep:
            self._clear_gradients()
            raise
        except BaseException:  # also GeneratorExit: the loop around `passes` was left early
            self._clear_gradients()
            self._quiet.undo()
            raise
        finally:
            self.ctx.weights = self.space.live  # no circle: what a step held must be free when it ends
            if self.home is not None:
                with torch.no_grad():
                    self._weights.copy_(self.home)
                self._quiet.weights_moved()

    def _around(self, report: Pass, apart: bool) -> contextlib.AbstractContextManager[Any]:
        """What a look needs around it; most need nothing."""
        around = contextlib.ExitStack()
        if report.index == 0 and "hvp" in self.method.needs:
            around.enter_context(self._quiet.precision.noting())
        if report.sample is not None:
            around.enter_context(self._quiet.single_example())
        if apart:
            around.enter_context(replicas.no_sync(self._model))
        return around

    def _start(self) -> Vector:
        """The weights that the step starts from: a copy, made when first needed, for they will move."""
        if self.home is None:
            with torch.no_grad():
                self.home = self._weights.clone(room=self._room)
        return self.home

    def _go(self, index: int, ask: Look | HVP) -> Pass:
        """Bring the weights to where a look is wanted."""
        product = ask if isinstance(ask, HVP) else None
        look = ask.at if isinstance(ask, HVP) else ask
        with torch.no_grad():
            if look.offset is not None:
                here = self._weights if self.home is None else self.home  # the same, but in place saves a copy
                self._start()
                self._weights.move_(here, look.offset.perturbed())
            elif self.home is not None:
                self._weights.copy_(self.home)
        if self.home is not None:
            self._quiet.weights_moved()
        return Pass(index, look.batch, look.sample, product=product)

    def _looks(self) -> Any:
        """The method's looks; Hessian-vector products become differences unless exact ones are wanted."""
        asks = self.method.looks(self.ctx)
        if "hvp" not in self.method.needs or self._hvp == "exact":
            return asks
        with torch.no_grad():
            w_norm = self._weights.perturbed().norm()
        return by_difference(asks, w_norm, self._quiet.precision.name, self._hvp == "central")

    def _answer(self, report: Pass) -> Any:
        """What the method is told about a look."""
        if report.product is not None:
            return report.product.vector
        loss = report.loss
        if "loss" in self.method.needs:
            if loss is None:
                raise RuntimeError(f"{self.method.name} needs the loss of every look: call look.report(loss)")
            loss = loss if self._alone else replicas.mean(loss, self._model)
        self.ctx.losses.append(loss)
        return Seen(self._collect(), loss)

    def _collect(self) -> Vector:
        """Take the gradients out of the parameters, as a vector that nothing else writes to."""
        grads = [p.grad for p in self.space.params]
        self._clear_gradients()
        self.used = [used or grad is not None for used, grad in zip(self.used, grads, strict=True)]
        unusual = [g for g in grads if g is not None and (g.requires_grad or g.layout is not torch.strided)]
        if unusual or torch.distributed.is_initialized():
            grads = [None if grad is None else _own(grad) for grad in grads]
        vector = self.space.vector(grads)
        if self.scale is not None:
            self.scale.remove(vector)
        return vector

    def _clear_gradients(self) -> None:
        for p in self.space.params:
            p.grad = None


def _own(grad: Tensor) -> Tensor:
    """A gradient as a plain tensor that nothing else writes to."""
    if grad.layout is not torch.strided:
        raise TypeError("sparse gradients are not supported: use nn.Embedding(sparse=False)")
    if grad._base is not None and local(grad) is grad:
        grad = grad.clone()  # DDP's gradient_as_bucket_view: the next look would overwrite it
    # Only now: a detached view no longer says that it is one.
    return grad.detach() if grad.requires_grad else grad
