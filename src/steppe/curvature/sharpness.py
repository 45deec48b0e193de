"""(φ, ψ, μ)-sharpness: S = φ(∫ ψ(½ vᵀHv) dμ(v)), with an error bar (Tahmasebi et al. 2024, Definitions 1 and 8).

Most measures of sharpness have this form. ψ may have several components; φ then takes as many means. By products,
½vᵀHv is exact. By losses it is (L(w + ρv) − L(w))/ρ², the form that a (φ, ψ, μ) optimizer minimises.

>>> H = torch.diag(torch.tensor([3.0, 1.0]).double())
>>> found = sharpness(H, Measure.trace(), samples=400)
>>> abs(found.value - 1.0) < 3 * found.standard_error
True
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .estimates import Estimate
from .objective import Objective
from .operator import Hessian
from .progress import Progress
from .random_rows import Draw, cube, gaussian, sphere


@dataclass(frozen=True)
class Measure:
    """φ, ψ and μ.

    `psi` maps a tensor of values to one tensor or a tuple of m; `phi` takes m means and returns one number. If ψ is an
    exponential, give its logarithm as `log_psi`: means are then taken by log-sum-exp, and `phi` takes their logarithms.
    `mu` is one distribution for all components, or a tuple of m, which are sampled independently.
    """

    phi: Callable[..., Tensor]
    psi: Callable[[Tensor], Tensor | tuple[Tensor, ...]] | None = None
    mu: Draw | tuple[Draw, ...] = gaussian
    log_psi: Callable[[Tensor], Tensor | tuple[Tensor, ...]] | None = None
    name: str = "custom"

    def __post_init__(self) -> None:
        if (self.psi is None) == (self.log_psi is None):
            raise ValueError("give either psi or log_psi")

    @classmethod
    def trace(cls) -> Measure:
        """tr H/2d for d weights: the first row of Table 1."""
        return cls(lambda t: t, lambda t: t, sphere, name="trace/2d")

    @classmethod
    def frobenius(cls) -> Measure:
        """‖H‖²_F: the second row of Table 1."""
        return cls(lambda t, s: 2 * (s - t * t), lambda t: (t, t * t), gaussian, name="frobenius²")

    @classmethod
    def log_determinant(cls, size: int, half_width: float) -> Measure:
        """log det H, by (2π)^d/t² and exp(−t) over a cube instead of the whole space: the third row of Table 1.

        Correct if the cube contains the Gaussian exp(−½vᵀHv). Flat directions count as the width of the cube.
        """
        constant = size * math.log(2 * math.pi) - 2 * size * math.log(2 * half_width)
        return cls(lambda t: constant - 2 * t, mu=cube(half_width), log_psi=lambda t: -t, name="log det")

    @classmethod
    def log_product(cls, sigma: float) -> Measure:
        """log ∏(1 − σλᵢ), for σλ_max < 1: the last row of Table 1."""
        return cls(lambda t: -2 * t, mu=gaussian, log_psi=lambda t: sigma * t, name="log ∏(1−σλ)")


def sharpness(
    target: Any,
    measure: Measure,
    *,
    by: Literal["products", "losses"] = "products",
    rho: float = 0.01,
    samples: int = 100,
    antithetic: bool = True,
    seed: int = 0,
    progress: bool | None = None,
) -> Estimate:
    """(φ, ψ, μ)-sharpness of an `Objective`, or, by products, of any operator.

    The same seed draws the same vectors for every model of the same size, so `difference` of two results has a much
    smaller error than either. By losses, each v is paired with −v. This cancels the contribution of the gradient if
    ψ(t) = t, and only then: away from a critical point t also contains vᵀg/ρ. `Measure.frobenius` by losses is then
    ‖H‖²_F + 2‖g‖²/ρ² (to leading order in ρ), so measure it by products. The estimate is jackknifed: this removes the
    bias of φ of a mean, which comes from the curvature of φ, to first order in 1/samples.
    """
    if by not in ("products", "losses"):
        raise ValueError(f'by must be "products" or "losses", not {by!r}')
    if rho <= 0:
        raise ValueError(f"rho must be positive, got {rho}")
    if samples < 3:
        raise ValueError(f"samples must be at least 3, for an error bar, got {samples}")
    if by == "losses" and not isinstance(target, Objective):
        raise TypeError("sharpness by losses needs an Objective")
    begun = time.monotonic()
    draws = measure.mu if isinstance(measure.mu, tuple) else (measure.mu,)
    generator = torch.Generator().manual_seed(seed)
    values_of = _Products(target) if by == "products" else _Losses(target, rho, antithetic)
    columns = []  # one per distribution: samples by pairs
    with Progress(f"sharpness {measure.name}", progress) as bar:
        for index, draw in enumerate(draws):
            rows: list[Tensor] = []
            while len(rows) < samples:
                count = min(values_of.at_once, samples - len(rows))
                rows += values_of(torch.cat([draw(1, values_of.size, generator) for _ in range(count)]))
                bar((index + len(rows) / samples) / len(draws))
            columns.append(torch.stack(rows).double().cpu())
    means = _components(measure, columns)
    pseudo = _jackknife(measure, means)
    return Estimate.of(
        pseudo, matvecs=values_of.evaluations, seconds=time.monotonic() - begun, seed=seed,
        method=f"{measure.name} by {by}",
    )  # fmt: skip


class _Products:
    """½vᵀHv."""

    def __init__(self, target: Any):
        self.operator = Hessian(target) if isinstance(target, Objective) else target
        self.size = int(self.operator.shape[0])
        self.at_once = max(min(16, 2**27 // self.size), 1)  # no more than about a gigabyte
        self.evaluations = 0

    def __call__(self, rows: Tensor) -> Tensor:
        self.evaluations += len(rows)
        rows = rows.to(self.operator.device, self.operator.dtype)
        return ((rows * (self.operator @ rows.T).T).sum(1) / 2).unsqueeze(1)


class _Losses:
    """(L(w + ρv) − L(w))/ρ², at v and −v."""

    def __init__(self, objective: Objective, rho: float, antithetic: bool):
        self.objective, self.rho = objective, rho
        self.signs = (1.0, -1.0) if antithetic else (1.0,)
        self.size, self.at_once = objective.size, 1
        self.here = objective.loss()
        self.evaluations = 1

    def __call__(self, rows: Tensor) -> Tensor:
        self.evaluations += len(self.signs)
        (v,) = rows.to(self.objective.device, self.objective.dtype)
        vector = self.objective.vector(v)
        values = [(self.objective.loss(sign * self.rho * vector) - self.here) / self.rho**2 for sign in self.signs]
        return torch.stack(values).unsqueeze(0)


def _components(measure: Measure, columns: list[Tensor]) -> list[Tensor]:
    """ψ of every sample, averaged over the pair ±v; one tensor per component of ψ."""
    function = measure.psi or measure.log_psi
    assert function is not None
    found: list[Tensor] = []
    for index, values in enumerate(columns):
        parts = function(values)
        parts = parts if isinstance(parts, tuple) else (parts,)
        found += parts if len(columns) == 1 else [parts[index]]
    if measure.psi is not None:
        return [part.mean(dim=1) for part in found]
    return [torch.logsumexp(part, dim=1) - math.log(part.shape[1]) for part in found]


def _jackknife(measure: Measure, parts: list[Tensor]) -> Tensor:
    """Pseudo-values of φ of the means: their mean is the estimate without its first-order bias."""
    count = len(parts[0])
    if measure.psi is not None:
        whole = [part.mean() for part in parts]
        left_out = [(part.sum() - part) / (count - 1) for part in parts]
    else:
        whole = [torch.logsumexp(part, 0) - math.log(count) for part in parts]
        apart = ~torch.eye(count, dtype=torch.bool)
        left_out = []
        for part in parts:
            rows = part.expand(count, count).masked_fill(~apart, -torch.inf)
            left_out.append(torch.logsumexp(rows, 1) - math.log(count - 1))
    phi = torch.as_tensor(measure.phi(*whole)).double()
    without = torch.stack([torch.as_tensor(measure.phi(*each)).double() for each in zip(*left_out, strict=True)])
    return count * phi - (count - 1) * without
