"""A problem whose best transformation of eigenvalues is known (S0, Figure 4), and GAM learning it from gradients.

The training loss and the test loss are quadratics with the same eigenvectors. Where the test loss has an eigenvalue λ,
drawn from [1, 2], the training loss has λ̃ = f(λ + noise), f(λ) = λ/2 + sin(10λ)/20. The paper leaves two things open:

- The eigenvalues and their noise are drawn once; the weights are drawn in each iteration, w − w* ~ N(0, I).
- ∇L̃(ŵ) is compared with the test gradient at w, as in Appendix D, not at ŵ as in line 12 of Algorithm 1, where P = 0
  would be the best answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..engine.random_vectors import Draws
from ..method import HVP, Context, Look, Seen, one_by_one
from ..methods.gam import GAM
from ..vector import Vector


def f(eigenvalue: Tensor) -> Tensor:
    """From an eigenvalue of the test loss to one of the training loss."""
    return eigenvalue / 2 + torch.sin(10 * eigenvalue) / 20


@dataclass(frozen=True)
class Quadratics:
    """The eigenvalues of the test loss ½ Σ λ w² (`true`) and of the training loss ½ Σ λ̃ w² (`observed`)."""

    true: Tensor
    observed: Tensor

    @classmethod
    def drawn(cls, seed: int, count: int = 15) -> Quadratics:
        """Random eigenvalues. Sets torch's seed; `learn` draws from the same generator afterwards."""
        torch.manual_seed(seed)
        true = 1 + torch.rand(count, dtype=torch.float64)
        return cls(true, f(true + 0.01 * torch.randn_like(true)))

    def distance(self, guess: Tensor) -> float:
        """Root mean square distance of guessed eigenvalues to the true ones."""
        return float((guess - self.true).square().mean().sqrt())


def paper_method() -> GAM:
    """GAM as in the figure; γ is updated by Adam at 1e-3, the default."""
    return GAM(T=12, eps=0.1, discrepancy="squared")


def learn(problem: Quadratics, method: GAM, iterations: Iterable[int]) -> Tensor:
    """The coefficients γ that GAM learns from gradients of the two losses, in the basis of their eigenvectors."""
    true, observed = problem.true, problem.observed
    space = Vector([observed]).space
    memory = method.memory(space)
    for step in iterations:
        w = torch.randn_like(observed)
        ctx = Context(step, 0.0, lambda w=w: Vector([w], space), Draws(space, seed=0, step=step), memory)

        def answer(ask: Look | HVP, w: Tensor = w) -> Seen | Vector:
            """The training gradient anywhere, the test gradient at w, and Hessian-vector products."""
            if isinstance(ask, HVP):
                hessian = observed if ask.at.batch == "main" else torch.zeros_like(observed)
                return Vector([hessian * ask.vector.tensors[0]], space)
            if ask.batch == "auxiliary":
                return Seen(Vector([true * w], space))
            return Seen(Vector([observed * (w if ask.offset is None else w + ask.offset.tensors[0])], space))

        looks = one_by_one(method.looks(ctx))
        ask = next(looks)
        while ask is not None:
            try:
                ask = looks.send(answer(ask))
            except StopIteration:  # carries the direction; the weights do not follow it here
                ask = None
        memory = ctx.remembered
    gamma = memory["gamma"]
    assert isinstance(gamma, Tensor)
    return gamma
