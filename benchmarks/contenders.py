"""The contenders: steppe, bare passes without any method, a plain two-step loop, and pytorch-optimizer.

A contender takes a model and a loss (a function without arguments, on one fixed batch) and returns a function
that does one training step. By default all use the same base optimizer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import steppe

Loss = Callable[[], Tensor]
Contender = Callable[[nn.Module, Loss], Callable[[], object]]
Base = Callable[[nn.Module], torch.optim.Optimizer]

SGD: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-4}
RHO, ALPHA = 0.05, 0.4
METHODS = {"SAM": steppe.SAM(rho=RHO), "GSAM": steppe.GSAM(rho=RHO, alpha=ALPHA)}


def base_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **SGD)


def fused_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)


def bare(passes: int, base: Base = base_optimizer) -> Contender:
    """A contender without a method: the given number of forward and backward passes, then the base step."""

    def build(model: nn.Module, loss: Loss) -> Callable[[], object]:
        optimizer = base(model)

        def step() -> None:
            for _ in range(passes):
                optimizer.zero_grad()
                loss().backward()
            optimizer.step()

        return step

    return build


def steppe_closure(method: str, base: Base = base_optimizer) -> Contender:
    def build(model: nn.Module, loss: Loss) -> Callable[[], object]:
        optimizer = steppe.SharpnessAware(base(model), METHODS[method], model=model)
        return lambda: optimizer.step(loss)

    return build


def steppe_passes(method: str, base: Base = base_optimizer) -> Contender:
    def build(model: nn.Module, loss: Loss) -> Callable[[], object]:
        optimizer = steppe.SharpnessAware(base(model), METHODS[method], model=model)

        def step() -> None:
            for _ in optimizer.passes():
                loss().backward()
            optimizer.step()

        return step

    return build


def two_step_sam(model: nn.Module, loss: Loss) -> Callable[[], object]:
    """SAM as most training scripts write it: save the weights, perturb, restore, step; tensor by tensor.

    It does nothing else: BatchNorm's statistics change twice a step, and dropout draws two masks.
    """
    optimizer = base_optimizer(model)
    params = list(model.parameters())
    old: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def climb() -> None:
        norm = torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm()
        scale = RHO / (norm + 1e-12)
        for p in params:
            if p.grad is not None:
                old[p] = p.data.clone()
                p.add_(p.grad * scale)
        optimizer.zero_grad()

    @torch.no_grad()
    def return_and_step() -> None:
        for p in params:
            if p.grad is not None:
                p.data = old[p]
        optimizer.step()

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        climb()
        loss().backward()
        return_and_step()

    return step


def pytorch_optimizer_sam(model: nn.Module, loss: Loss) -> Callable[[], object]:
    peer = importlib.import_module("pytorch_optimizer")
    optimizer = peer.SAM(model.parameters(), torch.optim.SGD, rho=RHO, **SGD)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    def step() -> None:
        closure()
        optimizer.step(closure)

    return step


class _FixedRho:
    """A constant radius in place of pytorch-optimizer's scheduler."""

    def step(self) -> float:
        return RHO


def pytorch_optimizer_gsam(model: nn.Module, loss: Loss) -> Callable[[], object]:
    peer = importlib.import_module("pytorch_optimizer")
    base = base_optimizer(model)
    optimizer = peer.GSAM(list(model.parameters()), base, model, _FixedRho(), alpha=ALPHA)

    @torch.enable_grad()
    def closure() -> tuple[None, Tensor]:
        base.zero_grad()
        value = loss()
        value.backward()
        return None, value.detach()

    return lambda: optimizer.step(closure)


def peers(method: str) -> dict[str, Contender]:
    """Other implementations of the same step, by name."""
    if method == "SAM":
        return {"two-step loop": two_step_sam, "pytorch-optimizer": pytorch_optimizer_sam}
    return {"pytorch-optimizer": pytorch_optimizer_gsam}
