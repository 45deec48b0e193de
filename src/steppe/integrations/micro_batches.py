"""What the integrations share: a trainer runs each micro-batch once, and a method may need it again.

The trainer's own pass is the first look of a method, at the weights themselves. After the last micro-batch of a step,
the other looks run all micro-batches again. Outputs, logs, hooks and losses are those of the first look.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from ..auxiliary import held_out_batches
from ..engine import replicas
from ..engine.isolation import Snapshot
from ..engine.looks import Pass
from ..optimizer import SharpnessAware

# Repeats forward and backward of one micro-batch, given whether it is the last of the step; returns its share of the
# loss.
Again = Callable[[bool], Tensor | None]
On = Callable[[Any], Again]  # the same for another batch than the trainer's
Auxiliary = Literal["previous", "fixed"] | Any  # or a batch, or a loader, of examples that are held out of training


class Replay:
    """The micro-batches of one step, in the order in which a trainer runs them.

    Args:
        auxiliary: which batch is the second one, for methods that look at a second batch: that of the step before
            ("previous") or that of the first step ("fixed"). The first step uses its own batch; so does the first step
            after resuming, because checkpoints hold no batch. Or a batch, or a loader, that is held out of training:
            as many of its batches as the step has micro-batches (`steppe.hold_out` splits a data set).
    """

    def __init__(self, auxiliary: Auxiliary = "previous"):
        held_out = not isinstance(auxiliary, (str, int, float, type(None)))
        if not held_out and auxiliary not in ("previous", "fixed"):
            raise ValueError(
                f'auxiliary must be "previous" or "fixed", or a held-out batch or loader, not {auxiliary!r}'
            )
        self._choose = "held-out" if held_out else auxiliary
        self._held_out = held_out_batches(auxiliary) if held_out else None
        self._on: On | None = None
        self._looks: Generator[Pass, None, None] | None = None
        self._first: Pass | None = None
        self.away = False  # whether the first look of the step under way is not at the weights, but somewhere else
        self._now: tuple[Again, Snapshot] | None = None  # the current micro-batch
        self._main: list[tuple[Again, Snapshot]] = []  # those with a loss; others are not run again
        self._second: list[Again] = []

    @property
    def open(self) -> bool:
        """Whether the first look is under way."""
        return self._looks is not None

    @property
    def has_loss(self) -> bool:
        """Whether the first look is under way and has a loss."""
        return self.open and self._first is not None and self._first.loss is not None

    def begin(
        self, optimizer: SharpnessAware, again: Again, scaler: GradScaler | None = None, on: On | None = None
    ) -> None:
        """Call before the trainer's own pass over a micro-batch. `again` must repeat this pass.

        `on` makes the same pass over a batch that is held out of training, which is on no device yet.
        """
        self._on = on
        if self._held_out is not None and on is None:
            raise RuntimeError('this trainer takes no held-out batch: auxiliary must be "previous" or "fixed"')
        if self._looks is None:
            if "sample" in optimizer.method.needs:
                raise RuntimeError(
                    f"{optimizer.method} looks at single examples, but a trainer has only batches: use your own loop"
                )
            optimizer.zero_grad()
            weights = [p for group in optimizer.param_groups for p in group["params"]]
            before = [p._version for p in weights]
            self._looks = optimizer.passes(scaler)
            self._first = next(self._looks)
            self.away = before != [p._version for p in weights]
            self._optimizer = optimizer
        self._now = again, Snapshot((), [optimizer.param_groups[0]["params"][0].device])  # of random states alone

    def add_loss(self, loss: Tensor) -> None:
        """Call after the trainer's own pass, with the micro-batch's share of the (unscaled) loss."""
        assert self._first is not None and self._now is not None
        self._first.report(loss)
        self._main.append(self._now)

    def run_other_looks(self) -> None:
        """Call after the last micro-batch of a step, before anything uses the gradients."""
        assert self._looks is not None
        looks, self._looks = self._looks, None
        main, self._main, self._now = self._main, [], None
        second: list[Again] = []  # one for all looks of a step
        with torch.enable_grad(), contextlib.closing(looks):  # an exception must restore the weights at once
            for look in looks:
                if look.batch == "main":
                    for i, (again, random_state) in enumerate(main):
                        random_state.restore()  # the trainer may draw random numbers between two micro-batches
                        _report(look, again(i == len(main) - 1))
                else:
                    second = second or self._auxiliary([again for again, _ in main])
                    for i, again in enumerate(second):
                        _report(look, again(i == len(second) - 1))
        if isinstance(self._optimizer.model, DistributedDataParallel):
            self._optimizer.model.require_backward_grad_sync = True  # see `unsynchronised`
        keeps = self._choose == "previous" or (self._choose == "fixed" and not self._second)
        if "auxiliary" in self._optimizer.method.needs and keeps:
            self._second = [again for again, _ in main]

    def _auxiliary(self, main: list[Again]) -> list[Again]:
        """The second batch of this step, in as many micro-batches as the step has: each counts for its share."""
        if self._held_out is not None and self._on is not None:
            with torch.random.fork_rng([]):  # a loader draws a seed; the looks have to draw what the first one drew
                batches = [next(self._held_out) for _ in main]
            return [self._on(batch) for batch in batches]
        return self._second or main

    def close(self) -> None:
        """Undo the step under way, if the trainer stopped during it."""
        if self._looks is not None:
            self._looks.close()
        self._looks, self._main, self._now = None, [], None

    def abandon(self) -> None:
        """Give up the step under way. Buffers and random state stay as the trainer's pass left them."""
        if self._looks is not None:
            self._optimizer.abandon()
            self._looks = None
        self.close()

    def start_over(self) -> None:
        """Forget everything, before a new training run."""
        self.close()
        self._second = []


def attach(optimizer: SharpnessAware, model: nn.Module, local: bool) -> None:
    """Give an optimizer the model as a trainer has wrapped it, after the optimizer was made."""
    if local and not isinstance(model, DistributedDataParallel):
        raise ValueError("local=True needs several processes with DistributedDataParallel")
    optimizer.model = model
    optimizer.local = optimizer.local or local


def unsynchronised(optimizer: SharpnessAware) -> contextlib.AbstractContextManager[None]:
    """Around a trainer's own pass: with ``local=True`` DDP must not synchronise it.

    The no_sync of the look is not enough: a trainer's own no_sync switches synchronisation on again when it ends.
    """
    return replicas.no_sync(optimizer.model) if optimizer.local else contextlib.nullcontext()


def _report(look: Pass, loss: Tensor | None) -> None:
    if loss is not None:
        look.report(loss)
