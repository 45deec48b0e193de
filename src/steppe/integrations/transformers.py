"""Sharpness-aware training with the transformers Trainer.

trainer = SharpnessAwareTrainer(model, args, train_dataset=data, method=steppe.SAM(rho=0.05))
"""

from __future__ import annotations

import contextlib
import copy
import math
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..auxiliary import FEW, hold_out
from ..engine.isolation import Snapshot
from ..method import Method
from ..optimizer import SharpnessAware
from .accelerate import require_supported, unwrapped
from .bookkeeping import Bookkeeping
from .flat_lora import FlatLoRA
from .micro_batches import Auxiliary, Replay, attach, unsynchronised


class _MicroBatch:
    """One micro-batch of a Trainer, with the Trainer's bookkeeping before its first pass, and its prepared inputs.

    In `_prepare_inputs` a Trainer moves inputs to the device, and some (GRPO, RLOO) generate completions there. Every
    look must see the same inputs. So they are kept, and if preparing has drawn random numbers, also the random state
    after it.
    """

    def __init__(self, trainer: Any, model: nn.Module, inputs: Any, count: Tensor | int | None):
        self.trainer, self.model, self.inputs, self.count = trainer, model, inputs, count
        self.before = _bookkeeping(trainer)
        self.prepared: list[tuple[Any, Snapshot | None]] = []
        self.position = 0  # the index in `prepared` of the pass's next call of `_prepare_inputs`

    def prepare(self, prepare: Any, inputs: Any) -> Any:
        """Prepare the inputs, or return what an earlier pass has prepared in the same call."""
        if self.position == len(self.prepared):
            devices = [next(self.model.parameters()).device]
            before = Snapshot((), devices)
            prepared = prepare(inputs)
            after = Snapshot((), devices)
            self.prepared.append((copy.copy(prepared), after if after.drew_since(before) else None))
        else:
            kept, random_state = self.prepared[self.position]
            prepared = copy.copy(kept)  # a loss may remove entries from it
            if random_state is not None:
                random_state.restore()
        self.position += 1
        return prepared


def _items_in(trainer: Any, held_out: Any) -> Any:
    """What a user's own loss divides by on a held-out batch: its items, times the micro-batches of the step.

    Without such a loss it is None: then the Trainer takes the mean over micro-batches.
    """
    if getattr(trainer, "compute_loss_func", None) is None:
        return None
    count = trainer._get_num_items_in_batch([held_out], trainer.args.device)
    return None if count is None else count * trainer.current_gradient_accumulation_steps


def _bookkeeping(trainer: Any) -> Bookkeeping:
    """What a Trainer has counted so far, in its own attributes and in its state."""
    return Bookkeeping(trainer, trainer.state, leave_out=("train_dataset", "eval_dataset"))


class _Epochs(transformers.TrainerCallback):
    """Tells a mixin's trainer how long training is, and which epoch begins."""

    def __init__(self, trainer: SharpnessAwareMixin):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first epoch of a training run."""
        self.trainer.begin_training(kwargs["optimizer"], kwargs["train_dataloader"])

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the batches of an epoch are loaded. A resumed run may begin within one."""
        self.trainer.begin_epoch(int(state.epoch or 0))


class SharpnessAwareMixin:
    """Makes any kind of Trainer sharpness-aware: ``class MyTrainer(SharpnessAwareMixin, Seq2SeqTrainer): ...``.

    The Trainer's own pass is the first look: logged losses are those of this pass. The other looks run after the last
    micro-batch of a step, with the same inputs and the same ``num_items_in_batch``. Clipping, the scaler and
    callbacks see the method's direction. Only parameters that require a gradient are perturbed: with adapters (PEFT),
    the frozen weights are not. What a pass counts and logs in attributes of the Trainer is counted once per step, and
    ``_prepare_inputs`` (in which GRPO generates) runs once for all looks.

    Args:
        method: for example ``SAM(rho=0.05)``. It wraps the Trainer's optimizer, or the one given as ``optimizers=``.
            Leave it out if that optimizer is a `SharpnessAware` already.
        auxiliary: for methods that look at a second batch; see `steppe.integrations.micro_batches.Replay`. A number,
            or a share below 1: so many examples of `train_dataset` are held out of training, from less than ten
            thousand in turns (see `steppe.hold_out`).
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
        splits = isinstance(auxiliary, (int, float))
        self._replay = Replay("previous" if splits else auxiliary)
        self._made: SharpnessAware | None = None  # the optimizer that an earlier train() has made
        self._running: _MicroBatch | None = None  # the micro-batch whose pass is under way
        super().__init__(*args, **kwargs)
        if splits:
            self._replay = Replay(self._held_out_loader(auxiliary))
        trainer: Any = self
        trainer.add_callback(_Epochs(self))

    def _held_out_loader(self, how_many: float) -> DataLoader[Any]:
        """Split `train_dataset`; return a loader of what is held out."""
        trainer: Any = self
        args, data = trainer.args, trainer.train_dataset
        seed = args.seed if args.data_seed is None else args.data_seed
        few = hasattr(data, "__len__") and len(data) < FEW
        trainer.train_dataset, held = hold_out(data, how_many, seed, in_turns=few)
        size = min(args.train_batch_size, len(held))
        collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="held-out")
        order = torch.Generator().manual_seed(seed)
        return DataLoader(held, size, shuffle=True, generator=order, drop_last=True, collate_fn=collate)

    def begin_training(self, optimizer: Any, loader: Any) -> None:
        """Tell the method how long training is."""
        trainer: Any = self
        epoch_steps = math.inf
        if transformers.trainer_utils.has_length(loader):
            epoch_steps = math.ceil(len(loader) / trainer.args.gradient_accumulation_steps)
        optimizer = unwrapped(optimizer)
        if isinstance(optimizer, SharpnessAware):
            method = self.method or optimizer.method
            self._replay.begin_training(optimizer, method, trainer.state.max_steps, epoch_steps)

    def begin_epoch(self, epoch: int) -> None:
        """Let other examples be held out, if they take turns."""
        self._replay.begin_epoch(epoch)

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

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's training. If it is interrupted, the step under way is undone."""
        try:
            return super().train(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        except BaseException:
            self._replay.close()
            raise

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """The Trainer's step; after the last micro-batch, the other looks."""
        trainer: Any = self
        accelerator, optimizer = trainer.accelerator, unwrapped(trainer.optimizer)
        if not self._replay.open:
            require_supported(accelerator)
            attach(optimizer, model, self.local)
            optimizer.train()  # before the first look: a schedule-free base moves the weights here after an evaluation
        batch = _MicroBatch(trainer, model, inputs, num_items_in_batch)

        def make_pass(held_out: Any) -> Any:
            return partial(self._repeat, _MicroBatch(trainer, model, held_out, _items_in(trainer, held_out)))

        self._replay.begin(optimizer, partial(self._repeat, batch), accelerator.scaler, make_pass)
        if self._replay.away and _trl_defines(trainer, "_prepare_inputs"):
            self._refuse(
                f"generates data in the first look, and the first look of {optimizer.method.name} is away from the "
                "weights: use a method that looks at the weights first, such as SAM"
            )
        with unsynchronised(optimizer):
            loss = self._run_pass(batch)
        if not batch.prepared and _trl_defines(trainer, "training_step"):
            self._refuse(
                "generates data in training_step, so each look would see different data: use a trainer that generates "
                "in _prepare_inputs (GRPO, RLOO), or train without a sharpness-aware method"
            )
        self._replay.add_loss(loss)
        if accelerator.sync_gradients:
            self._replay.run_other_looks()
        return loss

    def _refuse(self, why: str) -> None:
        self._replay.close()
        raise RuntimeError(f"{type(self).__name__} {why}")

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepare = super()._prepare_inputs  # pyright: ignore[reportAttributeAccessIssue]
        batch, self._running = self._running, None  # `prepare` may call itself for parts of the inputs
        try:
            return prepare(inputs) if batch is None else batch.prepare(prepare, inputs)
        finally:
            self._running = batch

    def _run_pass(self, batch: _MicroBatch) -> Tensor:
        """The Trainer's own pass over a micro-batch."""
        self._running, batch.position = batch, 0
        try:
            return super().training_step(batch.model, batch.inputs, batch.count)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            self._running = None

    def _repeat(self, batch: _MicroBatch, last: bool) -> Tensor:
        """Run a pass again. What it counts and logs is undone."""
        trainer: Any = self
        now = _bookkeeping(trainer)
        batch.before.restore()
        try:
            with contextlib.nullcontext() if last else trainer.accelerator.no_sync(batch.model):
                return self._run_pass(batch)
        finally:
            now.restore()


def _trl_defines(trainer: Any, name: str) -> bool:
    """Whether a class of TRL overrides this method of the Trainer: it may generate data there."""
    return any(cls.__module__.startswith("trl.") and name in vars(cls) for cls in type(trainer).__mro__)


class SharpnessAwareTrainer(SharpnessAwareMixin, transformers.Trainer):
    """A `transformers.Trainer` with sharpness-aware steps; see `SharpnessAwareMixin`."""


class FlatLoRACallback(transformers.TrainerCallback):
    """`FlatLoRA` in any Trainer, whose length it knows: ``Trainer(..., callbacks=[FlatLoRACallback(sigma=0.05)])``.

    It needs no other class of this module, and works with `SharpnessAwareTrainer` too.
    """

    def __init__(self, sigma: float = 0.05):
        self.sigma = sigma
        self._noise: FlatLoRA | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first step."""
        self._noise = FlatLoRA(kwargs["model"], self.sigma)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before each step of the optimizer."""
        if self._noise is not None:
            self._noise.progress = min(state.global_step / max(state.max_steps, 1), 1.0)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the last step."""
        if self._noise is not None:
            self._noise.remove()
