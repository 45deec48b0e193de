"""Surrogate gap guided sharpness-aware minimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..method import HERE, Context, Look, Looks, Method, Number, adaptive_ascent, ascent
from ..vector import TINY, reject
from . import require
from .asam import ASAM
from .sam import SAM


@dataclass(frozen=True)
class GSAM(Method):
    """Surrogate Gap Guided SAM (Zhuang et al.; ICLR 2022; arXiv 2203.08065).

    Descends SAM's loss f_p and ascends f in the direction that does not change f_p. That shrinks the surrogate
    gap h = f_p − f, which at a minimum is ρ²λ_max/2:

        e  = ρ_t g/‖g‖,   g = ∇f(w),   g_p = ∇f(w + e)                      (1)
        g_⊥ = g − (g·g_p/‖g_p‖²) g_p                                        (2)
        d  = g_p − α g_⊥                                                    (3)

    ρ_t follows the learning rate (their eq. 4): ``rho=linear_in_lr(rho_max, rho_min, lr_max, lr_min)``.

    The variants that the paper compares it with are here too: ``ascent="adaptive"`` takes e from ASAM;
    ``objective="weighted"`` minimises f_p + αh, d = g_p + α(g_p − g); ``objective="f-h"`` minimises f and h,
    d = g + α (the part of g_p orthogonal to g).

    Limits: α = 0 gives SAM, or ASAM with the adaptive ascent.

    Published code does not clamp ρ_t, so that it leaves [ρ_min, ρ_max] during warm-up; `linear_in_lr` clamps.
    It computes e and d per device and averages d: ``SharpnessAware(local=True)``. The adaptive e of its JAX form has
    one power of |w| and the plain norm of g; that of its PyTorch form is ASAM's with η = 0.

    Args:
        rho (distance, ≥ 0): The radius: how far from the weights the second gradient is taken.
        alpha (number, ≥ 0): How strongly the surrogate gap is reduced; 0: SAM.
        objective ("fp-h", "weighted" or "f-h"): What is minimised: GSAM's objective, or one of its variants.
        ascent ("plain" or "adaptive"): SAM's perturbation, or ASAM's.
        eta (number, ≥ 0): ASAM's η, for the adaptive ascent only.
    """

    rho: Number = 0.05
    alpha: Number = 0.4
    objective: Literal["fp-h", "weighted", "f-h"] = "fp-h"
    ascent: Literal["plain", "adaptive"] = "plain"
    eta: Number = 0.01

    paper = "arXiv 2203.08065"
    advice = "SAM with a weight (alpha, 0.01 to 1) on reducing sharpness itself; let rho follow the learning rate."
    ranges = (
        "ResNets on ImageNet: rho 0.04 to 0.02 with the learning rate, alpha 0.01; ViT-B/32: 0.6 to "
        "0.1, alpha 0.6; ViT-B/16: 0.6 to 0.2, alpha 0.4."
    )
    cost = 2
    stackable = True
    radius = "rho"
    nonnegative = ("rho", "alpha", "eta")

    @property
    def copies(self) -> int:
        """The weights and g; with the adaptive ascent also T and Tg, before the second look."""
        return 2 if self.ascent == "plain" else 3

    def __post_init__(self) -> None:
        super().__post_init__()
        require.one_of(self, "objective", "fp-h", "weighted", "f-h")
        require.one_of(self, "ascent", "plain", "adaptive")

    def looks(self, ctx: Context) -> Looks:
        """Equations (1) to (3), or one of the variants."""
        here = yield HERE
        climb = ascent(here.grad) if self.ascent == "plain" else adaptive_ascent(here.grad, ctx.w, self.eta)
        there = yield Look(self.rho * climb)
        ctx.note_gap()
        g, g_p = here.grad, there.grad
        dot = g @ g_p
        ctx.metrics["cos"] = dot / (g.norm() * g_p.norm() + TINY)
        if self.objective == "weighted":
            return g_p + self.alpha * (g_p - g)
        if self.objective == "f-h":
            return g + self.alpha * reject(g_p, g)
        return g_p - self.alpha * (g - dot / (g_p.norm() ** 2 + TINY**2) * g_p)

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(), cls(ascent="adaptive", rho=0.5), cls(objective="weighted"), cls(objective="f-h")]

    @classmethod
    def reduces_to(cls) -> list[tuple[Method, Method]]:
        return [(cls(alpha=0.0), SAM()), (cls(alpha=0.0, ascent="adaptive", rho=0.5), ASAM())]
