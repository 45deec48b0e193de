"""The universal class (S3): its table of measures, and its theorems.

Where a theorem holds in a limit, the rate at which it is approached is tested, not that a number is small.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.func import grad

import steppe
from helpers.worlds import DOUBLE, Quadratic, Smooth, observed, randn, spread
from steppe import DetSAM, FrobSAM, ProductSAM, TraceSAM, UniversalSAM
from steppe.engine.random_vectors import Draws
from steppe.vector import Vector


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
        columns: list[Tensor] = []
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
