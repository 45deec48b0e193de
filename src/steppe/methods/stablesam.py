"""Sharpness-aware minimization with steps as long as the base's."""

from __future__ import annotations

from dataclasses import dataclass

from ..method import HERE, Context, Look, Looks, Method, Number, ascent
from ..vector import TINY
from .plain import Plain


@dataclass(frozen=True)
class StableSAM(Method):
    """Stable SAM (JMLR 2025): SAM's direction with the length of the plain gradient.

        g₁ = g(w + ρ g/‖g‖),   d = (‖g‖/‖g₁‖) g₁                            (1)

    ‖g₁‖ grows with ρ, so that SAM diverges at learning rates at which the base does not; the length of d does not.

    Limits: ρ = 0 gives the base optimizer. Written from a description of the paper; no code by the authors was read.

    Args:
        rho (distance, ≥ 0): The radius: how far from the weights the second gradient is taken.
    """

    rho: Number = 0.05

    paper = "JMLR 2025, Stable SAM"
    advice = "SAM for a learning rate that is too large for SAM but not for the base, or for a large rho."
    cost = 2
    stackable = True
    radius = "rho"

    def looks(self, ctx: Context) -> Looks:
        """Equation (1). Only the length of g is kept during the second look."""
        g = (yield HERE).grad
        length, offset = g.norm(), [self.rho * ascent(g)]
        del g
        there = yield Look(offset.pop())
        ctx.note_gap()
        return (length / there.grad.norm().clamp(min=TINY)) * there.grad

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(rho=0.1)]

    @classmethod
    def reduces_to(cls) -> list[tuple[Method, Method]]:
        return [(cls(rho=0.0), Plain())]
