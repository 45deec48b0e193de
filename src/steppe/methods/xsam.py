"""Sharpness-aware minimization along a direction that is searched: that of the highest loss."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..method import HERE, Context, Look, Looks, Memory, Method, Number, ascent
from ..vector import Space, Vector, unit
from . import require

FARTHEST = 2.0  # α of the last trial


@dataclass(frozen=True)
class XSAM(Method):
    """XSAM (Chen, Zhou; ICLR 2026; OpenReview qTRqmMOOrH): the gradient at SAM's point, turned towards higher loss.

    SAM descends along g₁, which was seen at w + e, from w. XSAM goes along a direction between g and g₁, or beyond g₁:

        g₁ = g(w + ρ g/‖g‖),   v(α) = slerp(g/‖g‖, g₁/‖g₁‖; α)              (1)
        d  = ‖g₁‖ v(α)                                                      (2)
        every k steps:  α = the one of `trials` values from 0 to 2 with the highest L(w + ρ_max v(α))     (3)

    slerp turns the first vector towards the second by α times the angle between them: α = 1 gives g₁, SAM; α = 0 a step
    along g with the length of g₁.

    (3) needs losses only. Here each trial is a whole look: with the defaults 21 gradients every 400 steps, 2.05 looks
    a step. Set `every` to the number of steps in an epoch. Published code searches in the second step of every epoch.

    Args:
        rho (distance, ≥ 0): The radius: how far from the weights the second gradient is taken.
        rho_max (distance, ≥ 0): How far from the weights the losses of the trials are taken.
        every (steps, ≥ 1): α is searched on every `every`-th step; best once an epoch.
        trials (count, ≥ 2): How many values of α are tried; each costs a look.
    """

    rho: Number = 0.15
    rho_max: Number = 0.3
    every: int = 400
    trials: int = 21

    paper = "OpenReview qTRqmMOOrH"
    advice = "SAM whose direction is corrected once an epoch; every = steps in an epoch."
    ranges = "rho 0.15, rho_max 0.3 (ResNet-18 on CIFAR-100), alpha from 0 to 2 in steps of 0.1, once an epoch."
    copies = 3
    radius = "rho"
    nonnegative = ("rho", "rho_max")
    needs = frozenset({"loss"})

    def __post_init__(self) -> None:
        super().__post_init__()
        require.whole_number(self, "every")
        require.whole_number(self, "trials", least=2)

    @property
    def cost(self) -> float:
        """Two looks, and the trials on one step in `every`."""
        return 2 + self.trials / self.every

    def looks(self, ctx: Context) -> Looks:
        """Equations (1) to (3)."""
        g = (yield HERE).grad
        there = yield Look(self.rho * ascent(g))
        ctx.note_gap()
        g_1, alpha = there.grad, ctx.memory["alpha"]
        if ctx.step % self.every == 0:
            alpha = yield from self._search_alpha(g, g_1, alpha)
            ctx.remember(alpha=alpha)
        ctx.metrics["alpha"] = alpha
        return g_1.norm() * slerp(g, g_1, alpha)

    def _search_alpha(self, g: Vector, g_1: Vector, like: Tensor) -> Generator[Look, Any, Tensor]:
        """Equation (3): the α with the highest loss, with the dtype and device of `like`."""
        alphas = torch.linspace(0.0, FARTHEST, self.trials, dtype=like.dtype, device=like.device)
        losses = []
        for alpha in alphas:
            losses.append((yield Look(self.rho_max * slerp(g, g_1, alpha))).loss)
        best = torch.stack(losses).argmax().reshape(1)
        return alphas.index_select(0, best.to(alphas.device))[0]  # indexing with a tensor would synchronise

    def phase(self, step: int) -> int | None:
        return int(step % self.every == 0)

    def memory(self, space: Space) -> Memory:
        """α."""
        return {"alpha": space.zero() + 1}

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(every=3, trials=4)]


def slerp(a: Vector, b: Vector, alpha: Tensor) -> Vector:
    """The unit vector at α times the angle from a to b; the mean of both where they are parallel."""
    a, b = unit(a), unit(b)
    angle = torch.arccos((a @ b).clamp(-1, 1))
    sine = torch.sin(angle)
    parallel = sine < 1e-8
    sine = torch.where(parallel, 1.0, sine)
    from_a = torch.where(parallel, 0.5, torch.sin((1 - alpha) * angle) / sine)
    from_b = torch.where(parallel, 0.5, torch.sin(alpha * angle) / sine)
    return from_a * a + from_b * b
