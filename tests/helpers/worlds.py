"""Problems whose answer is known, and what a method sees and returns on them; in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import grad, jacrev
from torch.optim import SGD

import steppe
from helpers import problems, references
from steppe.engine.random_vectors import Draws
from steppe.method import Context
from steppe.testing import drive
from steppe.vector import Vector

DOUBLE = torch.float64


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


class Quadratic:
    """½(w − w*)ᵀM(w − w*) with given eigenvalues, a random basis and a random minimum."""

    def __init__(self, eigenvalues: Tensor, seed: int = 0):
        d = len(eigenvalues)
        self.eigenvalues = eigenvalues
        self.basis = torch.linalg.qr(randn(d, d, seed=seed)).Q
        self.M = self.basis @ torch.diag(eigenvalues) @ self.basis.T
        self.minimum = randn(d, seed=seed + 1)

    def loss(self, w: Tensor) -> Tensor:
        return 0.5 * (w - self.minimum) @ self.M @ (w - self.minimum)

    def grad(self, w: Tensor) -> Tensor:
        return self.M @ (w - self.minimum)


def spread(low: float, high: float, count: int) -> Tensor:
    return torch.linspace(low, high, count, dtype=DOUBLE)


def context(w: Tensor, seed: int = 0) -> Context:
    v = Vector([w])
    return Context(0, 1.0, lambda: v, Draws(v.space, seed=seed, step=0))


def observed(method: steppe.Method, problem, w: Tensor, seed: int = 0) -> tuple[Tensor, dict]:
    """The direction of one step, and its metrics."""
    ctx = context(w, seed)
    direction = drive(method, problem.grad, w, ctx, problem.loss)
    return direction, ctx.metrics


class Smooth:
    """Any smooth function of a flat vector, with dense derivatives."""

    def __init__(self, loss):
        self.loss, self.grad, self.hessian = loss, grad(loss), jacrev(grad(loss))


def trained_net(count: int = 20, seed: int = 0) -> tuple[nn.Module, problems.Data]:
    model = problems.seeded(problems.mlp, seed)
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    for data in problems.steps(count):
        opt.zero_grad()
        problems.loss(model, data.main).backward()
        opt.step()
    return model, problems.steps(count + 1)[-1]


def flat_problem(model: nn.Module, data: problems.Data) -> references.Problem:
    return references.Problem(model, data, 0, 0.0, lambda *_: torch.empty(0))


def direction_of(opt: steppe.SharpnessAware, model: nn.Module, data: problems.Data) -> Tensor:
    """The direction for the loss summed over the batch, which is so large that the 1e-12 in divisions does not show."""
    opt.gradient(lambda: len(data.main[1]) * problems.loss(model, data.main))
    direction = problems.flat(p.grad for p in model.parameters())
    opt.step()
    return direction


def still(model: nn.Module, method: steppe.Method, **settings) -> steppe.SharpnessAware:
    """An optimizer with a learning rate of zero: it looks, but does not move the weights."""
    model.zero_grad()
    return steppe.SharpnessAware(SGD(model.parameters(), lr=0.0), method, model, **settings)
