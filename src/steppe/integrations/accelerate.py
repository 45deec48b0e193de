"""Sharpness-aware training with accelerate.

Wrap the optimizer before ``prepare``, and use `Backward` instead of ``accelerator.backward``:

    optimizer = steppe.SharpnessAware(base, steppe.SAM(rho=0.05), model=model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    backward = Backward(accelerator, model, optimizer)

    def loss_of(batch):
        return criterion(model(batch[0]), batch[1])

    for batch in loader:
        with accelerator.accumulate(model):
            loss = backward(loss_of, batch)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType, send_to_device
from torch import Tensor, nn

from ..optimizer import SharpnessAware
from .micro_batches import Auxiliary, Replay, attach, unsynchronised


class Backward:
    """``accelerator.backward`` for a `SharpnessAware` optimizer. It runs the other looks after a step's last backward.

    Args:
        accelerator: with any mixed precision and any ``gradient_accumulation_steps``.
        model: as ``accelerator.prepare`` returned it.
        optimizer: as ``accelerator.prepare`` returned it for a `SharpnessAware` optimizer.
        auxiliary: for methods that look at a second batch; see `steppe.integrations.micro_batches.Replay`.
        local: each process perturbs by its own batch alone; see `SharpnessAware`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        *,
        auxiliary: Auxiliary = "previous",
        local: bool = False,
    ):
        require_supported(accelerator)
        self._accelerator, self._model = accelerator, model
        self._optimizer = unwrapped(optimizer)
        if not isinstance(self._optimizer, SharpnessAware):
            raise TypeError(f"Backward needs a SharpnessAware optimizer, not {self._optimizer!r}")
        attach(self._optimizer, model, local)
        self._replay = Replay(auxiliary)

    def __call__(self, loss_of: Callable[..., Tensor], *batch: Any) -> Tensor:
        """Compute ``loss_of(*batch)`` and its gradients; return the detached loss.

        Pass the batch as an argument, not through the closure: the other looks run when the loop has moved on.
        """

        def once(batch: Sequence[Any] = batch) -> tuple[Tensor, Tensor]:
            loss = loss_of(*batch)
            self._accelerator.backward(loss)
            loss = loss.detach()
            return loss, loss / self._accelerator.gradient_accumulation_steps

        def repeat(last: bool, batch: Sequence[Any] = batch) -> Tensor:
            with contextlib.nullcontext() if last else self._accelerator.no_sync(self._model):
                return once(batch)[1]

        def make_pass(held_out: Any) -> Callable[[bool], Tensor]:
            on_device: Any = send_to_device(held_out, self._accelerator.device)
            return functools.partial(repeat, batch=(on_device,) if len(batch) == 1 else on_device)

        self._replay.begin(self._optimizer, repeat, self._accelerator.scaler, make_pass)
        try:
            with unsynchronised(self._optimizer):
                loss, share = once()
        except BaseException:
            self._replay.close()
            raise
        self._replay.add_loss(share)
        if self._accelerator.sync_gradients:
            self._replay.run_other_looks()
        return loss


def unwrapped(optimizer: Any) -> Any:
    """The optimizer that accelerate wrapped."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def require_supported(accelerator: Accelerator) -> None:
    """Raise for strategies that do not expose the gradients."""
    kind = accelerator.distributed_type
    sharded = kind == DistributedType.FSDP and not accelerator.is_fsdp2
    if sharded or kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise RuntimeError(f"{kind} does not expose the gradients: shard with FSDP2 (fsdp_version=2), or use DDP")
