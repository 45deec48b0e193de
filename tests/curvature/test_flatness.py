"""The papers' lemmas on a tiny trained net, and flatness on functions whose maxima are known."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.curvature_problems import digits, mlp
from steppe.curvature import (
    Estimate,
    Hessian,
    Measure,
    Objective,
    difference,
    eigenvalues,
    extrema,
    first_order,
    sharpness,
    surrogate_gap,
    transformed,
    zeroth_order,
)
from steppe.curvature.random_rows import cube, gaussian, sphere


class Decayed(nn.Module):
    """A net whose loss includes weight decay, so that it has a strict minimum that L-BFGS can reach."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), torch.stack([p.square().sum() for p in self.net.parameters()]).sum()


def decayed_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output[0], target) + 3e-3 * output[1]


@pytest.fixture(scope="module")
def minimum() -> Objective:
    """Trained on digits modulo 3 until the gradient is 1e-7."""
    torch.manual_seed(0)
    x, y = digits(60, side=4)
    target = F.one_hot(y % 3, 3).double()
    model = Decayed().double()
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=4000, max_eval=8000, tolerance_grad=1e-10, tolerance_change=1e-18,
        history_size=40, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = decayed_loss(model(x), target)
        loss.backward()
        return loss

    optimizer.step(closure)
    model.zero_grad()
    objective = Objective(model, decayed_loss, (x, target))
    assert float(objective.gradient()[1].norm()) < 1e-6
    assert float(eigenvalues(Hessian(objective), which="bottom").values[0]) > 0
    return objective


@pytest.fixture(scope="module")
def halfway() -> Objective:
    """Not at a minimum: a few steps of training, so that the gradient matters and the Hessian is indefinite."""
    torch.manual_seed(1)
    x, y = digits(60, side=4)
    model = mlp(5).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(15):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.zero_grad()
    return Objective(model, F.cross_entropy, (x, y))


@pytest.mark.slow
def test_surrogate_gap_lemma(minimum):
    """At a minimum 2h/ρ² tends to λ_max as ρ does to 0, h the maximum over the ball (S1 Lemma 3.3)."""
    top = float(eigenvalues(Hessian(minimum), rtol=1e-8).values[0])
    errors = [abs(zeroth_order(minimum, rho).curvature / top - 1) for rho in (1e-1, 1e-2, 1e-3)]
    assert errors[2] < 1e-3
    assert errors[2] < errors[1] / 5 < errors[0] / 25  # first order in ρ


def test_first_order_flatness_lemma(minimum):
    """At a minimum R⁽¹⁾/ρ² tends to λ_max (S2 Lemma 4.1)."""
    top = float(eigenvalues(Hessian(minimum), rtol=1e-8).values[0])
    errors = [abs(first_order(minimum, rho).curvature / top - 1) for rho in (1e-1, 1e-2, 1e-3)]
    assert errors[2] < 1e-3
    assert errors[2] < errors[1] / 5 < errors[0] / 25


@pytest.mark.slow
@pytest.mark.parametrize("rho", [0.01, 0.1, 0.5, 2.0])
@pytest.mark.parametrize("adaptive", [False, True])
def test_first_order_bounds_zeroth_order(minimum, halfway, rho, adaptive):
    """R⁽¹⁾ ≥ R⁽⁰⁾ everywhere (S2 Proposition 4.2)."""
    for objective in (minimum, halfway):
        zeroth, first = (f(objective, rho, adaptive=adaptive).value for f in (zeroth_order, first_order))
        assert first >= zeroth * (1 - 1e-9)


def test_lower_bounds_are_lower_bounds_and_near_the_grid_maximum():
    """Two weights: the maximum over the disc can be found by trying everything."""
    model = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.3, -0.2]]))
    x, y = digits(30, side=4)
    data = x.flatten(1)[:, 5:7].contiguous(), (y % 2).double().unsqueeze(1)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (torch.sin(3 * output) - target).square().mean()

    objective, rho = Objective(model, loss, data), 0.8
    angles = torch.linspace(0, 2 * math.pi, 181, dtype=torch.float64)
    here = float(objective.loss())
    best_loss = best_slope = 0.0
    for radius in (0.2, 0.4, 0.6, 0.8):
        for angle in angles.tolist():
            offset = objective.vector(torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64) * radius)
            there, gradient = objective.gradient(offset)
            best_loss, best_slope = max(best_loss, float(there) - here), max(best_slope, float(gradient.norm()))
    zeroth, first = zeroth_order(objective, rho, restarts=6), first_order(objective, rho, restarts=6)
    assert zeroth.value == pytest.approx(best_loss, rel=2e-3)
    assert first.value == pytest.approx(rho * best_slope, rel=2e-2)
    assert zeroth.offset is not None and float(zeroth.offset.norm()) <= rho * (1 + 1e-9)
    assert float(objective.loss(zeroth.offset)) - here == pytest.approx(zeroth.value, rel=1e-12)
    assert zeroth.spread >= 0 and zeroth.value == max(zeroth.starts.values())


def test_surrogate_gap_is_two_losses_and_a_cosine(halfway):
    found = surrogate_gap(halfway, 0.1)
    loss, gradient = halfway.gradient()
    there, gradient_there = halfway.gradient(0.1 * gradient / gradient.norm())
    assert found.gap == pytest.approx(float(there - loss), rel=1e-9)
    assert found.sharpness == pytest.approx(2 * found.gap / 0.01, rel=1e-12)
    cosine = float(gradient @ gradient_there / gradient.norm() / gradient_there.norm())
    assert found.cosine == pytest.approx(cosine, rel=1e-9)
    assert found.gap <= zeroth_order(halfway, 0.1).value + 1e-12


def test_adaptive_measures_do_not_change_when_layers_are_rescaled():
    torch.manual_seed(2)
    x, y = digits(40, side=4)

    def net() -> nn.Sequential:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(16, 5, bias=False), nn.ReLU(), nn.Linear(5, 10, bias=False)
        ).double()

    model, rescaled = net(), net()
    rescaled.load_state_dict(model.state_dict())
    with torch.no_grad():
        rescaled.get_parameter("1.weight").mul_(4.0)
        rescaled.get_parameter("3.weight").div_(4.0)
    one, other = (Objective(m, F.cross_entropy, (x, y)) for m in (model, rescaled))
    assert float(one.loss()) == pytest.approx(float(other.loss()), rel=1e-12)
    options = {"adaptive": True, "eta": 0.0}
    for measure in (zeroth_order, first_order):
        assert measure(one, 0.1, **options).value == pytest.approx(measure(other, 0.1, **options).value, rel=1e-5)
    assert surrogate_gap(one, 0.1, **options).gap == pytest.approx(surrogate_gap(other, 0.1, **options).gap, rel=1e-9)
    assert zeroth_order(one, 0.1).value != pytest.approx(zeroth_order(other, 0.1).value, rel=0.05)


# (φ, ψ, μ)-sharpness


def known(objective: Objective) -> Tensor:
    return torch.linalg.eigvalsh(Hessian(objective).dense())


def within(found: Estimate, truth: float, errors: float = 4.0) -> bool:
    return abs(found.value - truth) <= errors * found.standard_error


@pytest.mark.slow
def test_table_1_on_a_trained_net(minimum):
    """Every row of S3 Table 1 by products with the Hessian of a trained net."""
    values = known(minimum)
    H = Hessian(minimum)
    found = sharpness(H, Measure.trace(), samples=400)
    assert within(found, float(values.sum()) / (2 * len(values))) and found.standard_error < 0.1 * abs(found.value)
    found = sharpness(H, Measure.frobenius(), samples=2000)
    assert within(found, float(values.square().sum())) and found.standard_error < 0.2 * found.value
    sigma = 0.3 / float(values.max())
    found = sharpness(H, Measure.log_product(sigma), samples=2000)
    assert within(found, float((1 - sigma * values).log().sum())) and found.standard_error < 0.1 * abs(found.value)


def test_the_determinant_row():
    """In few dimensions the cube can hold the Gaussian, and the integral is the determinant."""
    A = torch.diag(torch.tensor([2.0, 0.5], dtype=torch.float64))
    found = sharpness(A, Measure.log_determinant(2, half_width=5.0), samples=6000)
    assert within(found, math.log(1.0)) and found.standard_error < 0.1


def test_the_determinant_is_invariant_under_a_rescaling_that_changes_the_trace():
    """S3 Example 2: L = (x₁x₂ − 1)² at (k, 1/k). The Hessian has determinant 0 on the manifold, so look beside it."""

    def hessian(k: float) -> Tensor:
        a, b = 1.5 * k, 1.0 / k  # off the manifold, on one orbit of the rescaling
        return torch.tensor([[2 * b * b, 4 * a * b - 2], [4 * a * b - 2, 2 * a * a]], dtype=torch.float64)

    plain, stretched = hessian(1.0), hessian(3.0)
    assert float(torch.linalg.det(plain)) == pytest.approx(float(torch.linalg.det(stretched)), rel=1e-12)
    assert abs(float(plain.trace() - stretched.trace())) > 10
    # A measure that the rescaling leaves alone gives the same sharpness: v₁ ↦ kv₁, v₂ ↦ v₂/k.
    stretch = torch.tensor([3.0, 1 / 3.0], dtype=torch.float64)
    draws = Measure(lambda t: t, lambda t: torch.exp(-t.abs()), gaussian)
    moved = Measure(draws.phi, draws.psi, lambda c, n, g: gaussian(c, n, g) * stretch)
    here, there = sharpness(plain, draws, samples=50), sharpness(stretched, moved, samples=50)
    assert here.value == pytest.approx(there.value, rel=1e-10)


def test_by_losses_tends_to_by_products(minimum):
    by_products = sharpness(minimum, Measure.trace(), samples=60)
    differences = []
    for rho in (0.1, 0.01):
        by_losses = sharpness(minimum, Measure.trace(), by="losses", rho=rho, samples=60)
        differences.append(abs(by_losses.value - by_products.value))  # the same vectors: only the expansion differs
    assert differences[1] < 1e-2 * by_products.value and differences[1] < differences[0] / 20


def test_antithetic_pairs_cancel_the_gradient(halfway):
    paired = sharpness(halfway, Measure.trace(), by="losses", rho=1e-3, samples=30)
    single = sharpness(halfway, Measure.trace(), by="losses", rho=1e-3, samples=30, antithetic=False)
    assert paired.standard_error < single.standard_error / 20
    assert within(paired, float(known(halfway).sum()) / (2 * halfway.size))


@pytest.mark.slow
def test_antithetic_pairs_leave_the_gradient_in_a_squared_measure():
    """The loss ½‖w‖² + gᵀw at w = 0: the Frobenius measure by losses is ‖H‖²_F + 2‖g‖²/ρ²."""
    slope, rho = torch.linspace(-1, 1, 10, dtype=torch.float64), 0.5
    model = nn.Linear(10, 1, bias=False).double()
    nn.init.zeros_(model.weight)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output[:10].square().sum() / 2 + output[10:].sum()

    x = torch.cat([torch.eye(10, dtype=torch.float64), slope.unsqueeze(0)])
    objective = Objective(model, loss, (x, torch.zeros(11, dtype=torch.float64)))
    found = sharpness(objective, Measure.frobenius(), by="losses", rho=rho, samples=2000)
    assert within(found, 10 + 2 * float(slope @ slope) / rho**2)
    assert within(sharpness(objective, Measure.frobenius(), samples=2000), 10.0)


def test_common_random_numbers_across_models(halfway):
    A = Hessian(halfway).dense()
    B = 1.01 * A
    a, b = (sharpness(M, Measure.frobenius(), samples=50) for M in (A, B))
    change = difference(b, a)
    assert change.method == "paired"
    assert change.standard_error < 0.05 * math.hypot(a.standard_error, b.standard_error)


def test_the_jackknife_takes_the_bias_out():
    """φ(mean) of Frobenius is biased by −2Var/n; over many seeds the jackknifed estimate is not."""
    A = torch.diag(torch.linspace(0.1, 1.0, 12, dtype=torch.float64))
    truth = float(A.square().sum())
    found = [sharpness(A, Measure.frobenius(), samples=6, seed=seed).value for seed in range(300)]
    mean = sum(found) / len(found)
    spread = math.sqrt(sum((f - mean) ** 2 for f in found) / (len(found) - 1) / len(found))
    assert abs(mean - truth) < 3 * spread
    assert spread < 0.05 * truth  # the bias without it, a sixth of the truth, would be seen


def test_the_measures_that_are_drawn_from():
    generator = torch.Generator().manual_seed(0)
    assert torch.allclose(sphere(5, 7, generator).norm(dim=1), torch.ones(5, dtype=torch.float64))
    inside = cube(0.25)(100, 3, generator)
    assert float(inside.abs().max()) <= 0.25 and float(inside.min()) < -0.2 and float(inside.max()) > 0.2
    two = Measure(lambda a, b: a - b, lambda t: (t, t), (gaussian, gaussian))
    apart = sharpness(torch.eye(3, dtype=torch.float64), two, samples=10)
    assert apart.value != 0  # drawn independently


# Local minima and P(λ)


def test_local_minima_of_a_known_curve():
    """|w| alone matters: along every direction the loss is the same wave, with known turns."""

    class Radius(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(6, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w.square().sum() + 1e-30).sqrt() * torch.ones_like(x)

    wave = Objective(Radius(), lambda r, _: torch.cos(2 * math.pi * r / 0.4).mean(), (torch.ones(1), torch.ones(1)))
    found = extrema(wave, directions=7, steps=20, step=0.05)  # one unit: turns at 0.2, 0.4, 0.6, 0.8
    assert found.minima.tolist() == [2] * 7
    assert found.maxima.tolist() == [2] * 7
    assert found.losses.shape == (7, 21)


def test_rounding_is_not_counted_as_minima(minimum):
    found = extrema(minimum, directions=10, steps=10, step=1e-9)
    assert int(found.minima.sum()) == int(found.maxima.sum()) == 0


def test_transformed_is_what_perturbed_gradient_descent_sees():
    """On a quadratic, the gradient at w + Σγₜ Hᵗ⁻¹g is (H + Σγₜ H^{t+1})(w − w*): eigenvalue λ acts as P(λ)."""
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    H, w, gamma = root @ root.T, torch.ones(5, dtype=torch.float64), torch.tensor([0.3, -0.05], dtype=torch.float64)
    perturbed = w + gamma[0] * (H @ w) + gamma[1] * (H @ H @ w)
    values, vectors = torch.linalg.eigh(H)
    assert torch.allclose(H @ perturbed, vectors @ (transformed(values, gamma) * (vectors.T @ w)))
    assert torch.equal(transformed(values, gamma[:0]), values)


@pytest.mark.parametrize("scale", [1e-30, 1e-8])
def test_flatness_scales_with_the_loss_in_float32(scale):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    data = torch.randn(20, 3), torch.randn(20, 1)
    one = Objective(model, F.mse_loss, data)
    scaled = Objective(model, lambda a, b: F.mse_loss(a, b) * scale, data)
    a, b = surrogate_gap(one, 0.05), surrogate_gap(scaled, 0.05)
    assert b.gap == pytest.approx(scale * a.gap, rel=1e-4)
    assert b.gradient_norm == pytest.approx(scale * a.gradient_norm, rel=1e-5)
    assert b.cosine == pytest.approx(a.cosine, rel=1e-5)
    for measure in (zeroth_order, first_order):
        assert measure(scaled, 0.05).value == pytest.approx(scale * measure(one, 0.05).value, rel=1e-4)
