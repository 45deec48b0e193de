"""Sharpness-aware minimization with two independent looks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..method import Context, Look, Looks, Memory, Method, Number, ascent
from ..vector import Space, Vector


@dataclass(frozen=True)
class SAMPa(Method):
    """SAMPa (Xie, Pethick, Cevher; NeurIPS 2024; arXiv 2410.10683): SAM made parallel.

    SAM's second gradient waits for the first. SAMPa perturbs along an auxiliary gradient y, which the previous step has
    computed at a guess of the current weights, so that the two gradients of a step can be computed in parallel:

        w̃ = w + ρ y/‖y‖,   w' = w − η y                                     (1)
        d = (1 − λ) g_prev(w̃) + λ g(w')                                     (2)
        y ← g(w'),   y = 0 before the first step                            (3)

    g_prev is the gradient of the batch that y was computed on: the previous one. Give it as the auxiliary batch,
    ``with_auxiliary(loader, "previous")``, or ``--auxiliary previous`` in the lab. η is the learning rate of the first
    parameter group. On the first step both looks are at w.

    (1) ignores the base optimizer: w' is one step of plain gradient descent. Published code, written for SGD, takes
    the step of its base, w' = w − η (y + weight decay + momentum · buffer), and runs the looks on two GPUs. Weights
    with ``perturb=False`` are the same in w and w'.

    A captured step (`steppe.capture`) runs the two looks side by side on one GPU, as branches of one CUDA graph. Other
    steps run them one after another, with the same result.

    The first look is not at w: BatchNorm's statistics are those at w', and so is the loss that a trainer logs.

    Args:
        rho (distance, ≥ 0): The radius: how far along the stored gradient the second one is taken.
        lam (share, ≥ 0): Weight of the gradient at the guess w'; the gradient at w̃ has the rest.
    """

    rho: Number = 0.1
    lam: Number = 0.2

    paper = "arXiv 2410.10683"
    advice = "SAM whose two gradients can be computed at the same time."
    ranges = "rho 0.1, lam 0.2."
    cost = 2
    stackable = True
    copies = 3
    radius = "rho"
    nonnegative = ("rho", "lam")
    needs = frozenset({"auxiliary"})

    def looks(self, ctx: Context) -> Looks:
        """Equations (1) to (3)."""
        if ctx.lr is None:
            raise RuntimeError("SAMPa needs the learning rate, and the base optimizer has none: use a base with an lr")
        ahead, there = yield self._two_looks(ctx.lr, ctx.memory["y"])
        ctx.remember(y=ahead.grad)
        return (1 - self.lam) * there.grad + self.lam * ahead.grad

    def _two_looks(self, lr: Any, y: Vector) -> Iterator[Look]:
        """Equation (1): two independent looks."""
        yield Look(-1.0 * (lr * y))
        yield Look(self.rho * ascent(y), batch="auxiliary")

    def memory(self, space: Space) -> Memory:
        """y."""
        return {"y": space.zeros()}
