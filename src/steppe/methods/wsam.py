"""Weighted sharpness-aware minimization."""

from __future__ import annotations

from dataclasses import dataclass

from ..method import HERE, Context, Look, Looks, Method, Number, ascent
from .plain import Plain
from .sam import SAM


@dataclass(frozen=True)
class WSAM(Method):
    """Weighted SAM (Yue, Jiang, Ye, Gao, Liu, Zhang; KDD 2023; arXiv 2305.15817).

    Minimises L + γ/(1−γ) (L_SAM − L). The sharpness term bypasses the base optimizer, so that momentum and
    preconditioning do not change it:

        base step with g, then w ← w − η γ/(1−γ) (g(w + ρ g/‖g‖) − g)       (1)

    With ``decoupled=False`` both go through the base: d = (1 − a) g + a g(w + e), a = γ/(1−γ).

    Limits: γ = 0 gives the base optimizer; coupled with γ = 1/2, SAM.

    Args:
        rho (distance, ≥ 0): The radius: how far from the weights the second gradient is taken.
        gamma (number, 0 to 1): Weight of sharpness: it counts γ/(1 − γ) times; below 1.
        decoupled (bool): Apply the sharpness term after the base's step, not through the base optimizer.
    """

    rho: Number = 0.05
    gamma: Number = 0.9
    decoupled: bool = True

    paper = "arXiv 2305.15817"
    advice = "The weight of sharpness is a setting of its own (gamma), so rho can stay small."
    ranges = "rho 0.05, gamma 0.9."
    cost = 2
    stackable = True
    radius = "rho"

    @property
    def copies(self) -> int:
        """The weights and g; if decoupled, the sharpness term and its product with the learning rate."""
        return 3 if self.decoupled else 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.gamma, (int, float)) and not 0 <= self.gamma < 1:
            raise ValueError(f"WSAM: gamma must be at least 0 and less than 1, not {self.gamma}")

    def looks(self, ctx: Context) -> Looks:
        """Equation (1)."""
        g = (yield HERE).grad
        g_p = (yield Look(self.rho * ascent(g))).grad
        ctx.note_gap()
        a = self.gamma / (1 - self.gamma)
        if not self.decoupled:
            return (1 - a) * g + a * g_p
        ctx.step_aside(a * (g_p - g))
        return g

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(), cls(decoupled=False, gamma=0.7)]

    @classmethod
    def reduces_to(cls) -> list[tuple[Method, Method]]:
        return [(cls(gamma=0.0), Plain()), (cls(gamma=0.5, decoupled=False), SAM())]
