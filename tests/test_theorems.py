"""The papers' theorems, in float64, on problems small enough to know the answer.

S0 is Generalization Aware Minimization, S1 GSAM, S2 gradient-norm-aware minimization, S3 the universal class, S4
SA-SAM. What a library method sees or returns is held against closed forms or dense linear algebra. Where a theorem
holds in a limit, the rate at which it is approached is tested, not that a number is small.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacrev
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR

import problems
import reference
import steppe
from steppe import ASAM, GAM, GNAM, GSAM, SAM, SASAM, SASGD, DetSAM, FrobSAM, ProductSAM, TraceSAM, UniversalSAM
from steppe.draws import Draws
from steppe.method import HVP, Context, Seen
from steppe.methods.gam import transformation
from steppe.schedules import linear_in_lr
from steppe.trying import drive
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


def flat_problem(model: nn.Module, data: problems.Data) -> reference.Problem:
    return reference.Problem(model, data, 0, 0.0, lambda *_: torch.empty(0))


def direction_of(opt: steppe.SharpnessAware, model: nn.Module, data: problems.Data) -> Tensor:
    """Of the loss summed over the batch: at its size the guard of divisions, 1e-12, does not show."""
    opt.gradient(lambda: len(data.main[1]) * problems.loss(model, data.main))
    direction = problems.flat(p.grad for p in model.parameters())
    opt.step()
    return direction


def still(model: nn.Module, method: steppe.Method, **settings) -> steppe.SharpnessAware:
    """An optimizer that looks around and stays where it is."""
    model.zero_grad()
    return steppe.SharpnessAware(SGD(model.parameters(), lr=0.0), method, model, **settings)


# S0: generalization aware minimization


@pytest.mark.parametrize("T", [1, 2, 4])
@pytest.mark.parametrize("eps", [0.1, 1e-3])
def test_s0_proof_of_theorem_2_gam_acts_on_eigenvalues_as_a_polynomial(T, eps):
    """Eq. 33-34: g(ŵ) = (M + Σ γ_t M^{t+1})(w − w*), also where M is indefinite."""
    problem = Quadratic(spread(-1.0, 2.0, 7))
    gamma, w = (0.7 * randn(T, seed=5)).tolist(), randn(7, seed=6)
    powers = sum((c * torch.linalg.matrix_power(problem.M, t + 2) for t, c in enumerate(gamma)), problem.M)
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


@pytest.mark.parametrize("discrepancy", ["dot", "squared"])
@pytest.mark.parametrize(("hvp", "tolerance"), [("exact", 1e-8), ("central", 1e-7), ("forward", 1e-5)])
def test_s0_line_13_two_hessian_vector_products_are_the_derivative_in_gamma(discrepancy, hvp, tolerance):
    """∂Δ/∂γ at γ ≠ 0, on a net, against differences of Δ in γ."""
    model = problems.seeded(problems.mlp)
    method = GAM(T=3, eps=0.1, discrepancy=discrepancy, optimizer=partial(SGD, lr=0.5))
    opt = still(model, method, hvp=hvp)
    first, second = problems.steps(2)
    opt.step(**first.closures(model))
    gamma = opt.metrics["gamma"].clone()
    opt.step(**second.closures(model))
    problem, w = flat_problem(model, second), problems.weights(model)
    d = [problem.g(w)]
    for _ in range(2):
        d.append((problem.g(w + 0.1 * d[-1]) - d[0]) / 0.1)

    def delta(gamma: Tensor) -> Tensor:
        at = w + gamma @ torch.stack(d)
        g, g_bar = problem.g(at), problem.g(at, "auxiliary")
        return -g @ g_bar if discrepancy == "dot" else (g - g_bar).square().sum()

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
        self.wanted = Quadratic(self.true, seed).grad(self.w)

    @staticmethod
    def f(x: Tensor) -> Tensor:
        return x / 2 + torch.sin(10 * x) / 20

    def error(self, gamma: Tensor) -> Tensor:
        """Δ = Σ (P(λ̃) − λ)²."""
        return (transformation(gamma, self.seen.eigenvalues) - self.true).square().sum()

    def learn(self, steps: int, gamma_optimizer, **settings) -> Tensor:
        w = nn.Parameter(self.w.clone())
        method = GAM(T=12, eps=0.1, discrepancy="squared", optimizer=gamma_optimizer)
        opt = steppe.SharpnessAware(SGD([w], lr=0.0), method, **settings)
        for _ in range(steps):
            opt.step(lambda: self.seen.loss(w), auxiliary=lambda: self.wanted @ w)
        return opt.metrics["gamma"]


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


def test_s0_figure_4_the_path_of_gamma_is_a_polynomial_fit():
    """With Adam 1e-3, as in the document: GAM's γ is that of Adam on Σ (P(λ̃) − λ)², which knows no perturbation."""
    problem = Figure4()
    gamma = nn.Parameter(torch.zeros(12, dtype=DOUBLE))
    adam = Adam([gamma], lr=1e-3)
    for _ in range(60):
        adam.zero_grad()
        problem.error(gamma).backward()
        adam.step()
    learned = problem.learn(60, partial(Adam, lr=1e-3), hvp="exact")
    torch.testing.assert_close(learned, gamma.detach(), rtol=0, atol=1e-11)
    assert learned.norm() > 0.1


# S1: the surrogate gap


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


# S2: gradient-norm-aware minimization


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
    looks = GNAM(rho=rho, alpha=alpha).looks(context(w))
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


# S3: the universal class


class Listed:
    """A sampler that goes through given points: integrals become sums, with no chance in them."""

    def __init__(self, points: Tensor):
        self.points = itertools.cycle(points)

    def __call__(self, draws: Draws, grad: Vector) -> Vector:
        return Vector([next(self.points)], grad.space)


def circle(count: int = 8) -> Tensor:
    """Mean over these = mean over the unit circle, for polynomials of degree < count."""
    angles = 2 * math.pi * torch.arange(count, dtype=DOUBLE) / count
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def gaussian(d: int) -> Tensor:
    """Mean over these = mean over N(0, I), for polynomials of degree <= 5; d even.

    In the plane: half of them at 0, half on a circle of radius 2, so that r² and r⁴ have means 2 and 8.
    """
    plane = torch.cat([torch.zeros(6, 2, dtype=DOUBLE), 2 * circle(6)])
    return torch.stack([torch.cat(parts) for parts in itertools.product(plane, repeat=d // 2)])


def grid(half_width: float, count: int) -> Tensor:
    """The midpoint rule on a square: as good as exact for what is smooth and zero at the border."""
    line = (torch.arange(count, dtype=DOUBLE) + 0.5) * (2 * half_width / count) - half_width
    return torch.cartesian_prod(line, line)


def frobenius(t1: Tensor, t2: Tensor) -> Tensor:
    return 2 * (t2 - t1**2)


def identity(t: Tensor) -> Tensor:
    return t


def sharpness(method: steppe.Method, problem, w: Tensor, seed: int = 0) -> float:
    return float(observed(method, problem, w, seed)[1]["sharpness"])


def universal_frobenius(points: Tensor, **settings) -> UniversalSAM:
    return UniversalSAM(frobenius, (identity, torch.square), Listed(points), n=len(points), **settings)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rho", [0.01, 1.0])
def test_s3_table_1_row_1_trace(seed, rho):
    """Exactly, for an orthonormal basis of directions; and with random directions, within four standard errors."""
    d, n = 5, 400
    problem = Quadratic(randn(d, seed=seed), seed)
    H, w = problem.M, problem.minimum
    axes = torch.linalg.qr(randn(d, d, seed=9 + seed)).Q
    exact = sharpness(UniversalSAM(mu=Listed(axes), rho=rho, n=d), problem, w)
    assert exact == pytest.approx(float(H.trace()) / (2 * d), rel=1e-9)
    variance = (d * (H @ H).trace() - H.trace() ** 2) / (2 * d**2 * (d + 2))
    for method in (TraceSAM(rho=rho, n=n), UniversalSAM(rho=rho, n=n)):
        estimate = sharpness(method, problem, w, seed)
        assert abs(estimate - float(H.trace()) / (2 * d)) < 4 * math.sqrt(float(variance) / n)


@pytest.mark.parametrize("seed", range(3))
def test_s3_table_1_row_2_frobenius_norm(seed, monkeypatch):
    """Exactly, for directions with the moments of N(0, I); and with random ones, within four standard errors."""
    points, n = gaussian(4), 400
    problem = Quadratic(randn(4, seed=seed), seed)
    H, w = problem.M, problem.minimum
    expected = float(H.square().sum())
    assert sharpness(universal_frobenius(points, rho=0.1), problem, w) == pytest.approx(expected, rel=1e-9)
    with monkeypatch.context() as patch:
        patch.setattr(FrobSAM, "samplers", lambda self: [Listed(points)])
        biased = sharpness(FrobSAM(rho=0.1, n=len(points)), problem, w) * (len(points) - 1) / len(points)
        assert biased == pytest.approx(expected, rel=1e-9)
    second, fourth = 0.5 * expected, 3 * float(torch.linalg.matrix_power(H, 4).trace())  # cumulants of ½vᵀHv
    error = 2 * math.sqrt(fourth / n + 2 * second**2 / (n - 1))
    assert abs(sharpness(FrobSAM(rho=0.1, n=n), problem, w, seed) - expected) < 4 * error
    quarter = sharpness(FrobSAM(rho=0.1, n=n, published=True), problem, w, seed)
    assert quarter == pytest.approx(sharpness(FrobSAM(rho=0.1, n=n), problem, w, seed) / 4)


def determinant(method: DetSAM, half_width: float, problem: Quadratic) -> float:
    """det H from Det-SAM's measure: the mean over the cube is an integral over (2c)^d."""
    d = len(problem.minimum)
    return (2 * math.pi) ** d / (2 * half_width) ** (2 * d) * sharpness(method, problem, problem.minimum, seed=3)


@pytest.mark.parametrize("seed", range(3))
def test_s3_table_1_row_3_determinant(seed, monkeypatch):
    problem = Quadratic(spread(0.6, 1.7, 2), seed)
    with monkeypatch.context() as patch:
        points = grid(8.0, 16)
        patch.setattr(DetSAM, "samplers", lambda self: [Listed(points)])
        assert determinant(DetSAM(n=len(points)), 8.0, problem) == pytest.approx(0.6 * 1.7, rel=1e-4)
        # Published code's ψ = exp(−t/2) measures det(H/2).
        published = determinant(DetSAM(n=len(points), sigma=-0.5), 8.0, problem)
        assert published == pytest.approx(0.3 * 0.85, rel=1e-3)
    n, c = 400, 5.0
    mean = 2 * math.pi / math.sqrt(0.6 * 1.7) / (2 * c) ** 2
    square = math.pi / math.sqrt(0.6 * 1.7) / (2 * c) ** 2  # of exp(−2δ)
    error = 2 * math.sqrt((square / mean**2 - 1) / n)  # relative, of mean⁻²
    estimate = determinant(DetSAM(n=n, half_width=c), c, problem)
    assert abs(estimate / (0.6 * 1.7) - 1) < 4 * error


@pytest.mark.parametrize("sigma", [-0.5, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_s3_table_1_row_4_product(sigma, seed):
    n, problem = 400, Quadratic(spread(-0.5, 1.5, 4), seed)
    expected = float((1 - sigma * problem.eigenvalues).prod())
    square = float((1 - 2 * sigma * problem.eigenvalues).prod()) ** -0.5
    error = 2 * math.sqrt((square * expected - 1) / n)  # relative, of mean⁻² with mean = expected^(-1/2)
    general = UniversalSAM(lambda t: t**-2.0, lambda t: torch.exp(sigma * t), steppe.methods.universal.normal, 0.1, n)
    for method in (ProductSAM(rho=0.1, n=n, sigma=sigma), general):
        estimate = sharpness(method, problem, problem.minimum, seed)
        assert abs(estimate / expected - 1) < 4 * error


def power_mean(sigma: float, delta: Tensor) -> Tensor:
    return torch.exp(sigma * delta).mean() ** -2


AWARE = {
    "frobenius": (None, lambda delta: frobenius(delta.mean(), delta.square().mean())),
    "trace": (TraceSAM, torch.mean),
    "frob": (FrobSAM, lambda delta: 2 * delta.var()),
    "det": (DetSAM, partial(power_mean, -1.0)),
    "product": (partial(ProductSAM, sigma=0.1), partial(power_mean, 0.1)),
}


@pytest.mark.parametrize("rho", [0.3, 0.05])
@pytest.mark.parametrize("name", AWARE)
def test_s3_definition_8_the_direction_is_the_gradient_of_the_sharpness_aware_loss(name, rho, monkeypatch):
    """d = ∇(L + λρ²R_ρ), for fixed draws: the general form with two functions ψ, and every member."""
    problem, points, w = Smooth(lambda w: (torch.tanh(w) ** 2).sum() + w.prod()), gaussian(2), randn(2)
    member, regularizer = AWARE[name]
    if member is None:
        method = universal_frobenius(points, rho=rho, lam=0.3)
    else:
        method = member(rho=rho, n=len(points), lam=0.3)
        monkeypatch.setattr(type(method), "samplers", lambda self: [Listed(points)])

    def aware(w: Tensor) -> Tensor:
        delta = torch.stack([problem.loss(w + rho * v) - problem.loss(w) for v in points]) / rho**2
        return problem.loss(w) + 0.3 * rho**2 * regularizer(delta)

    torch.testing.assert_close(observed(method, problem, w)[0], grad(aware)(w), rtol=1e-9, atol=1e-11)


EXAMPLE_2 = Smooth(lambda x: x[0] ** 2 * x[1] ** 2 - 2 * x[0] * x[1] + 1)  # zero where x₁x₂ = 1
MEASURES = {
    "trace": (lambda rho: UniversalSAM(mu=Listed(circle()), rho=rho, n=8), lambda H: H.trace() / 4),
    "frobenius": (lambda rho: universal_frobenius(gaussian(2), rho=rho), lambda H: H.square().sum()),
}


@pytest.mark.parametrize("name", MEASURES)
def test_s3_theorem_9_explicit_bias(name):
    """The minimum u of L + ρ²R_ρ has L(u) = o(ρ²) and the least sharpness of the zero-loss manifold, up to o(1).

    On Example 2's manifold x₁x₂ = 1 both measures are least at (1, 1). Also (eq. 26) a point of the manifold with
    optimality gap Δρ² is Δ sharper than that, up to o(1). All errors fall by four when ρ is halved.
    """
    method, measure = MEASURES[name]
    least = float(measure(EXAMPLE_2.hessian(torch.ones(2, dtype=DOUBLE))))

    def aware(x: Tensor, rho: float) -> float:
        return float(EXAMPLE_2.loss(x)) + rho**2 * sharpness(method(rho), EXAMPLE_2, x)

    errors = []
    for rho in (0.04, 0.02):
        u, h = torch.tensor([1.0, 0.999], dtype=DOUBLE), 1e-5
        direction = lambda x, rho=rho: observed(method(rho), EXAMPLE_2, x)[0]  # noqa: E731
        for _ in range(12):  # Newton's method on the library's direction
            columns = [(direction(u + h * e) - direction(u - h * e)) / (2 * h) for e in torch.eye(2, dtype=DOUBLE)]
            u = u - torch.linalg.solve(torch.stack(columns, dim=1), direction(u))
        assert direction(u).norm() < 1e-12
        assert torch.linalg.eigvalsh(torch.stack(columns, dim=1))[0] > 0  # a minimum
        excess = float(measure(EXAMPLE_2.hessian(u))) - least
        elsewhere = []
        for k in (1.2, 1.5, 2.0):
            x = torch.tensor([k, 1 / k], dtype=DOUBLE)
            gap = (aware(x, rho) - aware(u, rho)) / rho**2
            elsewhere.append(float(measure(EXAMPLE_2.hessian(x))) - least - gap)
            assert gap > 0.05
        errors.append([float(EXAMPLE_2.loss(u)) / rho**2, excess, *elsewhere])
    for coarse, fine in zip(*errors, strict=True):
        assert coarse / fine == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_s3_theorem_10_the_determinant_is_scale_invariant(seed, monkeypatch):
    """S(x) = S(Dx) with det D = 1 for the Lebesgue measure (Det-SAM on a large cube), not for the sphere."""
    points = grid(6.5, 16)
    monkeypatch.setattr(DetSAM, "samplers", lambda self: [Listed(points)])
    k = float(torch.rand((), generator=torch.Generator().manual_seed(seed))) * 0.2 + 1.1
    x = torch.tensor([0.85, 0.75], dtype=DOUBLE)
    values = {}
    for place in (x, x * torch.tensor([k, 1 / k], dtype=DOUBLE)):
        H = EXAMPLE_2.hessian(place)
        taylor = Smooth(lambda v, H=H: 0.5 * v @ H @ v)
        zero = torch.zeros(2, dtype=DOUBLE)
        values.setdefault("loss", []).append(float(EXAMPLE_2.loss(place)))
        values.setdefault("det", []).append(sharpness(DetSAM(n=len(points)), taylor, zero))
        values.setdefault("trace", []).append(sharpness(UniversalSAM(mu=Listed(circle()), rho=1.0, n=8), taylor, zero))
    assert values["loss"][0] == pytest.approx(values["loss"][1], rel=1e-12)
    assert values["det"][0] == pytest.approx(values["det"][1], rel=3e-4)
    # Example 2: half the trace is x₁² + x₂², before and after.
    expected = [0.85**2 + 0.75**2, (0.85 * k) ** 2 + (0.75 / k) ** 2]
    assert [2 * t for t in values["trace"]] == pytest.approx(expected, rel=1e-9)
    assert abs(expected[0] - expected[1]) > 0.02


@pytest.mark.parametrize("seed", range(4))
def test_s3_theorem_11_an_invariant_measure_gives_an_invariant_sharpness(seed):
    """L depends on ‖x‖: rotations change neither trace nor Frobenius norm; the cube's measure they do change."""
    problem = Smooth(lambda x: torch.sin(x.square().sum()))
    rotation, x = torch.linalg.qr(randn(2, 2, seed=seed)).Q, torch.tensor([0.8, 0.1], dtype=DOUBLE)
    swap = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=DOUBLE)

    def cube(rho: float) -> UniversalSAM:
        points = grid(1.0, 10)
        return UniversalSAM(identity, torch.square, Listed(points), rho, len(points))

    def measures(at: Tensor, method) -> float:
        H = problem.hessian(at)
        return sharpness(method(1.0), Smooth(lambda v: 0.5 * v @ H @ v), torch.zeros(2, dtype=DOUBLE))

    for method in (MEASURES["trace"][0], MEASURES["frobenius"][0]):
        assert measures(x, method) == pytest.approx(measures(rotation @ x, method), rel=1e-12)
    assert measures(x, cube) == pytest.approx(measures(swap @ x, cube), rel=1e-12)  # the cube's own symmetries
    assert measures(x, cube) != pytest.approx(measures(rotation @ x, cube), rel=1e-3)


@pytest.mark.parametrize("published", [False, True])
def test_s3_frob_sam_away_from_a_critical_point_penalises_the_gradient_norm(published, monkeypatch):
    """(d − g)/λ → 4Hg, the gradient of 2‖g‖² (Hg in published code, which leaves out the 4), with an error of order ρ².

    Only where g = 0 is the Frobenius norm seen: there (d − g)/λρ² → ∇‖H‖²_F + 2H∇tr(H), whose second term is
    orthogonal to the directions in which the minimum is flat.
    """
    points = gaussian(4)
    monkeypatch.setattr(FrobSAM, "samplers", lambda self: [Listed(points)])
    unbiased = len(points) / (len(points) - 1)
    factor = (1 if published else 4) * unbiased
    a = randn(3, 4, seed=2)
    problem = Smooth(lambda w: torch.log1p((a @ torch.tanh(w)).square()).sum())
    critical = torch.zeros(4, dtype=DOUBLE)
    shifted = Smooth(lambda w: problem.loss(w) + (w[0] * w[1] * w[2]) + 0.3 * w[3] ** 3 + w[0] ** 2 * w[3])
    for target, function, w, power in (("Hg", problem, randn(4, seed=1), 0), ("frobenius", shifted, critical, 2)):
        g, H = function.grad(w), function.hessian(w)
        if target == "Hg":
            expected = H @ g
        else:
            trace = grad(lambda w: shifted.hessian(w).trace())
            expected = (grad(lambda w: shifted.hessian(w).square().sum())(w) + 2 * H @ trace(w)) / 4
        assert expected.norm() > 0.1 and (g.norm() > 0.1) == (target == "Hg")
        errors = []
        for rho in (0.02, 0.01):
            method = FrobSAM(rho=rho, n=len(points), lam=0.1, published=published)
            penalty = (observed(method, function, w)[0] - g) / (0.1 * factor * rho**power)
            errors.append(float((penalty - expected).norm() / expected.norm()))
        assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
        assert errors[1] < 0.02


# S4: smoothness-adaptive SAM


def learning_rates(method: steppe.Method, loss, w: Tensor, lr: float, steps: int) -> list[float]:
    param = nn.Parameter(w.clone())
    opt = steppe.SharpnessAware(SGD([param], lr=lr), method)
    rates = []
    for step in range(steps):
        opt.step(lambda step=step: loss(param, step))
        rates.append(float(opt.metrics["eta"]))
        torch.testing.assert_close(opt.param_groups[0]["lr"], rates[-1], rtol=0, atol=0, equal_nan=True)
    return rates


@pytest.mark.parametrize("method", [SASAM(), SASAM(delta=1.0), SASGD(delta=1.0)], ids=["sam", "delta-1", "sgd"])
@pytest.mark.parametrize("lr", [1e-4, 0.3])
def test_s4_the_step_is_never_shorter_than_half_the_inverse_smoothness(method, lr):
    """η_t >= 1/2β for t >= 1: on a quadratic, and on softmax regression of digits with a new batch each step.

    (The document says 1/β; its eq. 5 has a factor 2.) β is a bound for every batch: for softmax, ½λ_max(XᵀX)/n.
    """
    problem = Quadratic(spread(0.05, 4.0, 8))
    rates = learning_rates(method, lambda w, step: problem.loss(w), problem.minimum + 5 * randn(8, seed=3), lr, 25)
    assert min(rates[1:]) >= (1 - 1e-9) / (2 * 4.0)

    stream = list(problems.batches(60))[:25]
    beta = max(0.5 * torch.linalg.matrix_norm(x, 2) ** 2 / len(x) for x, _ in stream)
    w = 0.1 * randn(640, seed=4)
    loss = lambda w, step: nn.functional.cross_entropy(stream[step][0] @ w.view(64, 10), stream[step][1])  # noqa: E731
    rates = learning_rates(method, loss, w, lr, 25)
    assert min(rates[1:]) >= float((1 - 1e-9) / (2 * beta))


@pytest.mark.parametrize("method", [SASAM(delta=1.0), SASGD(delta=1.0)], ids=["sam", "sgd"])
def test_s4_the_step_can_exceed_the_inverse_smoothness(method):
    """It follows the smoothness along the path, here that of the flattest direction: η = 1/2λ_min > 2/β."""
    problem = Quadratic(torch.tensor([0.1, 1.0, 1.0], dtype=DOUBLE))
    start = problem.minimum + 10 * problem.basis[:, 0]
    rates = learning_rates(method, lambda w, step: problem.loss(w), start, 0.01, 4)
    assert rates[1:] == pytest.approx([1 / (2 * 0.1)] * 3, rel=1e-6)


@pytest.mark.parametrize("method", [SASAM(), SASGD()], ids=["sam", "sgd"])
def test_s4_a_batch_without_a_gradient_does_not_end_the_training(method):
    """Where neither weights nor gradient changed, local smoothness is unknown: the second bound of eq. 5 counts."""
    problem = Quadratic(spread(0.5, 2.0, 3))
    start = problem.minimum + randn(3, seed=8)
    rates = learning_rates(method, lambda w, step: problem.loss(w) * (step != 3), start, 0.01, 8)
    assert min(rates[1:]) >= (1 - 1e-9) / (2 * 2.0)


# ASAM


@pytest.mark.parametrize("c", [0.01, 3.0, 100.0])
def test_asam_does_not_see_how_layers_are_scaled(c):
    """Kwon et al., Theorem 1: all through training, a rescaled ReLU net has the same perturbed loss; SAM's differs."""
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)).to(DOUBLE)
    torch.manual_seed(0)
    for layer in (model[0], model[2]):
        layer.reset_parameters()
    opt = steppe.SharpnessAware(SGD(model.parameters(), lr=0.5), ASAM(rho=0.5, eta=0.0), model)
    gaps: dict[str, list] = {"asam": [], "asam rescaled": [], "sam": [], "sam rescaled": []}
    for data in problems.steps(8):
        rescaled = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)).to(DOUBLE)
        with torch.no_grad():
            for name, factor in (("0.weight", c), ("0.bias", c), ("2.weight", 1 / c), ("2.bias", 1.0)):
                rescaled.get_parameter(name).copy_(factor * model.get_parameter(name))
            torch.testing.assert_close(rescaled(data.main[0]), model(data.main[0]))
        for net, name in ((model, ""), (rescaled, " rescaled")):
            for key, method in (("asam", ASAM(rho=0.5, eta=0.0)), ("sam", SAM(rho=0.05))):
                look = still(net, method)
                look.step(**data.closures(net))
                gaps[key + name].append(look.metrics["surrogate_gap"])
        model.zero_grad()
        opt.step(**data.closures(model))
    values = {key: torch.stack(value) for key, value in gaps.items()}
    torch.testing.assert_close(values["asam rescaled"], values["asam"], rtol=1e-6, atol=0)
    assert ((values["sam rescaled"] / values["sam"] - 1).abs() > 0.1).all()
