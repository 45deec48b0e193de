"""Momentum sharpness-aware minimization."""

from __future__ import annotations

from dataclasses import dataclass

from ..method import Context, Look, Looks, Memory, Method, Number, adaptive_ascent, ascent
from ..vector import Space
from .plain import Plain


@dataclass(frozen=True)
class MSAM(Method):
    """Momentum-SAM (Becker, Altrock, Risse; 2024; arXiv 2401.12033): SAM's perturbation at the cost of one gradient.

    Looks ahead, along the continuation of the last move: along −v, where v is a running sum of the directions:

        d = g(w − ρ v/‖v‖)                                                  (1)
        v ← β v + d,   v = 0 before the first step                          (2)

    The sign is minus: the weights move along −v, and so does the look. Momentum overshoots along sharp directions, so
    the loss there is higher, as at SAM's point. The plus sign does harm. If the base is SGD with momentum β and no
    weight decay, v equals its momentum buffer; with any other base v is MSAM's own.

    Compare it with Nesterov's momentum, which also looks ahead along −v, by ηβ‖v‖ instead of ρ: d = g(w − ηβ v). Its
    distance shrinks with the learning rate and the gradients; MSAM's is ρ.

    ``adaptive=True`` measures each weight in its own size, as ASAM does: e = −ρ T²v/‖Tv‖ with T = |w| + η.

    Keep ρ at zero during warm-up (a schedule: ``rho=lambda step, lr: 0.0 if step < 1000 else 0.3``): in the paper
    ViT-S/32 with AdamW falls below AdamW (66.1 against 67.0 %) with ρ on during warm-up, and rises to 69.1 % with ρ
    off. The step's only look is away from w: the reported loss and BatchNorm's statistics are those there, and so is
    the loss that a trainer logs.

    Limits: ρ = 0 gives the base optimizer.

    Published code keeps the weights at the perturbed point between steps, and one must move them back before an
    evaluation; here they are restored in every step. Its v contains the weight decay, taken at the perturbed point.
    The default ρ is that of its SGD class; its commands use 3 for WideResNet-16-4, ResNet-50 and ViT. Digits, a small
    net, SGD with momentum, 5 seeds, test accuracy in % with right labels, 40 % wrong and 60 % wrong (40 epochs): plain
    96.5, 92.3, 84.6; ρ 0.1 96.4, 92.4, 84.1; ρ 0.3 96.3, 92.4, 85.9; ρ 1 95.0, 91.1, 86.8; ρ 3 94.2, 75.1, not run.

    Args:
        rho (distance, ≥ 0): The radius: how far along −v the gradient is taken; with `adaptive` relative to the
            weights.
        beta (factor a step, ≥ 0): Decay of the sum v of directions; as the base's momentum.
        adaptive (bool): Measure each weight in its own size, as ASAM does.
        eta (number, ≥ 0): ASAM's η, for `adaptive` only.
    """

    rho: Number = 0.3
    beta: Number = 0.9
    adaptive: bool = False
    eta: Number = 0.01

    paper = "arXiv 2401.12033"
    advice = "SAM at the cost of the base optimizer. Compare with Nesterov momentum; rho zero during warm-up."
    ranges = "rho 0.3 in its published class, 2 to 3 in its paper and commands; beta 0.9, as the base's momentum."
    cost = 1
    stackable = True
    radius = "rho"
    nonnegative = ("rho", "beta", "eta")

    @property
    def copies(self) -> int:
        """The weights, v and the new v; with ``adaptive``, T and Tv in place of the new v."""
        return 4 if self.adaptive else 3

    def looks(self, ctx: Context) -> Looks:
        """Equations (1) and (2)."""
        v = ctx.memory["v"]
        ahead = adaptive_ascent(v, ctx.w, self.eta) if self.adaptive else ascent(v)
        there = yield Look(-1.0 * (self.rho * ahead))
        ctx.remember(v=(self.beta * v + there.grad).settled())
        return there.grad

    def memory(self, space: Space) -> Memory:
        """v."""
        return {"v": space.zeros()}

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(), cls(rho=1.0, adaptive=True)]

    @classmethod
    def reduces_to(cls) -> list[tuple[Method, Method]]:
        return [(cls(rho=0.0), Plain())]
