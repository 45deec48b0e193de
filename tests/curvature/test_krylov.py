"""Krylov runs and eigenvalues against dense matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.curvature_problems import digits, mlp, symmetric
from steppe.curvature import Hessian, Krylov, eigenvalues, frobenius_squared, spectrum, trace

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


def test_a_resumed_run_equals_one_that_was_not_stopped(all_problems, tmp_path):
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
    found = eigenvalues(H, 3, rtol=1e-8)
    assert torch.allclose(found.values, torch.linalg.eigvalsh(A).flip(0)[:3], rtol=1e-7)
    assert found.matvecs == H.matvecs


@pytest.mark.parametrize("number", [1, 6])
def test_scipy_agrees(all_problems, number):
    problem = all_problems[number][0]
    H = Hessian(problem.model, problem.loss_fn, problem.batches, mode=problem.mode)
    n = H.shape[0]
    make: Any = scipy.sparse.linalg.LinearOperator
    as_scipy = make(
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


def test_a_run_with_a_small_basis_restarts_and_converges():
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
        asked: list[Any] = [("top", 2), ("bottom", 1), ("magnitude", 5), ("top", 6), ("bottom", 6)]
        for which, k in asked:
            found = eigenvalues(run, k, which=which, rtol=1e-6, max_matvecs=5000)  # up to 1100, by rounding
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
        (lambda A: eigenvalues(A, which="LM"), "which"),  # pyright: ignore[reportArgumentType]
        (lambda A: eigenvalues(A, rtol=0), "rtol"),
        (lambda A: eigenvalues(A, 3, max_basis=4), "max_basis"),
        (lambda A: eigenvalues(A, 3, max_basis=8), "at least 9"),
        (lambda A: trace(A, rtol=-1), "rtol"),
        (lambda A: trace(A, method="guess"), "method"),  # pyright: ignore[reportArgumentType]
        (lambda A: trace(A, max_matvecs=3), "max_matvecs"),
        (lambda A: frobenius_squared(A, method="xtrace"), "method"),  # pyright: ignore[reportArgumentType]
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


@pytest.mark.parametrize("measure", [eigenvalues, spectrum, trace, frobenius_squared, lambda run: run.extend(8)])
def test_a_run_belongs_to_its_weights(measure):
    torch.manual_seed(0)
    model = mlp(4).double()
    run = Krylov(Hessian(model, F.cross_entropy, digits(20, side=4)), block=2)
    run.extend(4)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    model.get_parameter("1.bias").data[0] += 1e-3
    with pytest.raises(ValueError, match="weights have changed"):
        measure(run)
    model.load_state_dict(before)
    measure(run)


def test_all_measures_share_one_run(all_problems):
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


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1e25])
def test_eigenvalues_scale_with_the_matrix_in_float32(scale):
    A = symmetric(torch.linspace(-2, 3, 60, dtype=torch.float64)).float()
    found = eigenvalues(A * scale, 3)
    assert torch.allclose(found.values / scale, torch.linalg.eigvalsh(A.double()).flip(0)[:3], rtol=1e-3)
    assert bool((found.residuals > 0).all())


def test_blocks_keep_to_the_limit_of_products():
    A = symmetric(torch.linspace(-1, 1, 400, dtype=torch.float64))
    assert eigenvalues(A, 20, max_matvecs=25, block=8).matvecs == 24


@pytest.mark.parametrize(("dtype", "least"), [(torch.float64, 2e-7), (torch.float32, 1e-4)])
def test_the_error_of_central_differences_is_in_the_bars(dtype, least):
    torch.manual_seed(0)
    x, y = digits(20, side=4)
    model = mlp(4).double()
    truth = torch.linalg.eigvalsh(Hessian(model, F.cross_entropy, (x.double(), y)).dense()).flip(0)[:2]
    H = Hessian(model.to(dtype), F.cross_entropy, (x.to(dtype), y), way="difference")
    found = eigenvalues(H, 2, rtol=1e-9, max_matvecs=200)
    for bars in (found.residuals, found.errors):
        assert bool((bars >= 0.99 * least * truth[0]).all())
        assert bool(((found.values - truth).abs() <= bars).all())
    assert not bool(found.converged.any()) and found.matvecs < 200  # it stops when only this error is left
