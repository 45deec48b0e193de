"""First-order flatness (S2, gradient-norm-aware minimization).

Where a theorem holds in a limit, the rate at which it is approached is tested, not that a number is small.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from helpers import problems
from helpers.worlds import Quadratic, context, flat_problem, observed, randn, spread, still, trained_net
from steppe import GNAM, SAM
from steppe.method import HVP, Seen, one_by_one
from steppe.testing import drive
from steppe.vector import Vector


def highest(A: Tensor, b: Tensor, radius: float) -> Tensor:
    """Where ½xᵀAx + bᵀx is largest in a ball, for a maximum on its border: (μ − A)x = b with ‖x‖ = radius."""
    values, vectors = torch.linalg.eigh(A)
    b = vectors.T @ b
    low, high = values[-1], values[-1].abs() + b.norm() / radius + 1
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (b / (middle - values)).norm() > radius else (low, middle)
    return vectors @ (b / (high - values))


@pytest.mark.parametrize("seed", range(3))
def test_s2_lemma_4_1_first_order_flatness_is_the_largest_eigenvalue(seed):
    """λ_max = R⁽¹⁾/ρ² at a minimum, and Algorithm 1's w_adv is where the maximum is."""
    problem, rho = Quadratic(spread(0.1, 3.0, 6), seed), 0.3
    random = torch.nn.functional.normalize(randn(6, 1000, seed=seed), dim=0) * rho
    assert rho * (problem.M @ random).norm(dim=0).max() < rho**2 * 3.0
    seen = []

    def gradient(w: Tensor) -> Tensor:
        seen.append(problem.grad(w))
        return seen[-1]

    drive(GNAM(rho=rho), gradient, problem.minimum + 1e-8 * problem.basis[:, -1])
    flatness = rho * seen[2].norm()  # looks: w, one for the product, w_adv
    assert float(flatness / rho**2) == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_s2_proposition_4_2_first_order_flatness_bounds_the_zeroth(seed):
    """R⁽¹⁾ >= R⁽⁰⁾ on quadratics of any signature: both maxima are known exactly; the methods' looks stay below."""
    problem, rho = Quadratic(randn(6, seed=seed), seed), 0.5
    w = problem.minimum + randn(6, seed=100 + seed)
    g, M = problem.grad(w), problem.M
    zeroth = problem.loss(w + highest(M, g, rho)) - problem.loss(w)
    first = rho * problem.grad(w + highest(M @ M, M @ g, rho)).norm()
    assert first >= zeroth
    assert observed(SAM(rho=rho), problem, w)[1]["surrogate_gap"] <= zeroth * (1 + 1e-12)
    norms = []

    def gradient(w: Tensor) -> Tensor:
        norms.append(problem.grad(w).norm())
        return problem.grad(w)

    drive(GNAM(rho=rho), gradient, w)
    assert norms[0] * rho < norms[2] * rho <= first * (1 + 1e-12)


def test_s2_proposition_4_2_on_a_net():
    """Its proof: the gap of any look e is at most ρ times the largest gradient norm on the way there."""
    model, data = trained_net()
    problem, w = flat_problem(model, data), problems.weights(model)
    for rho in (0.05, 0.5, 2.0):
        opt = still(model, SAM(rho=rho))
        opt.step(**data.closures(model))
        g = problem.g(w)
        way = [problem.g(w + c * rho * g / g.norm()).norm() for c in spread(0.0, 1.0, 41)]
        assert 0 < opt.metrics["surrogate_gap"] <= rho * max(way)


def test_s2_equation_8_the_gradient_of_the_gradient_norm():
    """∇‖∇L‖ = H∇L/‖∇L‖: what GNAM asks for, at w and at w_adv, answered exactly."""
    model, data = trained_net()
    problem, w = flat_problem(model, data), problems.weights(model)

    def norm_gradient(at: Tensor) -> Tensor:
        """By differences of ‖∇L‖ along random axes it is checked below; here by autograd, through the norm."""
        at = at.detach().requires_grad_()
        g = torch.autograd.grad(problem.loss(at), at, create_graph=True)[0]
        return torch.autograd.grad(g.norm(), at)[0]

    rho, alpha, places = 0.1, 0.3, []
    looks = one_by_one(GNAM(rho=rho, alpha=alpha).looks(context(w)))
    ask = next(looks)
    try:
        while True:
            look = ask.at if isinstance(ask, HVP) else ask
            at = w if look.offset is None else w + look.offset.tensors[0]
            if isinstance(ask, HVP):
                answer = problem.hv(at, ask.vector.tensors[0])
                torch.testing.assert_close(answer, norm_gradient(at), rtol=0, atol=1e-12)
                places.append(at)
                ask = looks.send(Vector([answer]))
            else:
                ask = looks.send(Seen(Vector([problem.g(at)])))
    except StopIteration as end:
        direction = end.value.tensors[0]
    f = norm_gradient(w)
    adv = w + rho * f / f.norm()
    assert len(places) == 2 and torch.equal(places[0], w)
    torch.testing.assert_close(places[1], adv, rtol=0, atol=1e-12)
    torch.testing.assert_close(direction, problem.g(w) + alpha * rho * norm_gradient(adv), rtol=0, atol=1e-11)
    for seed in range(3):
        axis, h = nn.functional.normalize(randn(len(w), seed=seed), dim=0), 1e-4
        slope = (problem.g(w + h * axis).norm() - problem.g(w - h * axis).norm()) / (2 * h)
        assert float(slope) == pytest.approx(float(f @ axis), rel=1e-5, abs=1e-8)
