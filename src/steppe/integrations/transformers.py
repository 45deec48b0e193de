"""Sharpness-aware training with the transformers Trainer.

trainer = SharpnessAwareTrainer(model, args, train_dataset=data, method=steppe.SAM(rho=0.05))
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import transformers
from torch import Tensor, nn

from ..method import Method
from ..optimizer import SharpnessAware
from .accelerate import require_possible, unwrapped
from .micro_batches import Auxiliary, Replay, attach, unsynchronised


class SharpnessAwareMixin:
    """For any kind of Trainer: ``class MyTrainer(SharpnessAwareMixin, Seq2SeqTrainer): ...``.

    The Trainer's own pass is the first look: logged losses are those of this pass. The other looks run after the last
    micro-batch of a step, with the same inputs and the same ``num_items_in_batch``. Clipping, the scaler and
    callbacks see the method's direction. Only parameters that require a gradient are perturbed: with adapters (PEFT),
    the frozen weights are not.

    Args:
        method: for example ``SAM(rho=0.05)``. It wraps the Trainer's optimizer, or the one given as ``optimizers=``.
            Leave it out if that optimizer is a `SharpnessAware` already.
        auxiliary: for methods that look at a second batch; see `steppe.integrations.micro_batches.Replay`.
        local: each process perturbs by its own batch alone; see `SharpnessAware`.
    """

    def __init__(
        self,
        *args: Any,
        method: Method | None = None,
        auxiliary: Auxiliary = "previous",
        local: bool = False,
        **kwargs: Any,
    ):
        self.method, self.local = method, local
        self._replay = Replay(auxiliary)
        self._made: SharpnessAware | None = None
        super().__init__(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Wrap the Trainer's optimizer."""
        trainer: Any = self
        self._replay.start_over()  # an earlier train() may have been interrupted
        optimizer = trainer.optimizer = super().create_optimizer(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if self._made is not None and unwrapped(optimizer) is self._made:  # train() was called before
            return optimizer
        if isinstance(unwrapped(optimizer), SharpnessAware) == (self.method is not None):
            raise TypeError("give SharpnessAwareTrainer either method= or an optimizer that is a SharpnessAware")
        if self.method is not None:
            trainer.optimizer = self._made = SharpnessAware(optimizer, self.method, model=trainer.model)
        return trainer.optimizer

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """The Trainer's step; after the last micro-batch, the other looks."""
        trainer: Any = self
        accelerator, optimizer = trainer.accelerator, unwrapped(trainer.optimizer)
        if not self._replay.open:
            require_possible(accelerator)
            attach(optimizer, model, self.local)
        again = functools.partial(self._again, model, inputs, num_items_in_batch)
        self._replay.begin(optimizer, again, accelerator.scaler)
        with unsynchronised(optimizer):
            loss = self._once(model, inputs, num_items_in_batch)
        self._replay.add_loss(loss)
        if accelerator.sync_gradients:
            self._replay.run_other_looks()
        return loss

    def _once(self, model: nn.Module, inputs: dict[str, Any], count: Tensor | int | None) -> Tensor:
        return super().training_step(model, inputs, count)  # pyright: ignore[reportAttributeAccessIssue]

    def _again(self, model: nn.Module, inputs: dict[str, Any], count: Tensor | int | None, last: bool) -> Tensor:
        trainer: Any = self
        with contextlib.nullcontext() if last else trainer.accelerator.no_sync(model):
            return self._once(model, inputs, count)


class SharpnessAwareTrainer(SharpnessAwareMixin, transformers.Trainer):
    """A `transformers.Trainer` with sharpness-aware steps; see `SharpnessAwareMixin`."""
