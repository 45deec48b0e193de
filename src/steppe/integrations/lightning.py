"""Sharpness-aware training with Lightning, by one callback:

trainer = lightning.Trainer(callbacks=[SharpnessAwareCallback(steppe.SAM(rho=0.05))])
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import types
from collections.abc import Callable, Generator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torchmetrics import Metric

from ..method import Method
from ..optimizer import SharpnessAware
from .bookkeeping import Bookkeeping
from .micro_batches import Auxiliary, Replay, unsynchronised


class SharpnessAwareCallback(Callback):
    """Makes automatic optimization sharpness-aware, with any precision, accumulation, clipping and strategy.

    Lightning's own pass is the first look: logs, hooks and metrics are those of this pass. The other looks run on the
    same batches, between the last backward and the hooks before the step. These hooks, and clipping, see the method's
    direction.

    Args:
        method: for example ``SAM(rho=0.05)``. It wraps the optimizer of ``configure_optimizers``. Leave it out if
            ``configure_optimizers`` returns a `SharpnessAware`.
        auxiliary: for methods that look at a second batch; see `steppe.integrations.micro_batches.Replay`.
        settings: of `SharpnessAware`: ``local``, ``hvp``, ``seed``.
    """

    def __init__(self, method: Method | None = None, *, auxiliary: Auxiliary = "previous", **settings: Any):
        if settings and method is None:
            raise TypeError(f"{', '.join(settings)}: pass a method too, or pass these settings to SharpnessAware")
        self.method, self.settings = method, settings
        self.optimizer: Any = None  # the SharpnessAware optimizer, once fitting has begun
        self._patched_step: Any = None  # the optimizer's step function, if a scheduler has patched it
        self._replay = Replay(auxiliary)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the optimizer."""
        _require_supported(trainer, pl_module)
        self._replay.start_over()
        strategy = trainer.strategy
        (optimizer,) = strategy.optimizers
        if isinstance(optimizer, SharpnessAware) == (self.method is not None):
            raise TypeError("give SharpnessAwareCallback either a method or an optimizer that is a SharpnessAware")
        if self.method is not None:
            optimizer = SharpnessAware(optimizer, self.method, model=strategy.model, **self.settings)
            strategy.optimizers = [optimizer]
        self.optimizer = optimizer
        self.optimizer.model = strategy.model  # as the strategy has wrapped it, for example in DDP
        inner: Any = optimizer.step
        self._patched_step = vars(optimizer).get("step")

        # A scheduler marks the step function that it has wrapped, and checks for the mark: `wraps` copies it.
        @functools.wraps(inner)
        def step(_: Any, closure: Callable[[], Any] | None = None) -> Any:
            return self._step(inner, closure)

        self.optimizer.step = types.MethodType(step, optimizer)

        # The looks begin here and not in a hook: later hooks may change buffers, random state and the learning rate.
        own: Any = strategy.training_step

        def training_step(*arguments: Any) -> Any:
            before = _bookkeeping(pl_module)
            kept = tuple(copy.copy(one) if isinstance(one, (dict, list)) else one for one in arguments)
            repeat = functools.partial(self._repeat, trainer, own, kept, before)

            def make_pass(batch: Any) -> Callable[[bool], Any]:
                batch = strategy.batch_to_device(trainer.precision_plugin.convert_input(batch), dataloader_idx=0)
                return functools.partial(self._repeat, trainer, own, (batch, *arguments[1:]), before)

            self._replay.begin(self.optimizer, repeat, _scaler(trainer), make_pass)
            with unsynchronised(self.optimizer):
                return own(*arguments)

        strategy.training_step = training_step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell the method how long training is."""
        epoch_steps = trainer.num_training_batches / trainer.accumulate_grad_batches
        epoch_steps = epoch_steps if math.isinf(epoch_steps) else math.ceil(epoch_steps)
        method = self.method or self.optimizer.method
        self._replay.begin_training(self.optimizer, method, trainer.estimated_stepping_batches, epoch_steps)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let other examples be held out, if they take turns."""
        self._replay.begin_epoch(trainer.current_epoch)

    def _step(self, step: Callable[[], Any], closure: Callable[[], Any] | None = None) -> Any:
        """Call Lightning's closure (forward and backward, with hooks that run the other looks), then take the step."""
        loss = None if closure is None else closure()
        if not self._replay.open:  # it is still open if no training_step has returned a loss
            step()
        self._replay.abandon()
        return loss

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Abandon the step under way, if it was not taken."""
        if batch_idx % trainer.accumulate_grad_batches == 0:  # here Lightning clears the gradients
            self._replay.abandon()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Report the loss."""
        scaler = _scaler(trainer)
        unscaled = loss if scaler is None else loss / scaler.scale(torch.ones_like(loss))
        self._replay.add_loss(self._mean_over_ranks(trainer, unscaled))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run the other looks, if this was the last batch before a step."""
        if not trainer.fit_loop._should_accumulate():
            with _without_logging(pl_module):
                self._replay.run_other_looks()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Run the other looks, if the last batch before a step had no loss but earlier ones had."""
        if self._replay.has_loss and _scaler(trainer) is None:
            with _without_logging(pl_module):
                self._replay.run_other_looks()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Abandon the step under way, if training stopped during one."""
        self._replay.abandon()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the functions of strategy and optimizer, which may be used again without this callback."""
        vars(trainer.strategy).pop("training_step", None)
        if self.optimizer is not None:
            vars(self.optimizer).pop("step", None)
            if self._patched_step is not None:
                self.optimizer.step = self._patched_step

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undo the step under way."""
        self._replay.close()
        self.on_fit_end(trainer, pl_module)

    def _repeat(
        self, trainer: Trainer, training_step: Any, arguments: tuple[Any, ...], before: Bookkeeping, last: bool
    ) -> Any:
        """Run the pass over a batch again, without the hooks. What it counts in the module's attributes is undone."""
        strategy, scaler = trainer.strategy, _scaler(trainer)
        no_sync = getattr(strategy, "block_backward_sync", contextlib.nullcontext)
        with contextlib.nullcontext() if last else no_sync(), _with_attributes(before, trainer.lightning_module):
            # Copies, because a step may remove entries from its batch: `batch.pop("labels")`.
            output: Any = training_step(
                *(copy.copy(one) if isinstance(one, (dict, list)) else one for one in arguments)
            )
            loss = output if output is None or isinstance(output, Tensor) else output["loss"]
            if loss is not None:
                loss = loss / trainer.accumulate_grad_batches
                trainer.lightning_module.backward(loss if scaler is None else scaler.scale(loss))
        return None if loss is None else self._mean_over_ranks(trainer, loss)

    def _mean_over_ranks(self, trainer: Trainer, loss: Tensor) -> Any:
        """The mean of the loss over all ranks, if the method uses the loss; else the loss itself."""
        needed = "loss" in self.optimizer.method.needs
        return trainer.strategy.reduce(loss.detach(), reduce_op="mean") if needed else loss


def _bookkeeping(pl_module: LightningModule) -> Bookkeeping:
    """The module's own attributes, without those of every module: parameters, buffers, hooks."""
    return Bookkeeping(pl_module, leave_out=vars(torch.nn.Module()))


@contextlib.contextmanager
def _with_attributes(before: Bookkeeping, pl_module: LightningModule) -> Generator[None, None, None]:
    """A context in which the module's attributes have earlier values. The current ones are restored at the end."""
    now = _bookkeeping(pl_module)
    before.restore()
    try:
        yield
    finally:
        now.restore()


def _scaler(trainer: Trainer) -> Any:
    return getattr(trainer.strategy.precision_plugin, "scaler", None)


def _require_supported(trainer: Trainer, pl_module: LightningModule) -> None:
    strategy = trainer.strategy
    if not pl_module.automatic_optimization:
        raise RuntimeError("manual optimization needs no callback: loop over optimizer.passes() in training_step")
    if type(strategy).__name__ == "FSDPStrategy" or strategy.handles_gradient_accumulation:
        name = type(strategy).__name__
        raise RuntimeError(f"{name} does not expose the gradients: to shard, use ModelParallelStrategy")
    if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
        raise RuntimeError(
            "training_step(dataloader_iter) draws its batches itself: write training_step(batch, batch_idx)"
        )


@contextlib.contextmanager
def _without_logging(pl_module: Any) -> Generator[None, None, None]:
    """A context without logging, in which metrics work on copies of their state. Their state is restored at the end."""
    saved = [(metric, dict(vars(metric))) for metric in pl_module.modules() if isinstance(metric, Metric)]
    for metric, state in saved:
        copies = {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}
        vars(metric).update(copies, **{name: list(value) for name, value in state.items() if isinstance(value, list)})
    pl_module.log = lambda *_, **__: None
    try:
        yield
    finally:
        del pl_module.log
        for metric, state in saved:
            vars(metric).update(state)
