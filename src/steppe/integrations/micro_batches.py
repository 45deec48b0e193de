"""What trainers have in common: they run each micro-batch once, and a method may want to see it again.

The trainer's own pass is a method's first look; the weights are where they always are. When the last micro-batch of
a step is done, the other looks run all of them again. Outputs, logs, hooks and losses are those of the first look.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from ..engine import replicas
from ..engine.looks import Pass
from ..optimizer import SharpnessAware

# Forward and backward of one micro-batch: is told whether it is the step's last, returns its share of the loss.
Again = Callable[[bool], Tensor | None]
Auxiliary = Literal["previous", "fixed"]


class Replay:
    """The micro-batches of one step, as a trainer goes through them.

    Args:
        auxiliary: which batch a method that looks at a second one is shown: that of the step before ("previous")
            or that of the first step ("fixed"). The first step is its own; so is the first after resuming, for no
            checkpoint holds a batch.
    """

    def __init__(self, auxiliary: Auxiliary = "previous"):
        if auxiliary not in ("previous", "fixed"):
            raise ValueError(f'auxiliary must be "previous" or "fixed", not {auxiliary!r}')
        self._choose = auxiliary
        self._looks: Generator[Pass, None, None] | None = None
        self._first: Pass | None = None
        self._now: tuple[Again, RandomState] | None = None  # the micro-batch under way
        self._main: list[tuple[Again, RandomState]] = []  # those that have come to a loss: others are not seen again
        self._second: list[Again] = []

    @property
    def open(self) -> bool:
        """Whether the first look is under way."""
        return self._looks is not None

    @property
    def seen(self) -> bool:
        """Whether it is, and has come to a loss."""
        return self.open and self._first is not None and self._first.loss is not None

    def begin(self, optimizer: SharpnessAware, again: Again, scaler: GradScaler | None = None) -> None:
        """Call before the trainer's own pass over a micro-batch; `again` must repeat that pass."""
        if self._looks is None:
            if "sample" in optimizer.method.needs:
                raise RuntimeError(
                    f"{optimizer.method} looks at single examples, and a trainer has only batches: use your own loop"
                )
            optimizer.zero_grad()
            self._looks = optimizer.passes(scaler)
            self._first = next(self._looks)
            self._optimizer = optimizer
        self._now = again, RandomState(optimizer.param_groups[0]["params"][0].device)

    def saw(self, loss: Tensor) -> None:
        """Call after it, with the micro-batch's share of the (unscaled) loss."""
        assert self._first is not None and self._now is not None
        self._first.report(loss)
        self._main.append(self._now)

    def look_around(self) -> None:
        """Call after the step's last micro-batch, before anything uses the gradients: now the other looks run."""
        assert self._looks is not None
        looks, self._looks = self._looks, None
        main, self._main, self._now = self._main, [], None
        second = self._second or [again for again, _ in main]
        with torch.enable_grad(), contextlib.closing(looks):  # an exception must bring the weights home at once
            for look in looks:
                if look.batch == "main":
                    for i, (again, random_state) in enumerate(main):
                        random_state.restore()  # much may have drawn numbers between two micro-batches
                        _report(look, again(i == len(main) - 1))
                else:
                    for i, again in enumerate(second):
                        _report(look, again(i == len(second) - 1))
        if isinstance(self._optimizer.model, DistributedDataParallel):
            self._optimizer.model.require_backward_grad_sync = True  # see `apart`
        if "auxiliary" in self._optimizer.method.needs and (self._choose == "previous" or not self._second):
            self._second = [again for again, _ in main]

    def close(self) -> None:
        """Undo the step under way: the trainer stopped in it."""
        if self._looks is not None:
            self._looks.close()
        self._looks, self._main, self._now = None, [], None

    def leave(self) -> None:
        """Forget the step under way: the trainer goes on without it, with what its pass left behind."""
        if self._looks is not None:
            self._optimizer.abandon()
            self._looks = None
        self.close()

    def start_over(self) -> None:
        """Before a new training: forget everything."""
        self.close()
        self._second = []


def attach(optimizer: SharpnessAware, model: nn.Module, local: bool) -> None:
    """Tell an optimizer of the model that a trainer has wrapped since the optimizer was made."""
    if local and not isinstance(model, DistributedDataParallel):
        raise ValueError("local=True needs several processes with DistributedDataParallel")
    optimizer.model = model
    optimizer.local = optimizer.local or local


def apart(optimizer: SharpnessAware) -> contextlib.AbstractContextManager[None]:
    """Around a pass of a trainer that keeps micro-batches from being synchronised itself: it ends what a look began."""
    return replicas.no_sync(optimizer.model) if optimizer.local else contextlib.nullcontext()


class RandomState:
    """Of the CPU and of a device, at one moment."""

    def __init__(self, device: torch.device):
        self._cpu = torch.get_rng_state()
        self._device = None if device.type in ("cpu", "meta") else device
        self._state = None if self._device is None else torch.get_device_module(self._device).get_rng_state(device)

    def restore(self) -> None:
        """Make it what it was."""
        torch.set_rng_state(self._cpu)
        if self._device is not None:
            torch.get_device_module(self._device).set_rng_state(self._state, self._device)


def _report(look: Pass, loss: Tensor | None) -> None:
    if loss is not None:
        look.report(loss)
