"""The theorems of Generalization Aware Minimization (S0), the derivative in γ, and Figure 4.

Where a theorem holds in a limit, the rate at which it is approached is tested, not that a number is small.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import steppe
from helpers import problems, references
from helpers.worlds import DOUBLE, Quadratic, flat_problem, randn, spread, still
from steppe import GAM
from steppe.methods.gam import transformation
from steppe.testing import drive


@pytest.mark.parametrize("T", [1, 2, 4])
@pytest.mark.parametrize("eps", [0.1, 1e-3])
def test_s0_proof_of_theorem_2_gam_acts_on_eigenvalues_as_a_polynomial(T, eps):
    """Eq. 33-34: g(ŵ) = (M + Σ γ_t M^{t+1})(w − w*), also where M is indefinite."""
    problem = Quadratic(spread(-1.0, 2.0, 7))
    gamma, w = (0.7 * randn(T, seed=5)).tolist(), randn(7, seed=6)
    terms: list[Tensor] = [c * torch.linalg.matrix_power(problem.M, t + 2) for t, c in enumerate(gamma)]
    powers = sum(terms, problem.M)
    direction = drive(GAM(T=T, eps=eps, gamma=gamma), problem.grad, w)
    assert (direction - powers @ (w - problem.minimum)).norm() < 1e-13 / eps * direction.norm()
    P = transformation(gamma, problem.eigenvalues)
    in_eigenbasis = problem.basis.T @ direction / (problem.basis.T @ (w - problem.minimum))
    torch.testing.assert_close(in_eigenbasis, P, rtol=0, atol=1e-12 / eps)


def ramp(x: Tensor) -> Tensor:
    return torch.where(x < 0.5, x, 0.5 * x + 0.25)


@pytest.mark.parametrize(
    ("f", "eps"),
    [(torch.sin, 1e-1), (torch.sin, 1e-6), (torch.log1p, 1e-3), (torch.atan, 1e-5), (ramp, 1e-2)],
    ids=["sin-1e-1", "sin-1e-6", "log1p", "atan", "kinked"],
)
def test_s0_theorem_2_any_transformation_is_reached(f, eps):
    """For every f with f(0) = 0, f'(0) = 1 and every ε there are γ with ‖∇L̄(θ) − ∇L̃(θ̂)‖ ≤ ε ‖θ − θ*‖."""
    grid = 0.9 * torch.cos(spread(0.0, math.pi, 400))  # the bounded eigenvalues
    for T in range(1, 31):
        powers = torch.stack([grid ** (t + 2) for t in range(T)], dim=1)
        gamma = torch.linalg.lstsq(powers, f(grid) - grid).solution
        if (transformation(gamma, grid) - f(grid)).abs().max() <= 0.9 * eps:
            break
    else:
        pytest.fail("no polynomial of degree 31 is close enough")
    for seed in range(5):
        eigenvalues = 0.9 * (2 * torch.rand(6, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed)) - 1)
        seen = Quadratic(eigenvalues, seed)
        wanted = Quadratic(f(eigenvalues), seed)  # the same eigenvectors, the same minimum
        w = randn(6, seed=50 + seed)
        far = (w - seen.minimum).norm()
        direction = drive(GAM(T=T, eps=0.1, gamma=gamma.tolist()), seen.grad, w)
        assert (wanted.grad(w) - direction).norm() <= eps * far
        if eps < 0.01:
            assert (wanted.grad(w) - seen.grad(w)).norm() > eps * far  # which is not so without a perturbation


@pytest.mark.parametrize("reference", ["perturbed", "weights"])
@pytest.mark.parametrize("discrepancy", ["dot", "squared", "cosine"])
@pytest.mark.parametrize(
    ("directions", "hvp", "tolerance"),
    [
        ("raw", "exact", 1e-8),
        ("raw", "central", 1e-7),
        ("raw", "forward", 1e-5),
        ("sized", "exact", 1e-8),
        ("unit", "exact", 1e-8),
    ],
)
def test_s0_line_13_the_slope_is_the_derivative_in_gamma(reference, discrepancy, directions, hvp, tolerance):
    """∂Δ/∂γ at γ ≠ 0, on a net, against differences of Δ in γ; with ḡ at ŵ (printed) and at w (Theorem 2)."""
    model = problems.seeded(problems.mlp)
    method = GAM(
        T=3,
        eps=0.1,
        discrepancy=discrepancy,
        reference=reference,
        directions=directions,
        optimizer=partial(SGD, lr=0.5),
    )
    opt = still(model, method, hvp=hvp)
    first, second = problems.steps(2)
    opt.step(**first.closures(model))
    gamma = opt.metrics["gamma"].clone()
    opt.step(**second.closures(model))
    problem, w = flat_problem(model, second), problems.weights(model)
    g0, d = problem.g(w), []
    for t in range(3):
        d_t = g0 if t == 0 else (problem.g(w + 0.1 * d[-1]) - g0) / 0.1
        d.append(d_t if directions == "raw" else d_t / d_t.norm() * (g0.norm() if directions == "sized" else 1))

    def delta(gamma: Tensor) -> Tensor:
        at = w + gamma @ torch.stack(d)
        return references.discrepancy(
            method, problem.g(at), problem.g(at if reference == "perturbed" else w, "auxiliary")
        )

    slope, h = [], 1e-3
    for axis in torch.eye(3, dtype=DOUBLE):  # of fourth order
        near, far = (delta(gamma + k * h * axis) - delta(gamma - k * h * axis) for k in (1, 2))
        slope.append((8 * near - far) / (12 * h))
    expected = torch.stack(slope)
    assert gamma.norm() > 0.01
    assert (opt.metrics["slope"] - expected).norm() < tolerance * expected.norm()


class Figure4:
    """S0's synthetic problem (Appendix E.1): observed eigenvalues f(λ + noise), d 15."""

    def __init__(self, seed: int = 0):
        random = torch.Generator().manual_seed(seed)
        self.true = 1 + torch.rand(15, dtype=DOUBLE, generator=random)
        noisy = self.true + 0.01 * torch.randn(15, dtype=DOUBLE, generator=random)
        self.seen = Quadratic(self.f(noisy), seed)
        self.w = self.seen.minimum + self.seen.basis.sum(1)  # all eigenvectors count alike
        # The document compares with the true gradient at θ (not at θ̂, where P = 0 would be the best answer): the
        # auxiliary loss is the true one, made linear at θ.
        self.true_problem = Quadratic(self.true, seed)
        self.wanted = self.true_problem.grad(self.w)

    @staticmethod
    def f(x: Tensor) -> Tensor:
        return x / 2 + torch.sin(10 * x) / 20

    def error(self, gamma: Tensor) -> Tensor:
        """Δ = Σ (P(λ̃) − λ)²."""
        return (transformation(gamma, self.seen.eigenvalues) - self.true).square().sum()

    def learn(self, steps: int, gamma_optimizer, reference: Any = "perturbed", **settings) -> Tensor:
        w = nn.Parameter(self.w.clone())
        method = GAM(T=12, eps=0.1, discrepancy="squared", optimizer=gamma_optimizer, reference=reference)
        opt = steppe.SharpnessAware(SGD([w], lr=0.0), method, **settings)
        true = self.true_problem  # the theorem's form is given the true loss itself
        auxiliary = {"perturbed": lambda: self.wanted @ w, "weights": lambda: true.loss(w)}[reference]
        for _ in range(steps):
            opt.step(lambda: self.seen.loss(w), auxiliary=auxiliary)
        return opt.metrics["gamma"]


@pytest.mark.slow
def test_s0_figure_4_the_learned_polynomial_follows_the_true_eigenvalues():
    """At 300 of the 100 000 iterations, with gradient descent in place of Adam, because then a bound is known.

    Δ is a convex quadratic of γ with smoothness β, so k steps of length 1/β from 0 reach, for every z,
    Δ(γ_k) <= Δ(z) + β‖z‖²/2k. The best z of this bound is a ridge regression.
    """
    problem, k = Figure4(), 300
    seen, true = problem.seen.eigenvalues, problem.true
    powers = torch.stack([seen ** (t + 2) for t in range(12)], dim=1)
    beta = 2 * torch.linalg.eigvalsh(powers.T @ powers)[-1]
    ridge = beta / (2 * k)
    z = torch.linalg.solve(powers.T @ powers + ridge * torch.eye(12, dtype=DOUBLE), powers.T @ (true - seen))
    bound = problem.error(z) + ridge * z.square().sum()
    identity = problem.error(torch.zeros(12, dtype=DOUBLE))
    gamma = problem.learn(k, partial(SGD, lr=float(1 / beta)))
    assert problem.error(gamma) <= bound
    assert bound < identity / 25  # five times closer than the observed eigenvalues, in root mean square
    # Also between the observed eigenvalues, where f is one to one:
    line = spread(float(true.min()), float(true.max()), 200)
    learned = (transformation(gamma, problem.f(line)) - line).abs().max()
    assert learned < (problem.f(line) - line).abs().max() / 4


@pytest.mark.parametrize("reference", ["perturbed", "weights"])
def test_s0_figure_4_the_path_of_gamma_is_a_polynomial_fit(reference):
    """With Adam 1e-3, as in the document: GAM's γ is that of Adam on Σ (P(λ̃) − λ)², which knows no perturbation.

    ``reference="weights"`` needs no trick for it: the auxiliary loss is the true one.
    """
    problem = Figure4()
    gamma = nn.Parameter(torch.zeros(12, dtype=DOUBLE))
    adam = Adam([gamma], lr=1e-3)
    for _ in range(60):
        adam.zero_grad()
        problem.error(gamma).backward()
        adam.step()
    learned = problem.learn(60, partial(Adam, lr=1e-3), reference, hvp="exact")
    torch.testing.assert_close(learned, gamma.detach(), rtol=0, atol=1e-11)
    assert learned.norm() > 0.1


def test_s0_the_theorem_s_gamma_settles_and_the_printed_one_grows():
    """X̄ = X on a quadratic, T = 1, unit direction, cosine, plain gradient steps on γ.

    At w the gradients of X and X̄ are the same, so no perturbation can make them more alike: the theorem's γ stays at
    its start, 0, where the slope vanishes. Raw, dot: the printed slope is −2 d·Hg < 0 for every γ > 0, so γ only grows.
    """
    problem = Quadratic(spread(0.5, 2.0, 6))
    w = nn.Parameter(randn(6, seed=3))
    both = {"closure": lambda: problem.loss(w), "auxiliary": lambda: problem.loss(w)}
    settings = {"T": 1, "optimizer": partial(SGD, lr=0.01)}
    opt = steppe.SharpnessAware(
        SGD([w], lr=0.0), GAM(**settings, discrepancy="cosine", directions="unit", reference="weights"), hvp="exact"
    )
    for _ in range(5):
        opt.step(**both)
    assert opt.metrics["gamma"].abs() < 1e-12
    opt = steppe.SharpnessAware(SGD([w], lr=0.0), GAM(**settings), hvp="exact")
    path = []
    for _ in range(5):
        opt.step(**both)
        path.append(float(opt.metrics["gamma"]))
    steps = [b - a for a, b in itertools.pairwise(path)]
    assert path[0] > 0 and all(b > a > 0 for a, b in itertools.pairwise(steps))  # faster and faster
