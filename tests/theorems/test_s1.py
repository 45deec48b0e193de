"""The surrogate gap (S1, GSAM): its lemmas, and what the step does to it.

Where a theorem holds in a limit, the rate at which it is approached is tested, not that a number is small.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR

import steppe
from helpers import problems
from helpers.worlds import (
    DOUBLE,
    Quadratic,
    Smooth,
    direction_of,
    flat_problem,
    observed,
    randn,
    spread,
    still,
    trained_net,
)
from steppe import GSAM, SAM
from steppe.schedules import linear_in_lr


@pytest.mark.parametrize("seed", range(3))
def test_s1_lemma_3_2_the_gap_is_not_negative_for_small_radii(seed):
    """h = ρ‖g‖ + ½ρ² ĝᵀHĝ on a quadratic: not negative up to a radius, negative beyond if ĝᵀHĝ < 0."""
    problem = Quadratic(spread(-2.0, 1.0, 6), seed)
    w = problem.minimum + problem.basis @ torch.tensor([2.0, 1.0, 0.1, 0.1, 0.1, 0.1], dtype=DOUBLE)
    g = problem.grad(w)
    along = (g @ problem.M @ g) / g.norm() ** 2
    largest = float(-2 * g.norm() / along)
    assert along < 0
    for rho in (1e-6, 1e-3, 0.1, 1.0, 0.99 * largest, 1.01 * largest):
        gap = observed(SAM(rho=rho), problem, w)[1]["surrogate_gap"]
        torch.testing.assert_close(gap, rho * g.norm() + 0.5 * rho**2 * along, rtol=1e-10, atol=1e-12)
        assert (gap >= 0) == (rho < largest)


def test_s1_lemma_3_2_on_a_net_the_gap_starts_as_the_gradient_norm():
    model, data = trained_net()
    problem, w = flat_problem(model, data), problems.weights(model)
    g = problem.g(w)
    along = g @ problem.hv(w, g) / g.norm() ** 2
    for rho in (1e-3, 1e-4):
        opt = still(model, GSAM(rho=rho))
        opt.step(**data.closures(model))
        gap = opt.metrics["surrogate_gap"]
        assert gap > 0
        # What is left after ρ‖g‖ is ½ρ²ĝᵀHĝ, up to a part of order ρ.
        assert abs((gap - rho * g.norm()) / (0.5 * rho**2) - along) < 20 * rho * abs(along)


def logistic_minimum() -> tuple[Smooth, Tensor]:
    """Softmax regression of three digits on 16 pixels, with weight decay, at its minimum (by Newton's method)."""
    images, labels = problems.digits()
    keep = labels < 3
    x = torch.nn.functional.avg_pool2d(images[keep].view(-1, 1, 8, 8), 2).flatten(1)
    y = labels[keep]

    def loss(w: Tensor) -> Tensor:
        weights = w.view(3, 16)
        return nn.functional.cross_entropy(x @ weights.T, y) + 0.01 * w.square().sum()

    problem, w = Smooth(loss), torch.zeros(48, dtype=DOUBLE)
    for _ in range(12):
        w = w - torch.linalg.solve(problem.hessian(w), problem.grad(w))
    assert problem.grad(w).norm() < 1e-13
    return problem, w


def test_s1_lemma_3_3_at_a_minimum_the_gap_is_the_largest_eigenvalue():
    """2h/ρ² → λ_max: exactly, the difference is ρ/3 times the third derivative along the eigenvector."""
    problem, w = logistic_minimum()
    values, vectors = torch.linalg.eigh(problem.hessian(w))
    top = vectors[:, -1]

    slope = grad(lambda w: problem.grad(w) @ top)  # H(w) times the eigenvector
    third = grad(lambda w: slope(w) @ top)(w) @ top
    top = top * torch.sign(third)  # the side on which the ball's largest loss lies
    start = 1e-5  # how far from the minimum, so that there is a gradient to follow
    for rho in (1e-2, 1e-3):
        gap = observed(SAM(rho=rho), problem, w + start * top)[1]["surrogate_gap"]
        gap = gap + 0.5 * values[-1] * (start**2 - (start + rho) ** 2 + rho**2)  # as from the minimum itself
        torch.testing.assert_close(2 * gap / rho**2 - values[-1], rho * third.abs() / 3, rtol=0.1, atol=0)
        for seed in range(20):  # nowhere in the ball is the loss larger
            there = w + rho * nn.functional.normalize(randn(48, seed=seed), dim=0)
            assert problem.loss(there) - problem.loss(w) < gap


def test_s1_section_4_2_the_ascent_leaves_the_perturbed_loss_unchanged():
    """Along g_⊥, f_p changes with the square of the step, while f rises with the step itself: h falls."""
    model, data = trained_net()
    problem, w = flat_problem(model, data), problems.weights(model)
    rho, alpha = 0.2, 0.5
    g_p = direction_of(still(model, SAM(rho=rho)), model, data)
    upright = (g_p - direction_of(still(model, GSAM(rho=rho, alpha=alpha)), model, data)) / alpha
    g = len(data.main[1]) * problem.g(w)
    e = rho * g / g.norm()
    assert upright.norm() > 0.01 * g.norm()
    assert abs(g_p @ upright) < 1e-12 * g_p.norm() * upright.norm()
    torch.testing.assert_close(g @ upright, upright @ upright)  # f's slope
    changes = [float(problem.loss(w + e + s * upright) - problem.loss(w + e)) for s in (1e-3, 5e-4)]
    assert changes[0] / changes[1] == pytest.approx(4, rel=0.02)


def test_s1_algorithm_1_direction():
    model, data = trained_net()
    problem, w = flat_problem(model, data), problems.weights(model)
    size, g_mean = len(data.main[1]), problem.g(w)
    for alpha in (0.1, 1.0):
        g, g_p = size * g_mean, size * problem.g(w + 0.1 * g_mean / g_mean.norm())
        parallel = (g @ g_p) / (g_p @ g_p) * g_p
        expected = g_p - alpha * (g - parallel)
        direction = direction_of(still(model, GSAM(rho=0.1, alpha=alpha)), model, data)
        assert (direction - expected).norm() < 1e-12 * expected.norm()


SCHEDULERS = {
    "one-cycle": lambda opt: OneCycleLR(opt, max_lr=0.4, total_steps=30),
    "cosine": lambda opt: CosineAnnealingLR(opt, T_max=30, eta_min=0.04),
    "warm-up": lambda opt: SequentialLR(
        opt, [LinearLR(opt, start_factor=1e-3, total_iters=10), CosineAnnealingLR(opt, T_max=20)], milestones=[10]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_s1_radius_follows_any_scheduler(name):
    """Algorithm 1, line 0: ρ_t is linear in the learning rate; and clamped, so that warm-up cannot leave its range."""
    w = nn.Parameter(randn(4))
    rho = linear_in_lr(rho_max=0.6, rho_min=0.2, lr_max=0.4, lr_min=0.04)
    opt = steppe.SharpnessAware(SGD([w], lr=0.4), GSAM(rho=rho))
    scheduler = SCHEDULERS[name](opt)
    rates = []
    for _ in range(29):
        places = []

        def closure(places=places):
            places.append(w.detach().clone())
            return (w**4).sum()

        rates.append(scheduler.get_last_lr()[0])
        with torch.no_grad():
            w.copy_(randn(4))
        opt.step(closure)
        scheduler.step()
        share = (rates[-1] - 0.04) / (0.4 - 0.04)
        expected = min(max(0.2 + (0.6 - 0.2) * share, 0.2), 0.6)
        assert float((places[1] - places[0]).norm()) == pytest.approx(expected, rel=1e-12)
    assert max(rates) > 0.39 and min(rates) < 0.06
    assert (min(rates) < 0.04) == (name != "cosine")  # the clamp was needed
