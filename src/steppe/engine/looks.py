"""The looks of one step: move the weights to each look, collect loss and gradient, restore the weights."""

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
from .side_by_side import LookBranches

Products = Literal["forward", "central", "exact"]  # how Hessian-vector products are computed


class Pass:
    """One iteration of `SharpnessAware.passes`: the index of the look, and the batch that the method wants it on."""

    def __init__(
        self,
        index: int,
        batch: str = "main",
        sample: int | None = None,
        linear: bool = False,
        product: HVP | None = None,
    ):
        self.index, self.linear = index, linear
        self.sample = sample  # with batch "sample": the index of the example
        self.product = product  # the exact Hessian-vector product that is wanted instead of a gradient,
        self.answer: Vector | None = None  # and what it is
        self.loss: Tensor | None = None
        self._batch, self._batch_was_read = batch, False

    @property
    def batch(self) -> str:
        """Which batch the look is on: "main", "auxiliary" or "sample"."""
        self._batch_was_read = True
        return self._batch

    def report(self, loss: Tensor) -> None:
        """Pass the (unscaled) loss of this look to the method. The losses of several calls are summed."""
        self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()

    def require_its_batch(self, method: str) -> None:
        """Raise if the look is on another batch than the main one, and the loop cannot have known that."""
        if self._batch != "main" and not self._batch_was_read:
            raise RuntimeError(
                f"{method} looks at a batch called {self._batch!r}: in a loop over passes(), use that one where "
                f"look.batch is {self._batch!r}"
            )


class Abandoned(Exception):
    """Thrown into the looks of a step that is given up and keeps the buffers and random state of its first look."""


class LossScale:
    """A GradScaler's loss scale: methods see unscaled gradients, and the scaler gets a scaled direction.

    A gradient that overflows in any look makes the whole direction NaN, even if the method does not use it. Then the
    scaler skips the step, on every rank, and nothing here has to synchronise with the device to decide that.
    """

    def __init__(self, scaler: GradScaler, device: torch.device):
        self._scale = scaler.scale(torch.ones((), device=device))
        self._overflow = torch.zeros_like(self._scale)  # becomes NaN

    def remove(self, grad: Vector) -> None:
        """Unscale a gradient in place, and note if it has overflowed."""
        grad.mul_(1 / self._scale)
        self._overflow = self._overflow + 0 * grad.norm()

    def restore(self, direction: Vector) -> None:
        """Scale a direction in place; make it NaN if a gradient has overflowed."""
        direction.mul_(self._scale + self._overflow)


@dataclass(frozen=True)
class LookSettings:
    """What the looks of a step depend on besides the method: the model, and settings of the optimizer."""

    model: nn.Module | None
    local: bool  # each rank uses its own batch alone
    hvp: Products
    loss_group: Any = None  # the ranks that share the loss, if the model does not show them
    home: Place = "device"  # where the weights are kept while a look is elsewhere
    branches: LookBranches | None = None  # for independent looks side by side


class LookRunner:
    """Moves the weights to each look of a method, and sends the method what is seen there.

    However `passes` ends, the weights are restored: copied from `home`, never by subtracting an offset.
    """

    def __init__(
        self,
        method: Method,
        space: Space,
        ctx: Context,
        isolation: Isolation,
        settings: LookSettings,
        scale: LossScale | None,
        home: Home,
        begun: bool = False,
    ):
        self.method, self.space, self.ctx, self.scale = method, space, ctx, scale
        self.home: Home | None = None  # holds a copy of the weights, once one is needed
        self.restored = False  # whether everything that the looks disturbed has been restored
        self.used = [False] * len(space.params)  # which parameters had a gradient in any look
        self._isolation, self._settings, self._unfilled_home = isolation, settings, home
        self._moved = False  # whether the weights are away from w now
        self._looked_at_copies = False  # whether a look was away from w on a copy of the weights (side by side)
        self._begun = begun  # a framework runs the first look, and `Step.begin` has entered its context
        self._looks_done = 0
        self._unsynchronised = False
        self._weights = space.live()
        ctx.weights = self._weights_at_start

    def passes(self, first_done: bool) -> Generator[Pass, None, Vector]:
        """Yield once for every look, with the weights where the method wants them; return the direction."""
        self._unsynchronised = self._settings.local and replicas.can_skip_sync(self._settings.model)
        try:
            asks = self._looks()
            # A list that is emptied before the look: a reference would keep the offset, as large as the model, alive.
            ask: Any = [next(asks)]
            while True:
                single = isinstance(ask[0], (Look, HVP))
                run = self._look(ask, first_done) if single else self._independent_looks(ask.pop(), first_done)
                ask = [asks.send((yield from run))]
        except StopIteration as end:
            self._isolation.after_last_look()
            self.ctx.metrics["looks"] = self._looks_done
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
        """Run one look; return the answer for the method."""
        if self._looks_done > 0:
            self._isolation.before_extra_look()
        elif not first_done:
            self._clear_gradients()
        elif ask[0] != HERE:
            raise RuntimeError(
                f"first_done=True, but {self.method.name} does not look at the weights first: use step(closure) or "
                "passes(), which run its first look where it is wanted"
            )
        return (yield from self._pass(self._move_to(ask.pop())))

    def _pass(self, report: Pass) -> Generator[Pass, None, Any]:
        """Let the caller run forward and backward; return the answer for the method."""
        with self._look_context(report):
            yield report
        report.require_its_batch(self.method.name)
        self._looks_done += 1
        return self._answer(report)

    def _independent_looks(
        self, asks: Iterable[Look | HVP], first_done: bool
    ) -> Generator[Pass, None, tuple[Any, ...]]:
        """Run looks that do not depend on each other: one after another, or side by side."""
        asks, seen, branches = iter(asks), list[Any](), self._settings.branches
        if branches is not None and not first_done and self.scale is None:  # all looks would write to the scale
            looks = list(asks)
            if side_by_side.possible(looks, self._settings.model, self.space.params) and self._isolation.only_buffers():
                return (yield from self._side_by_side(looks, branches))
            asks = iter(looks)
        while one := list(islice(asks, 1)):
            seen.append((yield from self._look(one, first_done)))
        return tuple(seen)

    def _side_by_side(self, looks: list[Look | HVP], branches: LookBranches) -> Generator[Pass, None, tuple[Any, ...]]:
        """Run each look on its own copy of weights and buffers. The weights themselves do not move."""
        assert self._settings.model is not None
        if self._looks_done > 0:
            self._isolation.before_extra_look()
        with torch.no_grad():
            if self.home is not None and self._moved:
                self.home.restore(self._weights)
                self._moved = False
            copies = side_by_side.LookCopies(
                looks, self._weights, self._settings.model, self._is_first_move(), self._isolation.buffers_before
            )
        self._looked_at_copies |= copies.any_away
        branches.fork(len(looks))
        seen = list[Any]()
        for number, look in enumerate(looks):
            if number > 0:
                self._isolation.before_extra_look()
            with branches.branch(number), copies.swapped_in(number):
                self._isolation.drop_cached_weights()
                self._clear_gradients()
                assert isinstance(look, Look)
                seen.append((yield from self._pass(Pass(self._looks_done, look.batch))))
        self._isolation.drop_cached_weights()
        branches.join()
        return tuple(seen)

    def _restore_weights(self) -> None:
        self.ctx.weights = self.space.live  # breaks a reference cycle, so that the step's memory is freed at its end
        if self.home is not None:
            with torch.no_grad():
                self.home.restore(self._weights)
            self._isolation.drop_cached_weights()
        self.restored = True

    def undo(self) -> None:
        """Restore everything again, after an interrupt during the first attempt."""
        self._clear_gradients()
        self._isolation.undo()
        self._restore_weights()

    def _look_context(self, report: Pass) -> contextlib.AbstractContextManager[Any]:
        """The context in which a look runs. For most looks it is empty."""
        stack = contextlib.ExitStack()
        if report.index == 0 and not self._begun:
            stack.enter_context(self._isolation.noting(self.method))
        if report.linear:
            stack.enter_context(self._isolation.outputs.replaced(self.method.name))
        if report.sample is not None:
            stack.enter_context(self._isolation.single_example())
        if self._unsynchronised:
            replicas.sync_buffers_next(self._settings.model)  # in every look: all see the same buffers
            stack.enter_context(replicas.no_sync(self._settings.model))
        return stack

    def _weights_at_start(self) -> Vector:
        """The weights at the start of the step: a copy, made on first use, because the weights will move."""
        with torch.no_grad():
            return self._filled_home().vector(self._weights, self._moved)

    def _filled_home(self) -> Home:
        """The home, with a copy of the weights in it."""
        if self.home is None:
            self._unfilled_home.finish(self._weights)
            self.home = self._unfilled_home
        return self.home

    def _move_to(self, ask: Look | HVP) -> Pass:
        """Move the weights to where the method looks."""
        product = ask if isinstance(ask, HVP) else None
        look = ask.at if isinstance(ask, HVP) else ask
        with torch.no_grad():
            if look.offset is not None:
                in_place = self._is_first_move()
                home, moved, self._moved = self._filled_home(), self._moved, True
                if in_place:
                    self._weights.add_(look.offset.perturbed())
                else:
                    home.move(self._weights, look.offset.perturbed(), moved)
            elif self.home is not None:
                if self._moved:
                    self.home.restore(self._weights)
                self._moved = False
            elif self._looks_done == 0 and self.method.cost > 1:
                self._unfilled_home.start(self._weights)
        if self.home is not None:
            self._isolation.drop_cached_weights()
        return Pass(self._looks_done, look.batch, look.sample, look.linear, product)

    @property
    def away(self) -> bool:
        """Whether the weights are perturbed now."""
        return self._moved

    def _is_first_move(self) -> bool:
        """Whether the weights have not moved yet. Then they are moved in place, which saves reading the copy."""
        return self.home is None and not self._looked_at_copies

    def _looks(self) -> Looks:
        """The method's looks. Hessian-vector products become differences of gradients, unless they are to be exact."""
        asks, hvp = self.method.looks(self.ctx), self._settings.hvp
        if "hvp" not in self.method.needs or hvp == "exact":
            return asks
        with torch.no_grad():
            w_norm = self._weights.perturbed().norm()
        return by_difference(asks, w_norm, self._isolation.precision.name, hvp == "central")

    def _answer(self, report: Pass) -> Any:
        """What the method is sent for a look."""
        if report.product is not None:
            assert report.answer is not None  # `passes` refuses exact products
            return report.answer
        loss = report.loss
        if "loss" in self.method.needs:
            if loss is None:
                raise RuntimeError(f"{self.method.name} needs the loss of every look: call look.report(loss)")
            loss = loss if self._settings.local else self._mean_over_ranks(loss)
        self.ctx.losses.append(loss)
        return Seen(self._collect(), loss)

    def _mean_over_ranks(self, loss: Tensor) -> Tensor:
        return replicas.mean(loss, self._settings.model, self.space, self._settings.loss_group, self.method.name)

    def _collect(self) -> Vector:
        """Take the gradients out of the parameters, as a vector to whose memory nothing else writes."""
        grads = [p.grad for p in self.space.params]
        self._clear_gradients()
        self.used = [used or grad is not None for used, grad in zip(self.used, grads, strict=True)]
        unusual = [g for g in grads if g is not None and (g.requires_grad or g.layout is not torch.strided)]
        if unusual or replicas.distributed():
            pairs = zip(grads, self.space.params, strict=True)
            grads = [None if grad is None else _unshared(reduced_like(grad, p)) for grad, p in pairs]
        vector = self.space.vector(grads)
        if self.scale is not None:
            self.scale.remove(vector)
        return vector

    def _clear_gradients(self) -> None:
        for p in self.space.params:
            p.grad = None


def _unshared(grad: Tensor) -> Tensor:
    """A gradient as a plain tensor to whose memory nothing else writes."""
    if grad.layout is not torch.strided:
        raise TypeError("sparse gradients are not supported: use nn.Embedding(sparse=False)")
    if grad._base is not None and local(grad) is grad:
        grad = grad.clone()  # a view into DDP's buckets (gradient_as_bucket_view): the next look would overwrite it
    # Detach last: a detached view has no `_base` that shows that it is a view.
    return grad.detach() if grad.requires_grad else grad
