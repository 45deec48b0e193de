"""Friendly sharpness-aware minimization."""

from __future__ import annotations

from dataclasses import dataclass

from ..method import HERE, Context, Look, Looks, Memory, Method, Number, ascent
from ..vector import Space
from .sam import SAM


@dataclass(frozen=True)
class FSAM(Method):
    """Friendly SAM (Li, Zhou, He, Cheng, Huang; CVPR 2024; arXiv 2403.12350).

    Perturbs along the part of the gradient that is specific to this batch: the gradient minus a running mean of
    gradients, which stands for the full gradient.

        e   = ρ u/‖u‖,   u = g − σ m_{t−1},   d = g(w + e)                  (1)
        m_t = λ m_{t−1} + (1 − λ) g,   m_0 = g                              (2)

    Limits: σ = 0 gives SAM. The paper subtracts m_t in place of m_{t−1}; for σ = 1 the direction is the same.

    Args:
        rho (distance, ≥ 0): The radius: how far from the weights the second gradient is taken.
        sigma (number): How much of the running mean is subtracted from the gradient before the ascent.
        lam (share): How much of the running mean of gradients each step keeps.
    """

    rho: Number = 0.05
    sigma: Number = 1.0
    lam: Number = 0.9

    paper = "arXiv 2403.12350"
    advice = "SAM that perturbs along what is specific to the batch, not along the full gradient."
    ranges = "sigma 1, lam 0.6 to 0.95."
    cost = 2
    stackable = True
    copies = 3
    radius = "rho"

    def looks(self, ctx: Context) -> Looks:
        """Equations (1) and (2)."""
        g, m = (yield HERE).grad, ctx.memory["m"]
        ctx.remember(m=g if ctx.step == 0 else self.lam * m + (1 - self.lam) * g)
        there = yield Look(self.rho * ascent(g - self.sigma * m))
        ctx.note_gap()
        return there.grad

    def phase(self, step: int) -> int | None:
        return None if step == 0 else 0

    def memory(self, space: Space) -> Memory:
        """m."""
        return {"m": space.zeros()}

    @classmethod
    def reduces_to(cls) -> list[tuple[Method, Method]]:
        return [(cls(sigma=0.0), SAM())]
