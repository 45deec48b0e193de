"""Entropy-SGD."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..method import HERE, Context, Look, Looks, Method, Number
from . import require


@dataclass(frozen=True)
class EntropySGD(Method):
    """Entropy-SGD (Chaudhari et al.; ICLR 2017; arXiv 1611.01838).

    Descends local entropy: a Langevin walk x explores the neighbourhood of w, tied to it with strength γ, and w moves
    towards the walk's running mean μ. From x = μ = w, on a new batch each time:

        x ← x − η' (g(x) − γ (w − x)) + √η' ε N(0, I)                       (1)
        μ ← a μ + (1 − a) x                                                 (2)
        d = γ (w − μ)                                                       (3)

    The first gradient is taken on the step's batch at w, the other L on the auxiliary batch. Its closure should take
    a new batch at each call, from an iterator (``next(batches)``): all looks of a step start with the same random
    state, so that a batch drawn by torch's generator would be the same in all of them. Weights with ``perturb=False``
    take part in the walk, but gradients are computed at their current values.

    Published code leaves the factor γ out of (3), which changes the meaning of the learning rate only, and walks
    with Nesterov momentum.

    Args:
        L (count, ≥ 0): Langevin steps after the first, each on a new batch; each costs a look.
        eta (learning rate, ≥ 0): η', the step size of the walk.
        gamma (number, ≥ 0): How strongly the walk is held to the weights.
        eps (number, ≥ 0): Size of the walk's noise.
        a (share, ≥ 0): How much of the mean so far each step of the walk keeps.
    """

    L: int = 5
    eta: Number = 0.1
    gamma: Number = 0.03
    eps: Number = 1e-4
    a: Number = 0.75

    paper = "arXiv 1611.01838"
    advice = "A baseline: needs a learning rate of its own, about 1/gamma."
    copies = 5
    nonnegative = ("eta", "gamma", "eps", "a")
    needs = frozenset({"auxiliary"})

    def __post_init__(self) -> None:
        super().__post_init__()
        require.whole_number(self, "L", least=0)

    @property
    def cost(self) -> float:
        """One look on the step's batch, L on new ones."""
        return self.L + 1

    def looks(self, ctx: Context) -> Looks:
        """Equations (1) to (3), in terms of x − w and μ − w."""
        x = mean = None
        for _ in range(self.L + 1):
            g = (yield HERE if x is None else Look(x, batch="auxiliary")).grad
            noise = math.sqrt(self.eta) * self.eps * ctx.draws.normal()
            x = (noise - self.eta * g if x is None else x - self.eta * (g + self.gamma * x) + noise).settled()
            del g, noise
            mean = ((1 - self.a) * x if mean is None else self.a * mean + (1 - self.a) * x).settled()
        assert mean is not None
        return -self.gamma * mean

    @classmethod
    def variants(cls) -> list[Method]:
        return [cls(L=3, gamma=0.3, eps=0.01)]
