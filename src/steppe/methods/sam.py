"""Sharpness-aware minimization."""

from __future__ import annotations

from dataclasses import dataclass

from ..method import HERE, Context, Look, Looks, Method, Number, ascent
from ..vector import Vector
from .plain import Plain


@dataclass(frozen=True)
class SAM(Method):
    """Sharpness-Aware Minimization (Foret, Kleiner, Mobahi, Neyshabur; ICLR 2021; arXiv 2010.01412).

    Minimises the loss at the worst point of a ball around w, found to first order:

        e = ρ g(w)/‖g(w)‖                                                   (1)
        d = g(w + e)                                                        (2)

    With ``normalize=False``, e = ρ g(w): the form the learned methods generalise.

    Limits: ρ = 0 gives the base optimizer.

    Published code (JAX) adds the weight decay to the loss, so that it shapes e too; here weight decay belongs
    to the base optimizer. It also perturbs per device ("m-sharpness"): ``SharpnessAware(..., local=True)``.

    Args:
        rho (distance, ≥ 0): The radius: how far from the weights the second gradient is taken.
        normalize (bool): Whether the perturbation has length rho. If not, it is rho times the gradient.
    """

    rho: Number = 0.05
    normalize: bool = True

    paper = "arXiv 2010.01412"
    advice = "The place to start. Try rho 0.02, 0.05, 0.1, 0.2."
    ranges = "rho 0.05 by default; 0.01 to 0.5 searched in its paper."
    cost = 2
    stackable = True
    radius = "rho"

    def looks(self, ctx: Context) -> Looks:
        """Equations (1) and (2). Written so that neither g nor e is held in memory during the second look."""
        there = yield Look(self.rho * self._climb((yield HERE).grad))
        ctx.note_gap()
        return there.grad

    def _climb(self, g: Vector) -> Vector:
        return ascent(g) if self.normalize else g.perturbed()

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(rho=0.1), cls(rho=0.1, normalize=False)]

    @classmethod
    def reduces_to(cls) -> list[tuple[Method, Method]]:
        return [(cls(rho=0.0), Plain()), (cls(rho=0.0, normalize=False), Plain())]
