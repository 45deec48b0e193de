"""Sharpness-aware training with timm: optimizers by name, and a scaler for timm's training loop.

register("sam", steppe.SAM(rho=0.05))                       # adds sam-sgd, sam-adamw, sam-lamb, …
optimizer = timm.optim.create_optimizer_v2(model, "sam-sgd", lr=0.1)
loss_scaler = SharpnessAwareScaler(model, device="cuda")    # instead of NativeScaler

for input, target in loader:
    loss = loss_scaler.forward(optimizer, lambda input, target: loss_fn(model(input), target), input, target)
    loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
    optimizer.zero_grad()
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from timm.optim import OptimInfo
from timm.optim._optim_factory import default_registry
from timm.utils import NativeScaler
from timm.utils.clip_grad import dispatch_clip_grad
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..engine import replicas
from ..method import Method
from ..optimizer import SharpnessAware
from .micro_batches import Auxiliary, Replay, attach, unsynchronised


def register(name: str, method: Method) -> list[str]:
    """Register ``<name>-<optimizer>`` with timm's optimizer factory, for each of its optimizers; return the new names.

    Optimizers that differentiate the gradient (AdaHessian) are left out: a direction has no autograd graph.
    """
    if "_" in name or "-" in name:
        raise ValueError(f"{name!r} must not contain _ or -, which have a meaning in timm's names")
    added = []
    for optimizer in [str(one) for one in default_registry.list_optimizers() if "-" not in one]:
        info = default_registry.get_optimizer_info(optimizer)
        if info.second_order:
            continue
        added.append(f"{name}-{optimizer}")
        wrapped = dataclasses.replace(
            info,
            name=added[-1],
            opt_class=_factory(info, method),
            description=f"{method.name} around {info.description}",
        )
        default_registry.register(wrapped)
    return added


def _factory(info: OptimInfo, method: Method) -> Callable[..., SharpnessAware]:
    def make(params: Any, **settings: Any) -> SharpnessAware:
        base = default_registry.get_optimizer_class(info, bind_defaults=False)
        return SharpnessAware(base(params, **settings), method)

    return make


class SharpnessAwareScaler(NativeScaler):
    """timm's `NativeScaler` for a `SharpnessAware` optimizer. It runs the other looks before it clips and steps.

    Args:
        model: the model that is called in training, as wrapped by DDP.
        device: of the scaler.
        enabled: False to train in float32 or bfloat16, which need no loss scaling.
        auxiliary: for methods that look at a second batch; see `steppe.integrations.micro_batches.Replay`.
        local: each process perturbs by its own batch alone; see `SharpnessAware`.
    """

    def __init__(
        self,
        model: nn.Module,
        device: str = "cuda",
        *,
        enabled: bool = True,
        auxiliary: Auxiliary = "previous",
        local: bool = False,
    ):
        super().__init__(device)
        self._scaler = torch.amp.GradScaler(device, enabled=enabled)
        self._model, self._local, self._device = model, local, device
        self._replay = Replay(auxiliary)

    def forward(self, optimizer: Any, compute: Callable[..., Tensor], *batch: Any) -> Tensor:
        """The loss of a batch, ``compute(*batch)``. It is called again when the loop has moved on.

        So pass the batch, or bind it. A held-out `auxiliary` batch can only be used if it is passed.
        """
        if not isinstance(optimizer, SharpnessAware):
            raise TypeError(f"SharpnessAwareScaler needs a SharpnessAware optimizer, not {type(optimizer).__name__}")
        attach(optimizer, self._model, self._local)

        def repeat(last: bool, batch: Sequence[Any] = batch) -> Tensor:
            with contextlib.nullcontext() if last else replicas.no_sync(self._model):
                loss = compute(*batch)
                self._scaler.scale(loss).backward()
            return loss.detach()

        def make_pass(held_out: Any) -> Callable[[bool], Tensor]:
            if not batch:
                raise RuntimeError(
                    "a held-out batch cannot take the place of a batch that is bound: pass the batch, as in "
                    "forward(optimizer, loss_of, input, target)"
                )
            held_out = tree_map_only(Tensor, lambda t: t.to(self._device), held_out)
            return functools.partial(repeat, batch=(held_out,) if len(batch) == 1 else held_out)

        self._replay.begin(optimizer, repeat, self._scaler, make_pass)
        with self._replay.undone_by_interrupt(), unsynchronised(optimizer):
            return compute(*batch)

    def __call__(
        self,
        loss: Tensor,
        optimizer: Any,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Iterable[Tensor] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        """Backward; and if a step is due, run the other looks, clip and step."""
        if not self._replay.open:
            raise RuntimeError("compute the loss with SharpnessAwareScaler.forward, which can compute it again")
        with self._replay.undone_by_interrupt(), unsynchronised(optimizer):
            self._scaler.scale(loss).backward(create_graph=create_graph)
        self._replay.add_loss(loss)
        if not need_update:
            return
        self._replay.run_other_looks()
        if clip_grad is not None:
            assert parameters is not None
            self._scaler.unscale_(optimizer)
            dispatch_clip_grad(parameters, clip_grad, mode=clip_mode)
        self._scaler.step(optimizer)
        self._scaler.update()
