"""Estimates: numbers with error bars, and their differences."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ..support.student import t_quantile

_AT_THREE_ERRORS = 0.9995  # a two-sided 99.9% interval, which three standard errors must cover


def mean_and_error(samples: Tensor) -> tuple[float, float, float, float]:
    """The mean of independent samples, its standard error, and how far the 95% interval reaches below and above it.

    Squared norms are skewed to the right. If the few large ones are missing among the samples, both the mean and its
    estimated error are too low. Hall's transformation (1992) removes the skewness from the t statistic, which lengthens
    the interval on the side where the true value is more likely. Samples with long tails give a less reliable estimate
    of their own spread: the degrees of freedom are chosen so that s² varies as much as it does at the samples' kurtosis
    (Satterthwaite). The standard error is a third of the larger side of the 99.9% interval: 1.1 σ/√n for many
    well-behaved samples, more for few, skewed or long-tailed ones. The extra tenth is for estimates that stop by their
    own error: they stop early more often than late.
    """
    count = len(samples)
    value = float(samples.mean())
    if count < 2:
        return value, math.inf, math.inf, math.inf
    spread = float(samples.std())
    if spread == 0:
        return value, 0.0, 0.0, 0.0
    raw, standard = spread / math.sqrt(count), (samples - value) / spread
    skewness, kurtosis = float(standard.pow(3).mean()), float(standard.pow(4).mean())
    degrees = min(max(int(2 * count / max(kurtosis - 1, 1e-9)), 3), count - 1)
    sides = []
    for probability in (_AT_THREE_ERRORS, 0.975):
        t = t_quantile(probability, degrees)
        sides.append((_unskewed(t, skewness, count), -_unskewed(-t, skewness, count)))
    below, above = sides[1]
    return value, raw * max(sides[0]) / 3, raw * below, raw * above


def _unskewed(t: float, skewness: float, count: int) -> float:
    """The inverse of Hall's transformation: a quantile of the t statistic of skewed samples."""
    if abs(skewness) < 1e-6:
        return t
    root = math.sqrt(count)
    inside = 1 + skewness * (t / root - skewness / (6 * count))
    return 3 * root / skewness * (math.copysign(abs(inside) ** (1 / 3), inside) - 1)


@dataclass(frozen=True)
class Estimate:
    """A number, its uncertainty, and what it cost.

    `samples` are the independent values whose mean it is; `difference` pairs them across models.
    """

    value: float
    standard_error: float  # larger where samples are few or skewed: see `mean_and_error`
    low: float  # the 95% interval, by Student's t corrected for skewness
    high: float
    converged: bool  # whether the requested relative error was reached
    matvecs: int = 0
    seconds: float = 0.0
    seed: int = 0
    method: str = ""
    how: str = ""  # how products were computed
    samples: Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)

    @classmethod
    def of(cls, samples: Tensor, *, rtol: float | None = None, error: float | None = None, **rest: Any) -> Estimate:
        """The mean of independent samples, or of dependent samples whose standard error is known."""
        samples = samples.detach().double().cpu()
        value, found, below, above = mean_and_error(samples)
        if error is None:
            error = found
        else:
            below = above = 0.0 if error == 0 else t_quantile(0.975, len(samples) - 1) * error
        converged = True if rtol is None else error <= rtol * abs(value)
        return cls(value, error, value - below, value + above, converged, samples=samples, **rest)

    @classmethod
    def exact(cls, value: float, rounding: float = 0.0, **rest: Any) -> Estimate:
        """A number without sampling error."""
        return cls(value, rounding, value - 2 * rounding, value + 2 * rounding, True, **rest)

    def __str__(self) -> str:
        warning = "" if self.converged else "  (requested error not reached)"
        return f"{self.value:.6g} ± {self.standard_error:.2g} [{self.low:.6g}, {self.high:.6g}]{warning}"


def difference(a: Estimate, b: Estimate) -> Estimate:
    """a − b. With the same seed both used the same random vectors, so much of the error cancels.

    Samples are paired as far as both estimates have them. If one has more, discarding the rest may cost more than
    pairing saves; then all samples are used, with the correlation of the paired ones.

    >>> samples = torch.linspace(1, 3, 50)
    >>> a, b = Estimate.of(samples, seed=1), Estimate.of(0.9 * samples, seed=1)
    >>> change, apart = difference(a, b), math.hypot(a.standard_error, b.standard_error)
    >>> round(change.value, 3), round(change.standard_error, 3), round(apart, 3)
    (0.2, 0.01, 0.132)
    """
    cost = {"matvecs": a.matvecs + b.matvecs, "seconds": a.seconds + b.seconds, "seed": a.seed}
    shared, most = sorted((len(a.samples), len(b.samples)))
    error, method = math.hypot(a.standard_error, b.standard_error), "unpaired"
    if a.seed == b.seed and a.method == b.method and shared > 1:
        one, other = a.samples[:shared], b.samples[:shared]
        paired = Estimate.of(one - other, method="paired", **cost)
        correlation = float(torch.corrcoef(torch.stack([one, other]))[0, 1].nan_to_num())
        # Var(mean of m − mean of n) with k shared: σ²/m + τ²/n − 2kρστ/mn
        common = 2 * correlation * math.sqrt(shared / most) * a.standard_error * b.standard_error
        error, method = math.sqrt(max(error**2 - common, 0.0)), "partly paired"
        if shared == most or paired.standard_error <= error:
            return paired
    value, reach = a.value - b.value, 1.96 * error
    return Estimate(value, error, value - reach, value + reach, True, method=method, **cost)


def as_json(result: Any) -> Any:
    """A result as plain numbers, lists and strings for `json.dump`, without vectors and samples."""
    if hasattr(result, "__dataclass_fields__"):
        left_out = {f.name for f in fields(result) if not f.repr}
        shallow = {f.name: getattr(result, f.name) for f in fields(result) if f.name not in left_out}
        return {name: as_json(value) for name, value in shallow.items()}
    if isinstance(result, Tensor):
        return as_json(result.tolist())
    if isinstance(result, dict):
        return {str(key): as_json(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [as_json(value) for value in result]
    if isinstance(result, float) and not math.isfinite(result):
        return str(result)  # JSON has no NaN
    return result
