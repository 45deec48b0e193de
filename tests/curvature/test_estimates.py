"""Trace, Frobenius norm, error bars and differences against dense matrices."""

from __future__ import annotations

import math

import pytest
import scipy.stats
import torch
from torch import Tensor

from helpers.curvature_problems import SEEDS, calibration, some_slow, symmetric
from steppe.curvature import Estimate, difference, frobenius_squared, trace
from steppe.curvature.random_rows import signs
from steppe.support.student import closed_form, t_quantile


def test_t_quantiles_are_scipys():
    for degrees in (1, 2, 3, 4, 9, 10, 29, 200):
        for probability in (0.9, 0.975, 0.995):
            exact = scipy.stats.t.ppf(probability, degrees)
            assert closed_form(probability, degrees) == pytest.approx(exact, rel=1e-10)
            assert t_quantile(probability, degrees) == pytest.approx(exact, rel=1e-10)


@some_slow("tokens, some ignored")
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


class Counted:
    """A matrix that counts its products."""

    def __init__(self, matrix: Tensor):
        self.matrix, self.shape, self.dtype, self.device = matrix, matrix.shape, matrix.dtype, matrix.device
        self.products = 0

    def __matmul__(self, block: Tensor) -> Tensor:
        self.products += block.shape[1]
        return self.matrix @ block


@pytest.mark.parametrize("limit", [168, 200, 300])
@pytest.mark.parametrize("measure", [trace, frobenius_squared])
def test_the_limit_of_products_holds_while_a_basis_grows(limit, measure):
    outliers = torch.cat([torch.logspace(3, 0, 60), torch.zeros(340)]).double()
    for values in (torch.linspace(-1, 1, 400, dtype=torch.float64), outliers):
        A = Counted(symmetric(values))
        found = measure(A, rtol=1e-5, max_matvecs=limit)
        assert A.products == found.matvecs <= limit


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1e25])
@pytest.mark.parametrize("method", ["krylov", "hutchinson"])
def test_estimates_scale_with_the_matrix_in_float32(scale, method):
    A = symmetric(torch.linspace(0.5, 3, 60, dtype=torch.float64)).float()
    for measure, power in ((trace, 1), (frobenius_squared, 2)):
        one, scaled = measure(A, method=method), measure(A * scale, method=method)
        assert scaled.value == pytest.approx(scale**power * one.value, rel=1e-5)
