"""Smoothness-adaptive sharpness-aware minimization."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..method import HERE, Context, Look, Looks, Memory, Method, Number, ascent
from ..vector import TINY, Space


@dataclass(frozen=True)
class SASAM(Method):
    """Smoothness-Adaptive SAM (Naganuma, Kim et al.; 2024).

    Sets learning rate and radius by how fast the gradient changed over the last step, measured on one batch:

        η_t = min{ ‖w_t − w_{t−1}‖ / (2‖g(w_t) − g(w_{t−1})‖), √(1 + δ θ_{t−1}) η_{t−1} }       (1)
        θ_t = η_t/η_{t−1},   θ_0 = ∞,   ρ_t = √η_t                          (2)
        d   = g(w_t + ρ_t g/‖g‖)                                            (3)

    η_0 is the base's learning rate, which must be the same in all groups. Later ones are written into the groups, so
    use no scheduler.

    The document's Algorithm 1 and its eq. 5 disagree on an index: this is eq. 5.

    Meant for SGD without momentum: (1) measures how far plain gradient descent may go, and momentum goes about ten
    times as far. It does not replace tuning either. Digits, a small net, batch 64, 20 epochs, 5 seeds, test accuracy
    in % (± standard error), first learning rate 0.01:

        labels                            all right       40 % wrong
        SASAM, no momentum                91.3 ± 2.4      52.2 ± 5.5
        SASAM, momentum 0.9               20.9 ± 7.9      10.4 ± .3
        SGD 0.1 (cosine), momentum 0.9    96.5 ± .1       92.3 ± .2

    A first learning rate of 0.001 gives 91.1 and 54.6 without momentum: it hardly matters.

    Published code has no factor 2, lets the first η grow too (η_0 = √(1+δ) lr, θ_0 = √(1+δ)), adds 1e-8 to later
    ones, and takes ρ_t from η_{t−1}: ``published=True``.

    Args:
        delta (number, ≥ 0): How fast the learning rate may grow from step to step.
        published (bool): Compute it as published code does, where that differs.
    """

    delta: Number = 0.02
    published: bool = False

    paper = "Naganuma, Kim et al. 2024"
    aliases = ("sa-sam",)
    advice = "For studies of step sizes, with SGD without momentum only: with momentum or wrong labels runs fail."
    ranges = "delta 0.02; first learning rates 1e-4 to 1e-1 (0.05 in published code), no momentum."
    cost: ClassVar[float] = 3
    copies = 4
    nonnegative = ("delta",)
    needs = frozenset({"lr"})
    perturbs: ClassVar[bool] = True

    def looks(self, ctx: Context) -> Looks:
        """Equations (1) to (3)."""
        here = yield HERE
        last_eta, last_theta = ctx.memory["eta"], ctx.memory["theta"]
        growth = math.sqrt(1 + self.delta) if self.published else 1.0
        if ctx.step == 0:
            last_eta = torch.as_tensor(ctx.lr, dtype=last_eta.dtype, device=last_eta.device)
            eta = growth * last_eta
            theta = torch.full_like(eta, growth if self.published else torch.inf)
        else:
            first = last_eta == 0  # the steps so far were those of another method: t = 0 is now
            last_eta = torch.where(first, ctx.lr, last_eta)
            back = (ctx.memory["w"] - ctx.w).perturbed()
            moved = back.norm()
            before = yield Look(back)
            del back
            changed = (here.grad - before.grad).perturbed().norm()
            smooth = moved / ((1 if self.published else 2) * changed + TINY)
            smooth = torch.where((moved == 0) | (changed == 0), torch.inf, smooth)  # the smoothness is unknown
            grown = self._growth(last_theta) * last_eta
            eta = torch.minimum(smooth, grown) + (1e-8 if self.published else 0.0)
            unbounded = eta.isinf()  # neither bound is finite: keep η and θ
            eta = torch.where(first, growth * last_eta, torch.where(unbounded, last_eta, eta))
            theta = torch.where(unbounded, last_theta, eta / last_eta)
            theta = torch.where(first, growth if self.published else torch.inf, theta)
            del before
        ctx.set_lr(eta)
        ctx.metrics["eta"] = eta
        ctx.remember(eta=eta, theta=theta, w=ctx.w)
        if not self.perturbs:
            return here.grad
        rho = (last_eta if self.published else eta).sqrt()
        there = yield Look(rho * ascent(here.grad))
        ctx.note_gap()
        return there.grad

    def _growth(self, theta: Tensor) -> Tensor:
        """√(1 + δθ); 1 for δ = 0, even if θ = ∞."""
        growth = self.delta * theta
        return (1 + torch.where(growth.isnan() & theta.isinf(), 0.0, growth)).sqrt()

    def phase(self, step: int) -> int | None:
        return None if step == 0 else 0

    def memory(self, space: Space) -> Memory:
        """The last weights (for a new parameter: its current ones), η and θ."""
        with torch.no_grad():
            return {"w": space.live().clone(), "eta": space.zero(), "theta": space.zero()}

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(), cls(delta=1.0), cls(published=True)]


@dataclass(frozen=True)
class SASGD(SASAM):
    """Smoothness-Adaptive SGD (Malitsky, Mishchenko; ICML 2020; arXiv 1910.09529): `SASAM` without perturbation."""

    paper = "arXiv 1910.09529"
    aliases = ("sa-sgd",)
    advice = "SGD without momentum, with a learning rate that sets itself. With momentum runs fail."
    cost = 2
    copies = 4
    perturbs = False
