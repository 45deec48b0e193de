"""The spectral density, its moments and log|det| against dense matrices."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.curvature_problems import SEEDS, calibration, some_slow, symmetric
from steppe.curvature import Krylov, spectrum


def test_a_complete_run_gives_every_eigenvalue_weight_one(all_problems):
    A = all_problems[-1][1]
    found = spectrum(A, dimension=len(A))
    assert torch.allclose(found.nodes, torch.linalg.eigvalsh(A).flip(0), atol=1e-12)
    assert bool((found.weights == 1).all())
    assert found.moment(3).value == pytest.approx(float(torch.linalg.matrix_power(A, 3).trace() / len(A)), rel=1e-9)


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


@some_slow("tokens, some ignored")
def test_density_moments_are_within_their_errors(all_problems, index):
    problem, A = all_problems[index]
    probes = min(64, len(A) // 3)  # two blocks must not span everything
    found = [spectrum(A, probes=probes, dimension=2 * probes, seed=seed) for seed in SEEDS]
    for power in (1, 2):
        truth = float(torch.linalg.matrix_power(A, power).trace() / len(A))
        covered, near = calibration([s.moment(power) for s in found], truth)
        assert near >= 0.99, (problem.name, power, near)
        assert 0.90 <= covered <= 0.98, (problem.name, power, covered)
