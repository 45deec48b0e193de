"""Adaptive sharpness-aware minimization."""

from __future__ import annotations

from dataclasses import dataclass

from ..method import HERE, Context, Look, Looks, Method, Number, adaptive_ascent
from .plain import Plain


@dataclass(frozen=True)
class ASAM(Method):
    """Adaptive SAM (Kwon, Kim, Park, Choi; ICML 2021; arXiv 2102.11600).

    SAM in a ball that scales with the weights, so that rescaling a layer and its successor against each other
    changes nothing:

        T = |w| + η                                                         (1)
        e = ρ T² g(w)/‖T g(w)‖                                              (2)
        d = g(w + e)                                                        (3)

    ρ is about ten times SAM's. Limits: ρ = 0 gives the base optimizer.

    Published code takes T = |w| + η only for parameters named "weight" and T = 1 for the rest: put those into a
    parameter group with ``adaptive=False``.

    Args:
        rho (distance relative to the weights, ≥ 0): The radius, about ten times SAM's: weights move in proportion to T.
        eta (number, ≥ 0): Added to |w| in T, so that weights near zero move too; in the unit of a weight.
    """

    rho: Number = 0.5
    eta: Number = 0.01

    paper = "arXiv 2102.11600"
    advice = "SAM that is invariant to how layers are scaled. rho about ten times SAM's."
    ranges = "rho 0.5 on CIFAR-10 and SVHN, 1.0 on CIFAR-100; eta 0.01 to 0.1."
    cost = 2
    stackable = True
    copies = 3  # T, Tg and the weights; during the look only the weights
    radius = "rho"
    nonnegative = ("rho", "eta")

    def looks(self, ctx: Context) -> Looks:
        """Equations (1) to (3). Written so that neither g nor e is held in memory during the second look."""
        there = yield Look(self.rho * adaptive_ascent((yield HERE).grad, ctx.w, self.eta))
        ctx.note_gap()
        return there.grad

    @classmethod
    def reduces_to(cls) -> list[tuple[Method, Method]]:
        return [(cls(rho=0.0), Plain())]
