"""The contenders of curvature.py: steppe, PyHessian and curvlinops.

A contender takes a case and yields (setting, run); a run takes a seed and returns an estimate and its number of
products.
"""

from __future__ import annotations

import importlib
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steppe.curvature import Hessian, eigenvalues, trace

SIZED_FOR = 7e-3  # standard error for which traces are run: below the target, so that few seeds suffice to meet it
Data = tuple[Tensor, Tensor]
Run = Callable[[int], tuple[float, int]]


def _peer(name: str) -> Any:
    return importlib.import_module(name)


@dataclass(frozen=True)
class Case:
    """A trained net, the data it is measured on, and the true values."""

    model: nn.Module
    data: Data
    largest: float = 0.0
    trace: float = 0.0

    def hessian(self) -> Hessian:
        """A fresh operator: building it is part of the time."""
        return Hessian(self.model, F.cross_entropy, self.data)


def steppe_top(case: Case) -> Iterator[tuple[str, Run]]:
    for bound, rtol in (("gap", 1e-3), ("residual", 1e-2), ("residual", 1e-3)):

        def run(seed: int, bound: Any = bound, rtol: float = rtol) -> tuple[float, int]:
            found = eigenvalues(case.hessian(), rtol=rtol, bound=bound, seed=seed, progress=False)
            return float(found.values[0]), found.matvecs

        yield f"{bound} bound {rtol:g}", run


def steppe_trace(case: Case) -> Iterator[tuple[str, Run]]:
    for method, rtol in (("krylov", 1.1 * SIZED_FOR),):  # its standard errors are a tenth wider than σ/√n

        def run(seed: int, method: Any = method, rtol: float = rtol) -> tuple[float, int]:
            found = trace(case.hessian(), rtol=rtol, method=method, seed=seed, progress=False, max_matvecs=4000)
            return found.value, found.matvecs

        yield f"{method} {rtol:.2g}", run


def pyhessian_top(case: Case) -> Iterator[tuple[str, Run]]:
    hessian = _peer("pyhessian").hessian

    for tolerance in (1e-3, 1e-4, 1e-5, 1e-6):

        def run(seed: int, tolerance: float = tolerance) -> tuple[float, int]:
            torch.manual_seed(seed)
            found = _counted(hessian, case).eigenvalues(maxIter=500, tol=tolerance)
            return found[0][0], _COUNT[0]

        yield f"tolerance {tolerance:g}", run


def pyhessian_trace(case: Case) -> Iterator[tuple[str, Run]]:
    """PyHessian with its defaults, and with as many samples as the target needs, by their spread."""
    hessian = _peer("pyhessian").hessian

    def samples(seed: int, **options: Any) -> list[float]:
        torch.manual_seed(seed)
        return [float(value) for value in _counted(hessian, case).trace(**options)]

    def by_default(seed: int) -> tuple[float, int]:
        values = samples(seed)
        return statistics.fmean(values), len(values)

    yield "defaults (tolerance 1e-3)", by_default
    needed = math.ceil((statistics.stdev(samples(0, maxIter=200, tol=0.0)) / (SIZED_FOR * case.trace)) ** 2)

    def enough(seed: int) -> tuple[float, int]:
        return statistics.fmean(samples(seed, maxIter=needed, tol=0.0)), needed

    yield f"{needed} samples", enough


_COUNT = [0]


def _counted(hessian: Any, case: Case) -> Any:
    """A PyHessian object that counts its products. PyHessian leaves a graph in .grad, which is cleared first."""
    module: Any = sys.modules[hessian.__module__]
    case.model.zero_grad(set_to_none=True)
    original = getattr(module, "_steppe_original", module.hessian_vector_product)
    module._steppe_original = original
    _COUNT[0] = 0

    def counting(*args: Any) -> Any:
        _COUNT[0] += 1
        return original(*args)

    module.hessian_vector_product = counting
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hessian(case.model, nn.CrossEntropyLoss(), data=case.data, cuda=case.data[0].is_cuda)


def _curvlinops(case: Case) -> Any:
    operator = _peer("curvlinops").HessianLinearOperator
    params = [p for p in case.model.parameters() if p.requires_grad]
    options = {"check_deterministic": False}
    return operator(case.model, nn.CrossEntropyLoss(), params, [case.data], **options)


def curvlinops_top(case: Case) -> Iterator[tuple[str, Run]]:
    np, linalg = _peer("numpy"), _peer("scipy.sparse.linalg")
    _peer("curvlinops")

    for basis in (6, 20):

        def run(seed: int, basis: int = basis) -> tuple[float, int]:
            operator = _curvlinops(case).to_scipy()
            count = [0]

            def matvec(v: Any) -> Any:
                count[0] += 1
                return operator @ v.reshape(-1).astype(np.float32)

            counted = linalg.LinearOperator(operator.shape, matvec=matvec, dtype=np.float32)
            start = np.random.default_rng(seed).normal(size=operator.shape[0]).astype(np.float32)
            found = linalg.eigsh(counted, k=1, which="LA", tol=1e-3, ncv=basis, v0=start, return_eigenvectors=False)
            return float(found[0]), count[0]

        yield f"eigsh, basis {basis}", run


def curvlinops_trace(case: Case) -> Iterator[tuple[str, Run]]:
    peer = _peer("curvlinops")
    for name, function in (("xtrace", peer.xtrace),):
        for products in (120, 240, 480, 960):

            def run(seed: int, function: Any = function, products: int = products) -> tuple[float, int]:
                torch.manual_seed(seed)
                return float(function(_curvlinops(case), products)), products

            yield f"{name} {products}", run


TOP = {"steppe": steppe_top, "PyHessian": pyhessian_top, "curvlinops": curvlinops_top}
TRACE = {"steppe": steppe_trace, "PyHessian": pyhessian_trace, "curvlinops": curvlinops_trace}
