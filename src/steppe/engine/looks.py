"""The looks of one step: move the weights to where the method looks, collect loss and gradient, restore the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from ..method import HERE, HVP, Context, Look, Looks, Method, Seen
from ..vector import Space, Vector
from . import replicas, side_by_side
from .finite_difference import by_difference
from .home import Home, Place
from .isolation import Isolation
from .shards import local, reduced_like
from .side_by_side import Beside

Products = Literal["forward", "central", "exact"]  # how Hessian-vector products are computed


@dataclass
class Pass:
    """One round of `SharpnessAware.passes`: which look it is, and on which batch the method wants it."""

    index: int
    batch: str = "main"
    sample: int | None = None  # on batch "sample": which example
    loss: Tensor | None = None
    product: HVP | None = None  # the exact product that is wanted in place of a gradient

    def report(self, loss: Tensor) -> None:
        """Tell the method the (unscaled) loss of this look. Several calls add up."""
        self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()


class Abandoned(Exception):
    """Thrown into the looks of a step that is given up, if what its first look did to buffers is to stay."""


class LossScale:
    """A GradScaler's loss scale: methods see true gradients, the scaler gets a scaled direction back.

    A gradient that overflowed in any look makes the whole direction NaN, even where the method does not use it. Then
    the scaler skips the step, on every rank, and nothing here has to wait for the device to decide.
    """

    def __init__(self, scaler: GradScaler, device: torch.device):
        self._scale = scaler.scale(torch.ones((), device=device))
        self._overflow = torch.zeros_like(self._scale)  # becomes NaN

    def remove(self, grad: Vector) -> None:
        """Make a scaled gradient a true one."""
        grad.mul_(1 / self._scale)
        self._overflow = self._overflow + 0 * grad.norm()

    def restore(self, direction: Vector) -> None:
        """Scale a direction; make it NaN if a gradient had overflowed."""
        direction.mul_(self._scale + self._overflow)


@dataclass(frozen=True)
class Surroundings:
    """What the looks of a step happen in: the model, and how the optimizer was set up."""

    model: nn.Module | None
    local: bool  # each rank looks on its own batch alone
    hvp: Products
    loss_group: Any = None  # the ranks whose losses belong together, if the model does not show them
    home: Place = "device"  # where the weights are kept while a look is somewhere else
    beside: Beside | None = None  # runs looks that do not depend on each other side by side


class LookRunner:
    """Moves the weights to where a method looks and tells the method what is seen there.

    Whatever happens, the weights are restored when `passes` ends: copied from `home`, never computed back.
    """

    def __init__(
        self,
        method: Method,
        space: Space,
        ctx: Context,
        isolation: Isolation,
        around: Surroundings,
        scale: LossScale | None,
        home: Home,
        precision_known: bool = False,
    ):
        self.method, self.space, self.ctx, self.scale = method, space, ctx, scale
        self.home: Home | None = None  # holds a copy of the weights, once one is needed
        self.restored = False  # whether everything that the looks disturbed has been restored
        self.used = [False] * len(space.params)  # which parameters had a gradient in any look
        self._isolation, self._around, self._copy = isolation, around, home
        self._moved = False  # whether the weights are somewhere else now
        self._looked_aside = False  # whether a look was away from the weights without moving them
        self._precision_known = precision_known  # noted while a framework ran the first look
        self._done = 0  # looks
        self._unsynchronised = False
        self._weights = space.live()
        ctx.weights = self._start

    def passes(self, first_done: bool) -> Generator[Pass, None, Vector]:
        """Yield once for every look, with the weights where the method wants them; return the direction."""
        model = self._around.model
        self._unsynchronised = self._around.local and replicas.can_skip_sync(model)
        if self._unsynchronised:
            replicas.sync_buffers_next(model)
        try:
            asks = self._looks()
            ask: Any = [next(asks)]  # a list that is emptied before the look: an offset is as large as the model
            while True:
                single = isinstance(ask[0], (Look, HVP))
                run = self._look(ask, first_done) if single else self._several(ask.pop(), first_done)
                ask = [asks.send((yield from run))]
        except StopIteration as end:
            self._isolation.after_last_look()
            self.ctx.metrics["looks"] = self._done
            return end.value
        except Abandoned:
            self._clear_gradients()
            self._isolation.after_last_look()
            raise
        except BaseException:  # also GeneratorExit: the loop around `passes` was left early
            self._clear_gradients()
            self._isolation.undo()
            raise
        finally:
            self._restore_weights()

    def _look(self, ask: list[Look | HVP], first_done: bool) -> Generator[Pass, None, Any]:
        """One look: what the method is told about it."""
        if self._done > 0:
            self._isolation.before_extra_look()
        elif not first_done:
            self._clear_gradients()
        elif ask[0] != HERE:
            raise RuntimeError(f"first_done=True, but {self.method.name} does not look at the weights first")
        return (yield from self._pass(self._go(ask.pop())))

    def _pass(self, report: Pass) -> Generator[Pass, None, Any]:
        with self._look_context(report):
            yield report
        self._done += 1
        return self._answer(report)

    def _several(self, asks: Iterable[Look | HVP], first_done: bool) -> Generator[Pass, None, tuple[Any, ...]]:
        """Looks that do not depend on each other: one after another, or side by side."""
        asks, seen = iter(asks), list[Any]()
        if self._around.beside is not None and not first_done and self.scale is None:  # which all looks write to
            looks = list(asks)
            if side_by_side.possible(looks, self._around.model, self.space.params) and self._isolation.only_buffers():
                return (yield from self._side_by_side(looks, self._around.beside))
            asks = iter(looks)
        while one := list(islice(asks, 1)):
            seen.append((yield from self._look(one, first_done)))
        return tuple(seen)

    def _side_by_side(self, looks: list[Look | HVP], beside: Beside) -> Generator[Pass, None, tuple[Any, ...]]:
        """Each look on memory of its own; the weights stay where the step started."""
        assert self._around.model is not None
        if self._done > 0:
            self._isolation.before_extra_look()
        with torch.no_grad():
            if self.home is not None and self._moved:
                self.home.restore(self._weights)
                self._moved = False
            places = side_by_side.Places(
                looks, self._weights, self._around.model, self._first_move(), self._isolation.buffers_before
            )
        self._looked_aside |= places.away
        beside.fork(len(looks))
        seen = list[Any]()
        for number, look in enumerate(looks):
            if number > 0:
                self._isolation.before_extra_look()
            with beside.branch(number), places.of(number):
                self._isolation.drop_cached_weights()
                self._clear_gradients()
                assert isinstance(look, Look)
                seen.append((yield from self._pass(Pass(self._done, look.batch))))
        self._isolation.drop_cached_weights()
        beside.join()
        return tuple(seen)

    def _restore_weights(self) -> None:
        self.ctx.weights = self.space.live  # no reference cycle: a step's memory is freed when it ends
        if self.home is not None:
            with torch.no_grad():
                self.home.restore(self._weights)
            self._isolation.drop_cached_weights()
        self.restored = True

    def undo(self) -> None:
        """Restore everything once more: an interrupt came while that was being done."""
        self._clear_gradients()
        self._isolation.undo()
        self._restore_weights()

    def _look_context(self, report: Pass) -> contextlib.AbstractContextManager[Any]:
        """What a look needs around it; most need nothing."""
        stack = contextlib.ExitStack()
        if report.index == 0 and "hvp" in self.method.needs and not self._precision_known:
            stack.enter_context(self._isolation.precision.noting())
        if report.sample is not None:
            stack.enter_context(self._isolation.single_example())
        if self._unsynchronised:
            stack.enter_context(replicas.no_sync(self._around.model))
        return stack

    def _start(self) -> Vector:
        """The weights that the step starts from: a copy, made when first needed, because they will move."""
        with torch.no_grad():
            return self._copied().vector(self._weights, self._moved)

    def _copied(self) -> Home:
        if self.home is None:
            self._copy.finish(self._weights)
            self.home = self._copy
        return self.home

    def _go(self, ask: Look | HVP) -> Pass:
        """Move the weights to where a look is wanted."""
        product = ask if isinstance(ask, HVP) else None
        look = ask.at if isinstance(ask, HVP) else ask
        with torch.no_grad():
            if look.offset is not None:
                in_place = self._first_move()
                home, moved, self._moved = self._copied(), self._moved, True
                if in_place:
                    self._weights.add_(look.offset.perturbed())
                else:
                    home.move(self._weights, look.offset.perturbed(), moved)
            elif self.home is not None:
                if self._moved:
                    self.home.restore(self._weights)
                self._moved = False
            elif self._done == 0 and self.method.cost > 1:
                self._copy.start(self._weights)
        if self.home is not None:
            self._isolation.drop_cached_weights()
        return Pass(self._done, look.batch, look.sample, product=product)

    def _first_move(self) -> bool:
        """Whether the weights have not been moved: then they move in place, which saves reading the copy."""
        return self.home is None and not self._looked_aside

    def _looks(self) -> Looks:
        """The method's looks; Hessian-vector products become differences unless exact ones are wanted."""
        asks, hvp = self.method.looks(self.ctx), self._around.hvp
        if "hvp" not in self.method.needs or hvp == "exact":
            return asks
        with torch.no_grad():
            w_norm = self._weights.perturbed().norm()
        return by_difference(asks, w_norm, self._isolation.precision.name, hvp == "central")

    def _answer(self, report: Pass) -> Any:
        """What the method is told about a look."""
        if report.product is not None:
            return report.product.vector
        loss = report.loss
        if "loss" in self.method.needs:
            if loss is None:
                raise RuntimeError(f"{self.method.name} needs the loss of every look: call look.report(loss)")
            loss = loss if self._around.local else self._mean_over_ranks(loss)
        self.ctx.losses.append(loss)
        return Seen(self._collect(), loss)

    def _mean_over_ranks(self, loss: Tensor) -> Tensor:
        return replicas.mean(loss, self._around.model, self._around.loss_group, self.method.name)

    def _collect(self) -> Vector:
        """Take the gradients out of the parameters, as a vector that nothing else writes to."""
        grads = [p.grad for p in self.space.params]
        self._clear_gradients()
        self.used = [used or grad is not None for used, grad in zip(self.used, grads, strict=True)]
        unusual = [g for g in grads if g is not None and (g.requires_grad or g.layout is not torch.strided)]
        if unusual or torch.distributed.is_initialized():
            pairs = zip(grads, self.space.params, strict=True)
            grads = [None if grad is None else _own(reduced_like(grad, p)) for grad, p in pairs]
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
    # Detach last: a detached view does not show that it is one.
    return grad.detach() if grad.requires_grad else grad
