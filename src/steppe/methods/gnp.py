"""Penalizing the gradient norm."""

from __future__ import annotations

from dataclasses import dataclass

from ..method import HERE, Context, Look, Looks, Method, Number, ascent
from ..vector import unit
from .plain import Plain
from .sam import SAM


@dataclass(frozen=True)
class GNP(Method):
    """Gradient Norm Penalty (Zhao, Zhang, Hu; ICML 2022; arXiv 2202.03599).

    Descends L + λ‖g‖. The norm's gradient is approximated by a difference of gradients at distance r; with α = λ/r:

        d = (1 − α) g(w) + α g(w + r g/‖g‖)                                 (1)

    Limits: α = 0 gives the base optimizer, α = 1 gives SAM.

    Published code normalises the first gradient by default: ``normalize_first=True``.

    Args:
        r (distance, ≥ 0): The radius: how far from the weights the second gradient is taken.
        alpha (share, ≥ 0): Weight of the second gradient, λ/r; the first has the rest.
        normalize_first (bool): Scale the first gradient to length one, as published code does.
    """

    r: Number = 0.1
    alpha: Number = 0.8
    normalize_first: bool = False

    paper = "arXiv 2202.03599"
    advice = "SAM with a share of the plain gradient: steadier when SAM alone is too much."
    ranges = "r 0.1, alpha 0.8."
    cost = 2
    stackable = True
    copies = 2
    nonnegative = ("r", "alpha")
    radius = "r"

    def looks(self, ctx: Context) -> Looks:
        """Equation (1)."""
        here = yield HERE
        there = yield Look(self.r * ascent(here.grad))
        ctx.note_gap()
        first = unit(here.grad) if self.normalize_first else here.grad
        return (1 - self.alpha) * first + self.alpha * there.grad

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(), cls(normalize_first=True)]

    @classmethod
    def reduces_to(cls) -> list[tuple[Method, Method]]:
        return [(cls(alpha=1.0), SAM(rho=0.1)), (cls(alpha=0.0), Plain())]
