"""Eigenvalues, trace, Frobenius norm, density and log-determinant against dense matrices."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse.linalg
import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.curvature_problems import digits, mlp
from steppe.curvature import Estimate, Hessian, Krylov, difference, eigenvalues, frobenius_squared, spectrum, trace
from steppe.curvature.random_rows import signs
from steppe.support.student import closed_form, t_quantile

SEEDS = range(90_000, 90_200)  # not those that the estimators' constants were chosen with


def symmetric(values: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))[0]
    return (q * values) @ q.T


# Krylov


@pytest.mark.parametrize("block", [1, 3, 7])
def test_the_basis_is_orthonormal_and_the_projection_is_the_matrix_in_it(all_problems, block):
    A = all_problems[0][1]
    run = Krylov(A, block=block)
    run.extend(50)
    Q = run.basis
    assert torch.allclose(Q @ Q.T, torch.eye(len(Q), dtype=torch.float64), atol=1e-13)
    assert torch.allclose(Q @ A @ Q.T, run.projection, atol=1e-13)
    assert torch.allclose(A @ Q.T, Q.T @ run.projection + run.next_block.T @ run.coupling, atol=1e-13)
    assert torch.allclose(Q[:block].T @ run.corner, run.start, atol=1e-12)
    assert run.matvecs == run.dimension


def test_residuals_are_those_of_the_ritz_pairs(all_problems):
    A = all_problems[0][1]
    run = Krylov(A, block=2)
    run.extend(12)
    ritz = run.ritz()
    U = run.vectors(ritz.coordinates)
    assert torch.allclose((A @ U - U * ritz.values).norm(dim=0), ritz.residuals, atol=1e-12)


def test_a_whole_basis_has_all_eigenvalues(all_problems, index):
    A = all_problems[index][1]
    run = Krylov(A, block=3)
    run.extend(len(A))
    assert run.complete
    assert torch.allclose(run.ritz().values, torch.linalg.eigvalsh(A).flip(0), atol=1e-11 * float(A.norm()))


def test_a_saved_run_goes_on_as_if_it_had_not_stopped(all_problems, tmp_path):
    A = all_problems[5][1]
    path = tmp_path / "run.pt"
    unbroken = Krylov(A, block=2, seed=3)
    unbroken.extend(30)
    first = Krylov(A, block=2, seed=3, checkpoint=path)
    first.extend(14)
    resumed = Krylov(A, block=2, seed=3, checkpoint=path)
    assert resumed.dimension == 14
    resumed.extend(30)
    assert torch.equal(resumed.projection, unbroken.projection)
    assert torch.equal(resumed.basis, unbroken.basis)
    with pytest.raises(ValueError, match="another measurement"):
        Krylov(A, block=2, seed=4, checkpoint=path)


def test_a_checkpoint_of_other_weights_is_refused(tmp_path):
    torch.manual_seed(0)
    data = digits(20, side=4)
    Krylov(Hessian(mlp(4), F.cross_entropy, data), checkpoint=tmp_path / "run.pt").extend(4)
    with pytest.raises(ValueError, match="another measurement"):
        Krylov(Hessian(mlp(4), F.cross_entropy, data), checkpoint=tmp_path / "run.pt")


# Eigenvalues


@pytest.mark.parametrize("which", ["top", "bottom", "magnitude"])
@pytest.mark.parametrize("k", [1, 5])
def test_eigenvalues_to_the_requested_tolerance(all_problems, index, which, k):
    A = all_problems[index][1]
    truth = torch.linalg.eigvalsh(A)
    order = truth.abs().argsort(descending=True) if which == "magnitude" else truth.argsort(descending=which == "top")
    truth = truth[order][:k]
    if float(truth.abs().min()) < 1e-12:
        pytest.skip("a tolerance relative to zero")
    for seed in range(5):
        found = eigenvalues(A, k, which=which, rtol=1e-4, seed=seed)
        assert bool(found.converged.all())
        assert bool(((found.values - truth).abs() <= 1e-4 * truth.abs()).all())
        assert bool(((found.values - truth).abs() <= found.errors + 2e-15 * float(A.norm())).all())
        residuals = (A @ found.vectors - found.vectors * found.values).norm(dim=0)
        assert torch.allclose(residuals, found.residuals, atol=1e-10)


def test_eigenvalues_of_the_operator_itself(all_problems, index):
    problem, A = all_problems[index]
    H = Hessian(problem.model, problem.loss_fn, problem.batches, mode=problem.mode)
    found = eigenvalues(H, 3, rtol=1e-6)
    assert torch.allclose(found.values, torch.linalg.eigvalsh(A).flip(0)[:3], rtol=1e-6)
    assert found.matvecs == H.matvecs


def test_scipy_agrees(all_problems, index):
    problem = all_problems[index][0]
    H = Hessian(problem.model, problem.loss_fn, problem.batches, mode=problem.mode)
    n = H.shape[0]
    as_scipy = scipy.sparse.linalg.LinearOperator(
        (n, n), matvec=lambda v: (H @ torch.from_numpy(np.ascontiguousarray(v).reshape(-1))).numpy(), dtype=np.float64
    )
    theirs = scipy.sparse.linalg.eigsh(as_scipy, k=3, which="LA", v0=np.ones(n), return_eigenvectors=False)
    ours = eigenvalues(H, 3, rtol=1e-8).values
    assert np.allclose(np.sort(theirs)[::-1], ours.numpy(), rtol=1e-7)


def test_curvlinops_agrees(all_problems):
    curvlinops = pytest.importorskip("curvlinops", reason="curvlinops is not installed")
    problem, A = all_problems[1]
    params = list(problem.model.parameters())
    theirs = curvlinops.HessianLinearOperator(problem.model, torch.nn.CrossEntropyLoss(), params, problem.batches)
    ours = Hessian(problem.model, problem.loss_fn, problem.batches)
    v = torch.linspace(-1, 1, len(A), dtype=torch.float64)
    assert torch.allclose(theirs @ v, ours @ v, atol=1e-12)


def test_repeated_eigenvalues_are_found_as_often_as_they_occur():
    values = torch.cat([torch.tensor([5.0, 5.0, 5.0, 4.0]), torch.linspace(-1, 1, 60)]).double()
    A = symmetric(values)
    for seed in range(10):
        assert torch.allclose(eigenvalues(A, 5, seed=seed).values, values.sort(descending=True).values[:5], rtol=1e-3)


def test_a_short_memory_restarts_and_still_converges():
    A = symmetric(torch.logspace(0, -3, 200, dtype=torch.float64))
    run = Krylov(A, max_basis=24)
    found = eigenvalues(run, 4, rtol=1e-6, max_matvecs=2000)
    assert run.restarts > 0 and run.dimension <= 24
    assert torch.allclose(found.values, torch.logspace(0, -3, 200, dtype=torch.float64)[:4], rtol=1e-6)
    assert bool(found.converged.all())


def extremes(values: Tensor, which: str, k: int) -> Tensor:
    order = {"top": -values, "bottom": values, "magnitude": -values.abs()}[which].argsort()
    return values[order[:k]]


@pytest.mark.parametrize("which", ["top", "bottom", "magnitude"])
@pytest.mark.parametrize(("k", "max_basis"), [(1, 5), (2, 8), (3, 9), (3, 14), (6, 12), (6, 14)])
def test_a_restart_keeps_what_is_looked_for(which, k, max_basis):
    for seed in range(8):
        values = torch.randn(100, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found = eigenvalues(torch.diag(values), k, which=which, max_basis=max_basis, seed=seed)
        assert bool(found.converged.all())
        assert torch.allclose(found.values, extremes(values, which, k), rtol=1e-3)


@pytest.mark.parametrize("block", [1, 3])
def test_a_restarted_run_serves_one_end_after_the_other(block):
    for seed in range(8):
        values = torch.randn(150, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        run = Krylov(torch.diag(values), block=block, seed=seed, max_basis=21)
        for which, k in [("top", 2), ("bottom", 1), ("magnitude", 5), ("top", 6), ("bottom", 6)]:
            found = eigenvalues(run, k, which=which, rtol=1e-6)
            assert bool(found.converged.all())
            assert torch.allclose(found.values, extremes(values, which, k), rtol=1e-6)
            assert run.dimension <= 21
        assert run.restarts > 0
        Q = run.basis
        assert torch.allclose(Q @ Q.T, torch.eye(len(Q), dtype=torch.float64), atol=1e-12)
        assert torch.allclose(values * Q, run.projection.T @ Q + run.coupling.T @ run.next_block, atol=1e-11)


def test_a_basis_that_blocks_do_not_fill_evenly_is_used_as_far_as_it_goes():
    A = symmetric(torch.linspace(-1, 3, 150, dtype=torch.float64))
    run = Krylov(A, block=8, max_basis=30)
    run.extend(30)
    assert run.dimension == 24 and run.restarts == 0
    found = trace(run, rtol=1e-2)
    assert abs(found.value - 150) <= 4 * found.standard_error and run.dimension == 24
    with pytest.raises(ValueError, match="restarted"):
        spectrum(run, dimension=64)


def test_it_says_so_when_the_tolerance_was_not_reached():
    A = symmetric(torch.linspace(0.99, 1, 300, dtype=torch.float64))
    found = eigenvalues(A, 3, rtol=1e-10, max_matvecs=10)
    assert not bool(found.converged.any())
    assert "not converged" in str(found)
    assert not trace(symmetric(torch.linspace(-1, 1, 300).double()), rtol=1e-3, max_matvecs=170, max_basis=16).converged


@pytest.mark.parametrize("number", [0, 2, 4])
def test_a_loose_tolerance_does_not_settle_on_the_second_eigenvalue(all_problems, number):
    A = all_problems[number][1]
    truth = torch.linalg.eigvalsh(A)[-1:]
    for seed in range(100):
        found = eigenvalues(A, rtol=1e-2, seed=seed)
        assert torch.allclose(found.values, truth, rtol=1e-2)
        assert bool((found.residuals <= 1e-3 * truth).all())


def test_random_signs_are_signs_and_the_same_in_any_portions():
    def drawn(*counts: int) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return torch.cat([signs(count, 1001, generator, torch.zeros(1)) for count in counts])

    whole = drawn(40)
    assert whole.shape == (40, 1001) and bool((whole.abs() == 1).all())
    assert torch.equal(whole, drawn(1, 7, 0, 32))
    products = whole @ whole.T / math.sqrt(1001)  # independent rows: standard normal off the diagonal
    off = products[~torch.eye(40, dtype=torch.bool)]
    assert float(off.abs().max()) < 5 and 0.9 < float(off.std()) < 1.1
    assert abs(float(whole.mean())) < 4 / math.sqrt(40 * 1001)


def test_a_warm_start_saves_products():
    values = torch.cat([torch.tensor([3.0, 2.0]), torch.linspace(-1, 1, 200)]).double()
    A = symmetric(values)
    cold = eigenvalues(A)
    nearby = A + 1e-4 * symmetric(torch.linspace(-1, 1, 202).double(), seed=1)
    warm = eigenvalues(nearby, start=cold.vectors)
    assert warm.matvecs < cold.matvecs
    assert float(warm.values[0]) == pytest.approx(float(torch.linalg.eigvalsh(nearby)[-1]), rel=1e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda A: eigenvalues(A, 0), "between 1"),
        (lambda A: eigenvalues(A, 99), "between 1"),
        (lambda A: eigenvalues(A, which="LM"), "which"),
        (lambda A: eigenvalues(A, rtol=0), "rtol"),
        (lambda A: eigenvalues(A, 3, max_basis=4), "max_basis"),
        (lambda A: eigenvalues(A, 3, max_basis=8), "at least 9"),
        (lambda A: trace(A, rtol=-1), "rtol"),
        (lambda A: trace(A, method="guess"), "method"),
        (lambda A: trace(A, max_matvecs=3), "max_matvecs"),
        (lambda A: frobenius_squared(A, method="xtrace"), "method"),
        (lambda A: spectrum(A, probes=1), "probes"),
        (lambda A: spectrum(A).log_det(torch.tensor([0.0])), "positive"),
        (lambda A: Krylov(torch.zeros(2, 3)), "square"),
        (lambda A: Krylov(A, block=0), "block"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.eye(10, dtype=torch.float64))


def test_a_product_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        eigenvalues(torch.full((4, 4), torch.nan))


# Sampling


def test_t_quantiles_are_scipys():
    for degrees in (1, 2, 3, 4, 9, 10, 29, 200):
        for probability in (0.9, 0.975, 0.995):
            exact = scipy.stats.t.ppf(probability, degrees)
            assert closed_form(probability, degrees) == pytest.approx(exact, rel=1e-10)
            assert t_quantile(probability, degrees) == pytest.approx(exact, rel=1e-10)


def calibration(estimates: list[Estimate], truth: float) -> tuple[float, float]:
    """How often the truth is in the 95% interval, and how often within three standard errors."""
    covered = sum(e.low <= truth <= e.high for e in estimates)
    near = sum(abs(e.value - truth) <= 3 * e.standard_error for e in estimates)
    return covered / len(estimates), near / len(estimates)


@pytest.mark.parametrize("measure", ["trace", "frobenius"])
def test_intervals_are_as_wide_as_they_should_be(all_problems, index, measure):
    problem, A = all_problems[index]
    function = trace if measure == "trace" else frobenius_squared
    truth = float(A.trace() if measure == "trace" else A.square().sum())
    # A small basis, so that it never becomes complete: there would be nothing to sample.
    rtol = 1e-2 if len(A) < 300 else 2e-2  # a thousand probes, 200 times, would take a minute
    estimates = [function(A, rtol=rtol, max_basis=min(64, len(A) // 2), seed=seed) for seed in SEEDS]
    assert all(len(e.samples) >= 60 for e in estimates)
    assert all(e.converged == (e.standard_error <= rtol * abs(e.value)) for e in estimates)
    covered, near = calibration(estimates, truth)
    assert near >= 0.99, (problem.name, near)
    assert 0.90 <= covered <= 0.98, (problem.name, covered)


def test_density_moments_are_within_their_errors(all_problems, index):
    problem, A = all_problems[index]
    probes = min(64, len(A) // 3)  # two blocks must not span everything
    found = [spectrum(A, probes=probes, dimension=2 * probes, seed=seed) for seed in SEEDS]
    for power in (1, 2):
        truth = float(torch.linalg.matrix_power(A, power).trace() / len(A))
        covered, near = calibration([s.moment(power) for s in found], truth)
        assert near >= 0.99, (problem.name, power, near)
        assert 0.90 <= covered <= 0.98, (problem.name, power, covered)


def test_skewed_samples_have_hall_s_interval_and_a_wider_error():
    samples = torch.distributions.Exponential(1.0).icdf(torch.linspace(0.005, 0.995, 100, dtype=torch.float64))
    n, mean, raw = 100, float(samples.mean()), float(samples.std()) / 10
    skewness = float(((samples - mean) ** 3).mean()) / float(samples.std()) ** 3

    def transformed(t: float) -> float:  # Hall (1992): this is nearer to a normal variable than t
        a = skewness / math.sqrt(n)
        return t + a * t**2 / 3 + a**2 * t**3 / 27 + a / 6

    def degrees(samples: Tensor) -> int:  # Satterthwaite: s² varies as with so many normal samples
        standard = (samples - samples.mean()) / samples.std()
        return min(int(2 * len(samples) / (float(standard.pow(4).mean()) - 1)), len(samples) - 1)

    assert 10 < degrees(samples) < 40
    found = Estimate.of(samples)
    t95, t3 = (scipy.stats.t.ppf(p, degrees(samples)) for p in (0.975, 0.9995))
    assert transformed((mean - found.low) / raw) == pytest.approx(t95, rel=1e-8)
    assert transformed((mean - found.high) / raw) == pytest.approx(-t95, rel=1e-8)
    assert transformed(-3 * found.standard_error / raw) == pytest.approx(-t3, rel=1e-8)
    assert found.high - mean > mean - found.low
    even = torch.linspace(-1, 3, 200, dtype=torch.float64)  # no skewness, no tails: Student's t
    usual = float(even.std()) / math.sqrt(200)
    assert Estimate.of(even).high - 1 == pytest.approx(scipy.stats.t.ppf(0.975, 199) * usual, rel=1e-6)
    assert Estimate.of(even).standard_error == pytest.approx(scipy.stats.t.ppf(0.9995, 199) * usual / 3, rel=1e-6)


@pytest.mark.parametrize("method", ["hutchinson", "hutch++", "xtrace"])
def test_the_other_trace_methods(all_problems, method):
    A = all_problems[0][1]
    truth = float(A.trace())
    estimates = [trace(A, rtol=3e-2, method=method, seed=seed) for seed in range(50)]
    assert all(e.converged and e.method == method for e in estimates)
    rmse = math.sqrt(sum((e.value - truth) ** 2 for e in estimates) / len(estimates))
    reported = sum(e.standard_error for e in estimates) / len(estimates)
    assert 0.6 <= reported / rmse <= 1.5


def test_hutchinson_is_the_mean_of_its_samples():
    A = symmetric(torch.linspace(-1, 3, 40, dtype=torch.float64))
    found = trace(A, method="hutchinson", rtol=0.05)
    assert found.value == pytest.approx(float(found.samples.mean()), rel=1e-14)
    usual = float(found.samples.std()) / math.sqrt(len(found.samples))
    assert 1.09 * usual <= found.standard_error <= 1.3 * usual  # widened for few and skewed samples
    assert found.matvecs == len(found.samples)


@pytest.mark.parametrize("method", ["krylov", "hutch++", "xtrace"])
def test_low_rank_is_exact(method):
    A = symmetric(torch.cat([torch.tensor([3.0, 2.0, -1.0]), torch.zeros(97)]).double())
    assert trace(A, method=method).value == pytest.approx(4.0, rel=1e-10)


@pytest.mark.parametrize("rank", [1, 40, 59, 60, 61, 80, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_xtrace_of_a_rank_near_the_number_of_probes(rank, dtype):
    A = symmetric(torch.cat([torch.full((rank,), 10.0), torch.zeros(300 - rank)]).double()).to(dtype)
    for seed in range(3):
        found = trace(A, method="xtrace", seed=seed)
        assert found.converged
        # Beyond the first 60 probes it is sampled, or exact once the basis has grown past the rank.
        assert abs(found.value - 10 * rank) <= 3 * found.standard_error + 1e-5 * rank
    if rank < 60 or rank == 80:
        tight = trace(A, method="xtrace", rtol=1e-6)
        assert tight.value == pytest.approx(10 * rank, rel=1e-12 if dtype == torch.float64 else 1e-5)


def test_paired_differences_have_a_smaller_error():
    A = symmetric(torch.linspace(0, 1, 150, dtype=torch.float64))
    B = A + 1e-3 * symmetric(torch.linspace(0, 1, 150, dtype=torch.float64), seed=1)
    options = {"method": "hutchinson", "rtol": 1e-2}
    a, b = trace(A, **options), trace(B, **options)
    change = difference(b, a)
    assert change.standard_error < 0.05 * math.hypot(a.standard_error, b.standard_error)
    assert change.low <= float((B - A).trace()) <= change.high
    apart = difference(b, trace(A, seed=1, **options))
    assert apart.method == "unpaired" and apart.standard_error > 10 * change.standard_error


@pytest.mark.parametrize(("scale", "noise"), [(0.1, 0.0), (1.0, 0.1), (-0.3, 0.1)])
def test_differences_use_samples_without_a_partner_where_that_is_better(scale, noise):
    generator = torch.Generator().manual_seed(0)
    values, paired_ones, errors = [], 0, []
    for _ in range(400):
        z, w = torch.randn(2, 1600, generator=generator, dtype=torch.float64)
        a, b = Estimate.of(5 + scale * z[:100] + noise * w[:100], seed=1), Estimate.of(2 + z, seed=1)
        found = difference(a, b)
        apart = math.hypot(a.standard_error, b.standard_error)
        paired = Estimate.of(a.samples - b.samples[:100])
        if found.method == "paired":
            paired_ones += 1
            assert found.value == paired.value
        else:
            assert found.value == a.value - b.value
            assert found.standard_error < paired.standard_error
            assert found.standard_error < 1.05 * apart or scale < 0
        values.append(found.value)
        errors.append(found.standard_error)
    actual = float(torch.tensor(values, dtype=torch.float64).sub(3).square().mean().sqrt())
    assert 0.9 <= sum(errors) / len(errors) / actual <= 1.4  # standard errors are a tenth or more too wide
    assert paired_ones == (400 if scale == 1 else 0)


def test_differences_of_unequal_and_of_constant_samples():
    z = torch.randn(60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    constant = Estimate.of(torch.full((10,), 2.0, dtype=torch.float64), seed=1)
    found = difference(Estimate.of(z, seed=1), constant)
    assert found.value == pytest.approx(float(z.mean()) - 2, rel=1e-12)
    assert found.standard_error == pytest.approx(Estimate.of(z).standard_error, rel=1e-12)


# Density and log-determinant


def test_a_complete_run_gives_every_eigenvalue_weight_one(all_problems):
    A = all_problems[-1][1]
    found = spectrum(A, dimension=len(A))
    assert torch.allclose(found.nodes, torch.linalg.eigvalsh(A).flip(0), atol=1e-12)
    assert bool((found.weights == 1).all())
    assert found.moment(3).value == pytest.approx(float(torch.linalg.matrix_power(A, 3).trace() / len(A)), rel=1e-9)


@pytest.mark.parametrize("measure", [eigenvalues, spectrum, trace, frobenius_squared, lambda run: run.extend(8)])
def test_a_run_belongs_to_its_weights(measure):
    torch.manual_seed(0)
    model = mlp(4).double()
    run = Krylov(Hessian(model, F.cross_entropy, digits(20, side=4)), block=2)
    run.extend(4)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    model[1].bias.data[0] += 1e-3
    with pytest.raises(ValueError, match="weights have changed"):
        measure(run)
    model.load_state_dict(before)
    measure(run)


def test_a_zero_matrix_has_as_many_eigenvalues_as_rows():
    found = spectrum(torch.zeros(300, 300, dtype=torch.float64))
    ones = found.total(torch.ones_like)
    assert ones.value == pytest.approx(300, rel=1e-12)
    assert float(found.total(torch.exp).value) == pytest.approx(300, rel=1e-12)
    assert (found.log_det().counts == 0).all()


@pytest.mark.parametrize("size", [3.0, -2e-4, 0.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_density_of_equal_eigenvalues_integrates_to_one(size, dtype):
    Q = torch.linalg.qr(torch.randn(300, 300, generator=torch.Generator().manual_seed(0), dtype=dtype))[0]
    grid, density, _ = spectrum(size * (Q @ Q.T)).density()  # equal but for rounding errors
    width = abs(size) / 100 or 1.0
    assert float(torch.trapezoid(density, grid)) == pytest.approx(1, abs=1e-3)
    assert float(grid[-1] - grid[0]) == pytest.approx(8 * width, rel=1e-2)


def test_the_density_integrates_to_one_and_peaks_at_eigenvalues():
    A = symmetric(torch.cat([torch.full((99,), 1.0), torch.tensor([3.0])]).double())
    grid, density, error = spectrum(A).density(grid=2001, width=0.02)
    assert float(torch.trapezoid(density, grid)) == pytest.approx(1.0, rel=1e-3)
    assert float(grid[density.argmax()]) == pytest.approx(1.0, abs=2e-3)
    near = (grid - 3).abs() < 0.1
    assert float(torch.trapezoid(density[near], grid[near])) == pytest.approx(0.01, rel=1e-3)
    assert float(error.max()) < 1e-6 * float(density.max())


def test_log_det_over_cuts(all_problems):
    A = all_problems[0][1]
    truth = torch.linalg.eigvalsh(A).abs()
    cuts = torch.logspace(-3, 0, 7, dtype=torch.float64)
    found = spectrum(A, probes=16, dimension=len(A)).log_det(cuts)
    for cut, value, count in zip(cuts, found.values, found.counts, strict=True):
        assert float(value) == pytest.approx(float(truth[truth > cut].log().sum()), rel=1e-6, abs=1e-9)
        assert float(count) == float((truth > cut).sum())
    # Where the outliers have converged the curve is exact long before the basis is complete.
    sampled = spectrum(A, probes=8, dimension=80).log_det(torch.tensor([0.5], dtype=torch.float64))
    assert float(sampled.values) == pytest.approx(float(truth[truth > 0.5].log().sum()), rel=1e-5)
    assert float(sampled.standard_errors) < 1e-4 and float(sampled.count_errors) < 1e-4


@pytest.mark.parametrize(
    "values",
    [
        torch.logspace(-4, 0, 1000, dtype=torch.float64),
        torch.logspace(-8, 0, 1000, dtype=torch.float64),
        torch.linspace(-1, 1, 1000, dtype=torch.float64),
        torch.cat([torch.linspace(0.4, 1, 5), torch.linspace(0, 0.02, 995)]).double(),
    ],
    ids=["four decades", "eight decades", "both signs", "outliers"],
)
def test_log_det_errors_hold_the_quadratures_too(values):
    cuts = torch.tensor([1e-5, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.5], dtype=torch.float64)
    above = values.abs() > cuts.unsqueeze(1)
    truth = torch.where(above, values.abs().clamp_min(1e-300).log(), 0.0).sum(1)
    for probes, dimension, seed in [(16, 192, 0), (16, 192, 1), (8, 64, 0)]:
        found = spectrum(torch.diag(values), probes=probes, dimension=dimension, seed=seed).log_det(cuts)
        assert bool(((found.values - truth).abs() <= 3 * found.standard_errors + 1e-9).all())
        assert bool(((found.counts - above.sum(1)).abs() <= 3 * found.count_errors + 1e-9).all())


def test_one_probe_has_no_error_bar_and_one_ritz_value_is_no_eigenvalue():
    A = torch.diag(torch.linspace(0, 1, 300, dtype=torch.float64))
    cuts = torch.tensor([0.1], dtype=torch.float64)
    found = spectrum(Krylov(A), dimension=40)
    assert bool(found.density()[2].isinf().all())
    assert bool(found.log_det(cuts).standard_errors.isinf().all())
    assert bool(found.log_det(cuts).count_errors.isinf().all())
    single = spectrum(Krylov(A), dimension=1)
    assert not bool(single.exact.any()) and single.moment(0).value == pytest.approx(1.0, rel=1e-12)
    assert single.moment(1).standard_error == math.inf
    complete = spectrum(Krylov(A), dimension=300)
    assert bool((complete.density()[2] == 0).all()) and float(complete.log_det(cuts).count_errors) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_complete_run_is_as_exact_as_its_numbers(dtype):
    for seed in range(5):
        A = symmetric(torch.linspace(-3, 5, 100, dtype=torch.float64), seed=seed).to(dtype)
        A = (A + A.T) / 2
        found = spectrum(A, dimension=100, seed=seed)
        for power in (1, 2, 3):
            truth, estimate = float(torch.linalg.matrix_power(A.double(), power).trace()) / 100, found.moment(power)
            assert estimate.low <= truth <= estimate.high
            assert estimate.standard_error <= 1000 * torch.finfo(dtype).eps * abs(truth)


def test_one_run_serves_all(all_problems):
    problem, A = all_problems[0]
    H = Hessian(problem.model, problem.loss_fn, problem.batches)
    run = Krylov(H, block=8)
    found = spectrum(run, dimension=64)
    top = eigenvalues(run, 5)
    assert top.matvecs <= 16  # the basis was there already, only the check for repeated values costs
    whole = trace(run, rtol=1e-2)
    assert whole.matvecs <= 80  # the pilot and the fewest probes that there can be
    assert abs(whole.value - float(A.trace())) <= 4 * whole.standard_error
    assert torch.allclose(top.values, torch.linalg.eigvalsh(A).flip(0)[:5], rtol=1e-3)
    assert found.matvecs == 64
