"""Gradient-norm-aware minimization, exact and fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..method import HERE, HVP, Context, Look, Looks, Memory, Method, Number, ascent, remembered_vectors, reusing
from ..vector import Space, reject
from . import require
from .plain import Plain
from .sam import SAM


@dataclass(frozen=True)
class GNAM(Method):
    """Gradient Norm Aware Minimization (Zhang et al.; CVPR 2023; arXiv 2303.03108), Algorithm 1.

    The paper calls it GAM; here GAM is Generalization Aware Minimization. Adds the gradient of the first-order
    flatness, ρ times the largest gradient norm in a ball, to that of an oracle loss:

        f      = H(w) g/‖g‖                                                 (1)
        w_adv  = w + ρ f/‖f‖                                                (2)
        h_norm = ρ H(w_adv) g(w_adv)/‖g(w_adv)‖                             (3)
        d      = h_loss + α h_norm                                          (4)

    h_loss is g, or the direction of another method: ``oracle=SAM()`` is the paper's "SAM + GAM".

    Limits: α = 0 gives the oracle.

    The published code has only Algorithm 2, which is `GNAMFast`.

    Args:
        rho (distance, ≥ 0): The radius of the ball in which the gradient norm is to be small.
        alpha (number): Weight of the gradient norm's gradient.
        oracle (method or None): The method whose direction is h_loss; None: the plain gradient.
    """

    rho: Number = 0.1
    alpha: Number = 0.1
    oracle: Method | None = None

    paper = "arXiv 2303.03108"
    aliases = ("gam-norm", "gamnorm")
    advice = "First-order flatness with true Hessian-vector products; GNAMFast does nearly the same without."
    ranges = "rho 0.04 on CIFAR-10, 0.1 on CIFAR-100; alpha 0.1, or 0.3 with ResNet-18."
    radius = "rho"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.oracle is not None and not isinstance(self.oracle, Method):
            raise ValueError(f"GNAM: the oracle must be a method, for example SAM(), not {self.oracle!r}")

    @property
    def stackable(self) -> bool:
        """Whether the oracle is, if there is one."""
        return self.oracle is None or self.oracle.stackable

    @property
    def cost(self) -> float:
        """Two gradients, two Hessian-vector products, and what the oracle adds to the gradient at w."""
        return 4 + (0 if self.oracle is None else self.oracle.cost - 1)

    @property
    def copies(self) -> int:
        """w, g, g(w_adv) and a direction; with an oracle also its direction and memory, or g and its copies."""
        return 4 if self.oracle is None else max(5 + remembered_vectors(self.oracle), 1 + self.oracle.copies)

    @property
    def needs(self) -> frozenset[str]:
        """Hessian-vector products, and what the oracle needs."""
        return frozenset({"hvp"}) | (frozenset() if self.oracle is None else self.oracle.needs)

    def looks(self, ctx: Context) -> Looks:
        """Equations (1) to (4)."""
        here = yield HERE
        h_loss = here.grad if self.oracle is None else (yield from reusing(here, self.oracle.looks(ctx))).settled()
        f = yield HVP(ascent(here.grad), HERE, here)
        adv = Look(self.rho * ascent(f))
        there = yield adv
        h_norm = self.rho * (yield HVP(ascent(there.grad), adv, there))
        return h_loss + self.alpha * h_norm

    def phase(self, step: int) -> int | None:
        return 0 if self.oracle is None else self.oracle.phase(step)

    def memory(self, space: Space) -> Memory:
        """The oracle's memory."""
        return {} if self.oracle is None else self.oracle.memory(space)

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(), cls(oracle=SAM())]

    @classmethod
    def reduces_to(cls) -> list[tuple[Method, Method]]:
        return [(cls(alpha=0.0), Plain()), (cls(alpha=0.0, oracle=SAM()), SAM())]


@dataclass(frozen=True)
class GNAMFast(Method):
    """Gradient Norm Aware Minimization without Hessian-vector products (arXiv 2303.03108, Algorithm 2).

        g₁ = g(w + ρ' g₀/‖g₀‖),   h = g₁ − g₀                               (1)
        w₂ = w + ρ h/‖h‖,   g₂ = g(w₂),   g₃ = g(w₂ + ρ' g₂/‖g₂‖)           (2)
        h₊ = α g₁ + (1 − α) g₃,   h₋ = β g₀ + (1 − β) g₂                    (3)
        d  = h₊ − γ (part of h₋ orthogonal to h₊)                           (4)

    Published code computes h₋ = g₀ + |1 − β| g₂: ``weighting="published"``. Its settings (ρ, ρ', α, β, γ):
    CIFAR-10 ResNet (.2, .03, .1, .1, .05), the defaults here; CIFAR-100 ResNet (.2, .02, .6, .5, .03).

    Limits: α = 1, γ = 0 gives SAM with radius ρ'.

    Args:
        rho (distance, ≥ 0): How far w₂ is, where the gradient norm is larger.
        rho_prime (distance, ≥ 0): The radius of SAM's ascent, at w and at w₂.
        alpha (share): Weight of g₁ in h₊; g₃ has the rest.
        beta (share): Weight of g₀ in h₋; g₂ has the rest.
        gamma (number): Weight of the part of h₋ that is subtracted from h₊.
        weighting ("paper" or "published"): How h₋ is made: as in equation (3), or as in published code.
    """

    rho: Number = 0.2
    rho_prime: Number = 0.03
    alpha: Number = 0.1
    beta: Number = 0.1
    gamma: Number = 0.05
    weighting: Literal["paper", "published"] = "paper"

    paper = "arXiv 2303.03108"
    advice = "First-order flatness at four looks; its paper keeps most of the gain on every tenth step (Every)."
    ranges = (
        "rho 0.2, rho_prime 0.02 to 0.04, gamma 0.03 to 0.05; alpha and beta 0.1 on CIFAR-10, 0.3 to 0.6 on CIFAR-100."
    )
    cost = 4
    stackable = True
    copies = 5
    nonnegative = ("rho", "rho_prime")
    radius = "rho"

    def __post_init__(self) -> None:
        super().__post_init__()
        require.one_of(self, "weighting", "paper", "published")

    def looks(self, ctx: Context) -> Looks:
        """Equations (1) to (4)."""
        g0 = (yield HERE).grad
        g1 = (yield Look(self.rho_prime * ascent(g0))).grad
        ctx.note_gap()
        away = self.rho * ascent(g1 - g0)
        g2 = (yield Look(away)).grad
        g3 = (yield Look(away + self.rho_prime * ascent(g2))).grad
        h_plus = self.alpha * g1 + (1 - self.alpha) * g3
        published = self.weighting == "published"
        h_minus = g0 + abs(1 - self.beta) * g2 if published else self.beta * g0 + (1 - self.beta) * g2
        del g0, g1, g2, g3, away  # h₊ and h₋ can reuse their memory
        return h_plus - self.gamma * reject(h_minus, h_plus)

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(), cls(weighting="published", alpha=0.6, beta=0.5, gamma=0.03)]

    @classmethod
    def reduces_to(cls) -> list[tuple[Method, Method]]:
        return [(cls(alpha=1.0, gamma=0.0), SAM(rho=0.03))]
