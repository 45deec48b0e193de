"""Replays micro-batches: a trainer runs each of them once, and a method's other looks need them again.

The trainer's own pass is the method's first look, usually at w itself. After the last micro-batch of a step, the other
looks run all micro-batches again. Outputs, logs, hooks and losses are those of the first look.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from ..auxiliary import held_out_batches, part_of
from ..engine import replicas
from ..engine.groups import first_parameter
from ..engine.isolation import Snapshot
from ..engine.looks import Pass
from ..method import Method
from ..methods.late import for_steps
from ..optimizer import SharpnessAware

# Runs forward and backward of one micro-batch again; the argument says whether it is the last one of the step. Returns
# the micro-batch's share of the loss.
Repeat = Callable[[bool], Tensor | None]
MakePass = Callable[[Any], Repeat]  # makes such a function for another batch than the trainer's
Auxiliary = Literal["previous", "fixed"] | Any  # or a held-out batch, or a loader of held-out batches


class Replay:
    """Runs the other looks of a step on the micro-batches that a trainer has run once.

    Args:
        auxiliary: the second batch, for methods that look at two: that of the previous step ("previous") or that of
            the first step ("fixed"). The first step uses its own batch; so does the first step after resuming, because
            checkpoints hold no batches. Or a batch or a loader that is held out of training: as many of its batches
            are used as the step has micro-batches (`steppe.hold_out` splits a data set, also in turns).
    """

    def __init__(self, auxiliary: Auxiliary = "previous"):
        held_out = not isinstance(auxiliary, (str, int, float, type(None)))
        if not held_out and auxiliary not in ("previous", "fixed"):
            raise ValueError(
                f'auxiliary must be "previous" or "fixed", or a held-out batch or loader, not {auxiliary!r}'
            )
        self._choose = "held-out" if held_out else auxiliary
        self._in_turns = part_of(auxiliary)  # the held-out part of a data set, if it changes with the epoch
        self._held_out = held_out_batches(auxiliary) if held_out else None
        self._make_pass: MakePass | None = None
        self._looks: Generator[Pass, None, None] | None = None
        self._first: Pass | None = None
        self.away = False  # whether the first look of the step under way is away from w
        self._current: tuple[Repeat, Snapshot] | None = None  # the current micro-batch, and the random state before it
        self._main: list[tuple[Repeat, Snapshot]] = []  # micro-batches with a loss; others are not run again
        self._second: list[Repeat] = []  # the second batch of the next step

    def begin_training(self, optimizer: SharpnessAware, method: Method, steps: float, epoch_steps: float) -> None:
        """Give the optimizer its method, which may have to know how long training is.

        Both numbers may be infinite: unknown.
        """
        turns = self._in_turns is not None and epoch_steps < math.inf
        optimizer.method = for_steps(method, steps, int(epoch_steps) if turns else 0)

    def begin_epoch(self, epoch: int) -> None:
        """Say which epoch begins, counted from 0: other examples may be held out in it."""
        if self._in_turns is not None:
            self._in_turns.set_epoch(epoch)

    @property
    def open(self) -> bool:
        """Whether the first look is under way."""
        return self._looks is not None

    @property
    def has_loss(self) -> bool:
        """Whether the first look is under way and has a loss."""
        return self.open and self._first is not None and self._first.loss is not None

    def begin(
        self,
        optimizer: SharpnessAware,
        repeat: Repeat,
        scaler: GradScaler | None = None,
        make_pass: MakePass | None = None,
    ) -> None:
        """Prepare the trainer's own pass over a micro-batch. `repeat` must run this pass again.

        `make_pass` makes such a function for a held-out batch, which has not been moved to the device yet.
        """
        self._make_pass = make_pass
        if self._held_out is not None and make_pass is None:
            raise RuntimeError('this trainer supports no held-out batch: auxiliary must be "previous" or "fixed"')
        if self._looks is None:
            if "sample" in optimizer.method.needs:
                raise RuntimeError(
                    f"{optimizer.method} looks at single examples, but a trainer has batches only: use your own loop"
                )
            if "held-out" in optimizer.method.needs and self._held_out is None:
                raise RuntimeError(
                    f"{optimizer.method.name} needs examples that are not trained on: train, held = steppe.hold_out("
                    "data, 500), and pass a batch or a loader of `held` as auxiliary"
                )
            if self._in_turns is not None and for_steps(optimizer.method, math.inf, 1) != optimizer.method:
                raise RuntimeError(
                    "examples are held out in turns: say how many optimizer steps an epoch has, with "
                    f"{optimizer.method.name}(epoch_steps=...)"
                )
            optimizer.zero_grad()
            weights = [p for group in optimizer.param_groups for p in group["params"]]
            before = [p._version for p in weights]
            self._looks = optimizer.passes(scaler)
            self._first = next(self._looks)
            self.away = before != [p._version for p in weights]
            self._optimizer = optimizer
        random_state = Snapshot((), [first_parameter(optimizer.param_groups).device])
        self._current = repeat, random_state

    def add_loss(self, loss: Tensor) -> None:
        """Report the micro-batch's share of the (unscaled) loss, after the trainer's own pass."""
        assert self._first is not None and self._current is not None
        self._first.report(loss)
        self._main.append(self._current)

    def run_other_looks(self) -> None:
        """Run the other looks. Call it after the last micro-batch of a step, before anything uses the gradients."""
        assert self._looks is not None
        looks, self._looks = self._looks, None
        main, self._main, self._current = self._main, [], None
        second: list[Repeat] = []  # the same for all looks of the step
        with torch.enable_grad(), contextlib.closing(looks):  # an exception must restore the weights immediately
            for look in looks:
                if look.batch == "main":
                    for i, (repeat, random_state) in enumerate(main):
                        random_state.restore()  # the trainer may draw random numbers between two micro-batches
                        _report(look, repeat(i == len(main) - 1))
                else:
                    second = second or self._auxiliary([repeat for repeat, _ in main])
                    for i, repeat in enumerate(second):
                        _report(look, repeat(i == len(second) - 1))
        if (ddp := replicas.replicated(self._optimizer.model)) is not None:
            ddp.require_backward_grad_sync = True  # see `unsynchronised`
        keeps = self._choose == "previous" or (self._choose == "fixed" and not self._second)
        if "auxiliary" in self._optimizer.method.needs and keeps:
            self._second = [repeat for repeat, _ in main]

    def _auxiliary(self, main: list[Repeat]) -> list[Repeat]:
        """The second batch of this step, with as many micro-batches as the step: each is its share of the mean."""
        if self._held_out is not None and self._make_pass is not None:
            with torch.random.fork_rng([]):  # a loader draws a seed, which must not change what the looks draw
                batches = [next(self._held_out) for _ in main]
            return [self._make_pass(batch) for batch in batches]
        return self._second or main

    def close(self) -> None:
        """Undo the step under way, if the trainer has stopped during it."""
        if self._looks is not None:
            self._looks.close()
        self._looks, self._main, self._current = None, [], None

    @contextlib.contextmanager
    def undone_by_interrupt(self) -> Generator[None, None, None]:
        """The context of a trainer's own pass: Ctrl-C in it undoes the step under way."""
        try:
            yield
        except KeyboardInterrupt:
            self.close()
            raise

    def abandon(self) -> None:
        """Give up the step under way, but keep the buffers and random state of the trainer's pass."""
        if self._looks is not None:
            self._optimizer.abandon()
            self._looks = None
        self.close()

    def start_over(self) -> None:
        """Reset, before a new training run."""
        self.close()
        self._second = []


def attach(optimizer: SharpnessAware, model: nn.Module, local: bool) -> None:
    """Set an optimizer's model to the one that a trainer has wrapped, after the optimizer was made."""
    if local and replicas.replicated(model) is None:
        raise ValueError("local=True needs a model in DistributedDataParallel: train with DDP, or leave local out")
    optimizer.model = model
    optimizer.local = optimizer.local or local


def unsynchronised(optimizer: SharpnessAware) -> contextlib.AbstractContextManager[None]:
    """The context of a trainer's own pass: with ``local=True`` DDP does not synchronise gradients in it.

    The no_sync of the look is not enough: a trainer's own no_sync switches synchronisation on again when it exits.
    """
    return replicas.no_sync(optimizer.model) if optimizer.local else contextlib.nullcontext()


def _report(look: Pass, loss: Tensor | None) -> None:
    if loss is not None:
        look.report(loss)
