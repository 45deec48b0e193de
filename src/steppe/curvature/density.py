"""The whole spectrum: its density, its moments, and log|det| of its nonzero part.

Stochastic Lanczos quadrature on one block Krylov run. Every start vector zᵢ gives a sample of the spectrum: the Ritz
values θⱼ with weights (zᵢᵀuⱼ)², whose mean over random signs is one per eigenvalue. A converged Ritz vector is an
eigenvector, so its weight is known to be one. So the outliers, which would cause most of the noise, are exact, and
only the bulk is sampled.

>>> A = torch.diag(torch.cat([torch.tensor([50.0]), torch.linspace(0.1, 1, 299)]).double())
>>> found = spectrum(A, probes=8, dimension=64)
>>> abs(found.moment(1).value * 300 - A.trace()) < 1
tensor(True)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .estimates import Estimate
from .krylov import Krylov, nearest_gaps
from .progress import Progress

_EIGENVECTOR = 1e-3  # a Ritz vector counts as an eigenvector if residual/gap, the sine of its angle to one, is below


@dataclass(frozen=True)
class LogDet:
    """log|det| of the part of the spectrum with |λ| above a cut, as a curve over cuts.

    No single cut is right: a trained model's eigenvalues approach zero without a gap. `counts` are the numbers of
    eigenvalues above each cut; the others are left out. The errors combine the noise of the probes with a third of the
    largest possible error of the quadrature: a Ritz value near the cut stands for eigenvalues on both sides of it.
    """

    cuts: Tensor
    values: Tensor
    standard_errors: Tensor
    counts: Tensor
    count_errors: Tensor
    size: int


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalue estimates and how many eigenvalues each stands for, one row of weights per probe."""

    nodes: Tensor  # Ritz values, the largest first
    weights: Tensor = field(repr=False)  # probes by nodes; each row sums to about `size`
    exact: Tensor = field(repr=False)  # which nodes are eigenvalues, with weight one
    spreads: Tensor = field(repr=False)  # standard deviation of the eigenvalues that a node stands for: ‖Au − θu‖
    size: int = 0
    matvecs: int = 0
    seconds: float = 0.0
    seed: int = 0
    how: str = ""  # how products were computed

    def total(self, function: Callable[[Tensor], Tensor]) -> Estimate:
        """Σ f(λ) over all eigenvalues: the trace of f(A).

        The error is that of the random probes. It leaves out the error of the quadrature, which is small only if f
        changes little over the distance between neighbouring nodes, or is a polynomial of low degree. For steps,
        logarithms and narrow peaks inside the spectrum it may be larger; `log_det` includes it.
        """
        values = function(self.nodes)
        samples = self.weights @ values
        cost = {"matvecs": self.matvecs, "seconds": self.seconds, "seed": self.seed, "method": "quadrature"}
        if bool(self.exact.all()):
            # The spread of the samples does not show rounding: that of the nodes, and that of the sum.
            moved = (function(self.nodes + self.spreads) - values).abs()
            rounding = float((moved + torch.finfo(torch.float64).eps * values.abs()).sum())
            return Estimate.exact(float(samples[0]), rounding, **cost)
        return Estimate.of(samples, **cost)

    def moment(self, power: int) -> Estimate:
        """The mean of λ^power over all eigenvalues."""
        return self.total(lambda values: values**power / self.size)

    @property
    def width(self) -> float:
        """The default smoothing width: 1% of the range, or of the largest |λ| if all eigenvalues are equal."""
        low, high = float(self.nodes.min()), float(self.nodes.max())
        size = max(abs(low), abs(high))
        span = high - low if high - low > 1e-5 * size else size  # a smaller range is rounding error
        return span / 100

    def density(self, grid: Tensor | int = 400, width: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Three tensors: a grid, the density on it, smoothed by a Gaussian of a width, and its standard error."""
        width = width or self.width or 1.0
        if not isinstance(grid, Tensor):
            low, high = float(self.nodes.min()), float(self.nodes.max())
            grid = torch.linspace(low - 4 * width, high + 4 * width, grid, dtype=torch.float64)
        distances = (grid.unsqueeze(1) - self.nodes.unsqueeze(0)) / width
        kernel = torch.exp(-distances.square() / 2) / (width * math.sqrt(2 * math.pi))
        samples = self.weights @ kernel.T / self.size
        return grid, samples.mean(dim=0), self._noise(samples)

    def log_det(self, cuts: Tensor | None = None) -> LogDet:
        """log|det| of the part above each cut. Default cuts: the five decades below the largest eigenvalue.

        >>> found = spectrum(torch.diag(torch.tensor([4.0, 2.0, 0.0]).double()))
        >>> found.log_det(torch.tensor([1.0, 3.0])).values.exp()
        tensor([8.0000, 4.0000], dtype=torch.float64)
        """
        sizes = self.nodes.abs()
        if cuts is None:
            largest = math.log10(max(float(sizes.max()), 1e-300))
            cuts = torch.logspace(largest - 5, largest, 41, dtype=torch.float64)[:-1]
        if bool((cuts <= 0).any()):
            raise ValueError("cuts must be positive: log|det| of a singular matrix is minus infinity")
        above = (sizes.unsqueeze(0) > cuts.unsqueeze(1)).double()
        logs = torch.where(above > 0, sizes.clamp_min(1e-300).log().unsqueeze(0), 0.0)
        values, counts = self.weights @ logs.T, self.weights @ above.T
        across = self.weights.mean(dim=0) * self._share_across(cuts)  # eigenvalues that may be on the other side
        furthest = torch.maximum(sizes.unsqueeze(0), cuts.unsqueeze(1)) + self.spreads
        largest_logs = torch.maximum(furthest.log().abs(), cuts.log().abs().unsqueeze(1))
        return LogDet(
            cuts=cuts, values=values.mean(dim=0), counts=counts.mean(dim=0), size=self.size,
            standard_errors=torch.hypot(self._noise(values), (across * largest_logs).sum(dim=1) / 3),
            count_errors=torch.hypot(self._noise(counts), across.sum(dim=1) / 3),
        )  # fmt: skip

    def _noise(self, samples: Tensor) -> Tensor:
        """The standard error of the mean over probes; infinite for a single probe."""
        if bool(self.exact.all()):
            return torch.zeros_like(samples[0])
        if len(samples) == 1:
            return torch.full_like(samples[0], torch.inf)
        return samples.std(dim=0) / math.sqrt(len(samples))

    def _share_across(self, cuts: Tensor) -> Tensor:
        """The largest share of each node's weight that may be on the other side of each cut (Cantelli's inequality).

        With the weights of its Ritz vector, the spectrum has mean θ and variance ‖Au − θu‖².
        """
        distances, variances = (self.nodes.abs().unsqueeze(0) - cuts.unsqueeze(1)).square(), self.spreads.square()
        share = variances / (variances + distances)
        return torch.where(self.exact, (distances <= variances).double(), share)


def spectrum(
    operator: Any,
    *,
    probes: int = 16,
    dimension: int = 192,
    seed: int = 0,
    checkpoint: Any = None,
    progress: bool | None = None,
) -> Spectrum:
    """The spectrum by block Lanczos quadrature, from `dimension` products.

    `operator` may be a `Krylov` run with random start vectors and no restart; its block is then the number of probes.
    """
    if not isinstance(operator, Krylov) and probes < 2:
        raise ValueError(f"probes must be at least 2, for an error bar, got {probes}")
    run = operator if isinstance(operator, Krylov) else Krylov(operator, block=probes, seed=seed, checkpoint=checkpoint)
    run.require_same_weights()
    begun, goal = time.monotonic(), min(dimension, run.size)
    key = f"spectrum, {goal}"
    spent = run.notes.setdefault(key, run.matvecs)  # saved with the run, so that a resumed run counts from there
    with Progress("spectrum", progress) as bar:
        while run.dimension < goal and not run.restarts:
            run.step()
            bar(run.dimension / goal, f"{run.dimension} of {goal} products")
    run.notes.pop(key)
    run.save()
    if run.restarts:
        raise ValueError(
            "the run was restarted, which discards its start block: use a larger max_basis, or a separate run"
        )
    ritz = run.ritz()
    first = len(run.corner)
    weights = (run.corner.T @ ritz.coordinates[:first]).square()
    weights *= run.size / run.start.double().square().sum(0).cpu().unsqueeze(1)
    exact = torch.full((len(ritz.values),), run.complete) | _eigenvectors(ritz.values, ritz.residuals)
    weights[:, exact] = 1.0
    return Spectrum(
        nodes=ritz.values, weights=weights, exact=exact, spreads=ritz.residuals, size=run.size,
        matvecs=run.matvecs - spent, seconds=time.monotonic() - begun, seed=run.seed,
        how=getattr(run.operator, "how", ""),
    )  # fmt: skip


def _eigenvectors(values: Tensor, residuals: Tensor) -> Tensor:
    """Which Ritz vectors have converged to a single eigenvector. Without a gap, as for a single value, none has."""
    gap = nearest_gaps(values, residuals)
    return (gap > 0) & (residuals <= _EIGENVECTOR * gap)  # gap > 0: a zero matrix has zero residuals and no gaps
