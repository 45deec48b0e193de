"""Functional sharpness-aware minimization."""

from __future__ import annotations

from dataclasses import dataclass

from ..method import HERE, Context, Look, Looks, Method, Number, ascent
from .plain import Plain


@dataclass(frozen=True)
class FunctionalSAM(Method):
    """Functional-SAM (Singh, Mobahi, Agarwala, Dauphin; ICML 2025; arXiv 2502.02407).

    The gradient of a loss L of a model's outputs f is J(w)ᵀ ∂L/∂f, with J the Jacobian of the outputs. SAM takes both
    factors at the perturbed weights. Its paper finds that in language models SAM then mostly shrinks ∂L/∂f, by changing
    the logits, and improves nothing. So only the Jacobian is perturbed:

        e = ρ g(w)/‖g(w)‖                                                   (1)
        d = J(w + e)ᵀ ∂L/∂f(w)                                              (2)

    Limits: ρ = 0 gives the base optimizer; a loss that is linear in the outputs gives SAM.

    What the outputs are: the tensors that `model` returns. They must be predictions from which your closure or loop
    computes the loss. A model that returns the loss itself is refused. It may run several backward passes, in every
    look the same ones, and may change an output in place, unless the output shares memory with another one.

    The paper's best form also divides e by the second moments of Adam, which is not built here. It compares at equal
    steps, where a step costs twice that of AdamW.

    Args:
        rho (distance, ≥ 0): The radius: how far from the weights the Jacobian is taken.
    """

    rho: Number = 0.05

    paper = "arXiv 2502.02407"
    advice = "For language models, where its paper finds SAM worse than AdamW and this better, at equal steps."
    cost = 2
    needs = frozenset({"outputs"})
    stackable = True
    radius = "rho"

    def looks(self, ctx: Context) -> Looks:
        """Equations (1) and (2)."""
        there = yield Look(self.rho * ascent((yield HERE).grad), linear=True)
        ctx.note_gap()
        return there.grad

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(rho=0.1)]

    @classmethod
    def reduces_to(cls) -> list[tuple[Method, Method]]:
        return [(cls(rho=0.0), Plain())]
