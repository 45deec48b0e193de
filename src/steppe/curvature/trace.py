"""Trace and Frobenius norm of a matrix that can only be multiplied, with t intervals.

For any orthonormal Q that is independent of the random signs z, with P = I − QQᵀ,

    tr A  = tr QᵀAQ + E[(Pz)ᵀA(Pz)],        ‖A‖²_F = ‖AQ‖²_F + E‖A(Pz)‖².

The methods differ in Q: nothing (``"hutchinson"``, Hutchinson 1989), the range of A on random vectors (``"hutch++"``,
Meyer et al. 2021), a Krylov space (``"krylov"``, after Chen & Hallman 2023), or each probe's own leave-one-out
basis (``"xtrace"``, Epperly, Tropp & Webber 2024). After training, a few directions carry most of the trace: a Q that
holds them leaves little for the probes to be wrong about.

>>> A = torch.diag(torch.tensor([100.0] + 99 * [0.01]).double())
>>> found = trace(A)
>>> round(found.value, 4), found.matvecs < 50
(100.99, True)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from .krylov import Krylov, random_signs
from .progress import Progress
from .results import Estimate

TraceMethod: TypeAlias = Literal["krylov", "hutchinson", "hutch++", "xtrace"]
FrobeniusMethod: TypeAlias = Literal["krylov", "hutchinson"]
_PILOT = 8  # probes that decide how large the basis gets; they do not enter the estimate
# Probes in an estimate; with fewer, 3 standard errors are too often too little. Squared norms are skewed.
_LEAST, _LEAST_SKEWED = 30, 100
_AT_ONCE = 16  # probes multiplied together
_PROBES_APART = 0x5EED  # keeps the probes' random stream away from the start block's


def trace(
    operator: Any,
    *,
    rtol: float = 1e-2,
    method: TraceMethod = "krylov",
    max_matvecs: int = 2000,
    seed: int = 0,
    max_basis: int = 256,
    progress: bool | None = None,
) -> Estimate:
    """The trace. Stops when the standard error is at most `rtol` of the estimate, or after `max_matvecs` products.

    `operator` may be a `Krylov` run: its basis is used and, while that pays, extended.
    """
    _check(rtol, max_matvecs)
    limits = {"rtol": rtol, "max_matvecs": max_matvecs, "progress": progress}
    if method == "krylov":
        return _Probing(operator, _trace_samples, seed, "trace", **limits).with_krylov(max_basis)
    probing = _Probing(_plain(operator), _trace_samples, seed, "trace", **limits)
    if method == "hutchinson":
        return probing.plain()
    if method == "hutch++":
        return probing.with_sketch()
    if method == "xtrace":
        return _xtrace(_plain(operator), seed, **limits)
    raise ValueError(f'method must be "krylov", "hutchinson", "hutch++" or "xtrace", not {method!r}')


def frobenius_squared(
    operator: Any,
    *,
    rtol: float = 1e-2,
    method: FrobeniusMethod = "krylov",
    max_matvecs: int = 2000,
    seed: int = 0,
    max_basis: int = 256,
    progress: bool | None = None,
) -> Estimate:
    """‖A‖²_F, the sum of the squared eigenvalues. Arguments as in `trace`.

    >>> A = torch.diag(torch.tensor([3.0, 4.0]).double())
    >>> frobenius_squared(A).value
    25.0
    """
    _check(rtol, max_matvecs)
    limits = {"rtol": rtol, "max_matvecs": max_matvecs, "progress": progress}
    if method == "krylov":
        return _Probing(operator, _frobenius_samples, seed, "Frobenius norm", **limits).with_krylov(max_basis)
    if method == "hutchinson":
        return _Probing(_plain(operator), _frobenius_samples, seed, "Frobenius norm", **limits).plain()
    raise ValueError(f'method must be "krylov" or "hutchinson", not {method!r}')


# What a probe contributes, given z without the basis (rows) and its product
Samples: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def _trace_samples(probes: Tensor, products: Tensor) -> Tensor:
    return (probes * products).sum(1, dtype=torch.float64).cpu()


def _frobenius_samples(probes: Tensor, products: Tensor) -> Tensor:
    return products.square().sum(1, dtype=torch.float64).cpu()


class _Probing:
    """Draws probes, takes a basis out of them, and averages until the error is small enough."""

    def __init__(
        self, operator: Any, samples: Samples, seed: int, title: str,
        *, rtol: float, max_matvecs: int, progress: bool | None,
    ):  # fmt: skip
        self.run = operator if isinstance(operator, Krylov) else None
        self.operator: Any = _plain(operator)
        self.samples_of, self.seed, self.title = samples, seed, title
        self.rtol, self.max_matvecs, self.show = rtol, max_matvecs, progress
        self.size = int(self.operator.shape[0])
        self.generator = torch.Generator().manual_seed(seed ^ _PROBES_APART)
        self.least = _LEAST if samples is _trace_samples else _LEAST_SKEWED
        self.begun = time.monotonic()
        self.matvecs = 0

    def multiply(self, rows: Tensor) -> Tensor:
        self.matvecs += len(rows)
        return (self.operator @ rows.T.contiguous()).T

    def draw(self, count: int) -> Tensor:
        return random_signs(count, self.size, self.generator, self.operator)

    def plain(self) -> Estimate:
        return self.finish(None, 0.0, "hutchinson")

    def with_sketch(self) -> Estimate:
        """Q = orth(AS) for random signs S: a third of the products, by the usual split."""
        columns = max(min(self.max_matvecs // 3, self.size, 24), 1)
        basis = torch.linalg.qr(self.multiply(self.draw(columns)).T)[0].T.contiguous()
        exact = float(self.samples_of(basis, self.multiply(basis)).sum())
        return self.finish(basis, exact, "hutch++")

    def with_krylov(self, max_basis: int) -> Estimate:
        """Q = a Krylov space, grown as long as that saves more probes than it costs products.

        The pilot probes' products are kept. With AQ known they say at no cost what each larger Q would leave. They
        are then thrown away: an estimate from the probes that chose Q would look surer than it is.
        """
        run = self.run or Krylov(self.operator, seed=self.seed)
        spent, most = run.matvecs, min(max_basis, self.size, run.max_basis)
        pilot = self.draw(_PILOT)
        products = self.multiply(pilot)
        values = self.residual_samples(run, pilot, products)
        in_vain = 0
        with Progress(self.title, self.show) as bar:
            while in_vain < 2:
                chunk = min(max(8, run.dimension // 8), most - run.dimension)
                before = self.probes_needed(values, values)
                if chunk <= 0 or before < _LEAST / 4 or self.matvecs + run.matvecs - spent + chunk > self.max_matvecs:
                    break
                goal = run.dimension + chunk
                while run.dimension < goal:
                    run.step()
                grown = self.residual_samples(run, pilot, products)
                saved = self.probes_needed(values, grown) - self.probes_needed(grown, grown)
                in_vain = 0 if saved > chunk or before > self.size == most else in_vain + 1
                values = grown
                bar(run.dimension / most, f"{run.dimension} directions, about {before:.0f} probes to go")
        run.save()
        self.matvecs += run.matvecs - spent
        exact = float(self.exact_part(run))
        if run.complete:
            rounding = torch.finfo(run.dtype).eps * float(run.projection.norm()) * self.size**0.5
            rest = {"matvecs": self.matvecs, "seconds": self.elapsed, "seed": self.seed, "method": "krylov"}
            return Estimate.exact(exact, rounding, **rest)
        return self.finish(run.basis, exact, "krylov", first=self.probes_needed(values, values))

    def exact_part(self, run: Krylov) -> Tensor:
        if self.samples_of is _trace_samples:
            return run.projection.diagonal().sum()
        return run.projection.square().sum() + run.coupling.square().sum()

    def residual_samples(self, run: Krylov, probes: Tensor, products: Tensor) -> Tensor:
        """The samples for the run's present basis, from products with the whole probes."""
        inside = run.basis @ probes.T
        projected = (run.projection.to(inside) @ inside).T @ run.basis  # A Q Qᵀz, in the basis and in the next block
        projected += (run.coupling.to(inside) @ inside).T @ run._next
        outside = probes - inside.T @ run.basis
        return self.exact_part(run) + self.samples_of(outside, products - projected)

    def probes_needed(self, values: Tensor, level: Tensor) -> float:
        """How many probes the requested error takes if samples vary like `values` and the truth is like `level`."""
        target = self.rtol * abs(float(level.mean()))
        spread = float(values.std())
        return 0.0 if spread == 0 else float("inf") if target == 0 else (spread / target) ** 2

    def finish(self, basis: Tensor | None, exact: float, method: str, first: float = 0.0) -> Estimate:
        """Probe what the basis leaves, until the error is small enough."""
        samples = torch.empty(0, dtype=torch.float64)
        wanted = first
        with Progress(self.title, self.show) as bar:
            while True:
                # Few and large steps: an estimate that stops at the first lucky moment looks surer than it is.
                affordable = max(self.max_matvecs - self.matvecs, 0 if len(samples) else self.least)
                wanted = min(max(wanted, self.least), len(samples) + affordable, 4 * max(len(samples), self.least))
                while len(samples) < wanted:
                    probes = self.draw(min(_AT_ONCE, math.ceil(wanted) - len(samples)))
                    if basis is not None and len(basis):
                        for _ in range(2):
                            probes -= (probes @ basis.T) @ basis
                    samples = torch.cat([samples, self.samples_of(probes, self.multiply(probes))])
                    bar(self.matvecs / self.max_matvecs, f"{len(samples)} probes of about {wanted:.0f}")
                value, error = float(samples.mean()) + exact, float(samples.std()) / len(samples) ** 0.5
                if error <= self.rtol * abs(value) or self.matvecs >= self.max_matvecs:
                    break
                wanted = 1.1 * self.probes_needed(samples, samples + exact) + 1
        return Estimate.of(
            samples + exact, rtol=self.rtol, matvecs=self.matvecs, seconds=self.elapsed, seed=self.seed, method=method
        )

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.begun


def _xtrace(operator: Any, seed: int, *, rtol: float, max_matvecs: int, progress: bool | None) -> Estimate:
    """Every probe is measured against the basis that all the others span; twice the probes' number of products."""
    begun, size = time.monotonic(), int(operator.shape[0])
    generator = torch.Generator().manual_seed(seed ^ _PROBES_APART)
    probes = torch.empty(size, 0, device=operator.device, dtype=operator.dtype)
    images, basis, mapped = probes, probes, probes
    with Progress("trace", progress) as bar:
        while True:
            grown = min(max(_LEAST, images.shape[1] * 3 // 2), size)
            fresh = random_signs(grown - probes.shape[1], size, generator, operator).T
            probes = torch.cat([probes, fresh], dim=1)
            images = torch.cat([images, operator @ fresh.contiguous()], dim=1)
            q = torch.linalg.qr(images)[0]
            q[:, : basis.shape[1]] = basis  # the same up to sign: what was multiplied already stays
            new = q[:, basis.shape[1] :]
            new -= basis @ (basis.T @ new)
            basis = torch.cat([basis, torch.linalg.qr(new)[0]], dim=1)
            mapped = torch.cat([mapped, operator @ basis[:, mapped.shape[1] :].contiguous()], dim=1)
            samples = _leave_one_out(probes, images, basis, mapped)
            error = float(samples.std() / len(samples) ** 0.5)
            value = float(samples.mean())
            spent = 2 * probes.shape[1]
            bar(spent / max_matvecs, f"relative error {error / max(abs(value), 1e-300):.1%}")
            if error <= rtol * abs(value) or grown == size or 3 * spent // 2 > max_matvecs:
                break
    if probes.shape[1] == size:  # the basis spans everything
        value = float((basis * mapped).sum())
        rounding = torch.finfo(basis.dtype).eps * float(mapped.norm()) * size**0.5
        seconds = time.monotonic() - begun
        return Estimate.exact(value, rounding, matvecs=spent, seconds=seconds, seed=seed, method="xtrace")
    seconds = time.monotonic() - begun
    return Estimate.of(samples, rtol=rtol, matvecs=spent, seconds=seconds, seed=seed, method="xtrace")


def _leave_one_out(probes: Tensor, images: Tensor, basis: Tensor, mapped: Tensor) -> Tensor:
    """tr Q₍ᵢ₎ᵀAQ₍ᵢ₎ + the residual of probe i, where Q₍ᵢ₎ spans the images of all probes but the i-th."""
    projected = (basis.T @ mapped).double()  # QᵀAQ
    triangle = (basis.T @ images).double()  # QᵀAΩ
    inside = (basis.T @ probes).double()  # QᵀΩ
    quadratic = (probes * images).sum(0, dtype=torch.float64)
    # Column i: the direction in Q that the other images do not span.
    left_out = torch.linalg.pinv(triangle).T
    left_out = left_out / left_out.norm(dim=0).clamp_min(1e-300)
    inside = inside - left_out * (left_out * inside).sum(0)
    without = projected.diagonal().sum() - (left_out * (projected @ left_out)).sum(0)
    residual = quadratic - 2 * (inside * triangle).sum(0) + (inside * (projected @ inside)).sum(0)
    return (without + residual).cpu()


def _plain(operator: Any) -> Any:
    return operator.operator if isinstance(operator, Krylov) else operator


def _check(rtol: float, max_matvecs: int) -> None:
    if rtol <= 0:
        raise ValueError(f"rtol must be positive, got {rtol}")
    if max_matvecs < _LEAST_SKEWED + _PILOT:
        raise ValueError(f"max_matvecs must be at least {_LEAST_SKEWED + _PILOT}, got {max_matvecs}")
