"""Curvature-regularized sharpness-aware minimization."""

from __future__ import annotations

from dataclasses import dataclass

from ..method import HERE, Context, Look, Looks, Method, Number, ascent
from .sam import SAM


@dataclass(frozen=True)
class CRSAM(Method):
    """Curvature Regularized SAM (Wu, Luo, Wunsch; AAAI 2024; arXiv 2312.13555), as its published code computes it.

    SAM, plus the gradients of the second and of the first difference of the loss along the ascent direction:

        e = ρ g/‖g‖,   g₊ = g(w + e),   g₋ = g(w − e)                       (1)
        d = g₊ + γ (g₊ + g₋ − 2g) + β (g₊ − g₋)                             (2)

    Limits: γ = β = 0 gives SAM.

    The paper regularises with logarithms of these differences; its code does not. Its code also lets the third
    look, at w − e, update BatchNorm's statistics; here only the first does.

    Args:
        rho (distance, ≥ 0): The radius: how far the second and third gradients are from the weights.
        gamma (number): Weight of the second difference of the gradients, the curvature along the ascent.
        beta (number): Weight of the first difference of the gradients.
    """

    rho: Number = 0.1
    gamma: Number = 0.1
    beta: Number = 0.01

    paper = "arXiv 2312.13555"
    aliases = ("cr-sam",)
    advice = "Three looks; in GAM's paper the best on most convolutional nets."
    ranges = "rho 0.1, gamma 0.1, beta 0.01."
    cost = 3
    stackable = True
    copies = 3
    radius = "rho"

    def looks(self, ctx: Context) -> Looks:
        """Equations (1) and (2)."""
        here = yield HERE
        e = self.rho * ascent(here.grad)
        there = yield Look(e)
        ctx.note_gap()
        behind = yield Look(-e)
        g, g_p, g_m = here.grad, there.grad, behind.grad
        return g_p + self.gamma * (g_p + g_m - 2 * g) + self.beta * (g_p - g_m)

    @classmethod
    def reduces_to(cls) -> list[tuple[Method, Method]]:
        return [(cls(gamma=0.0, beta=0.0), SAM(rho=0.1))]
