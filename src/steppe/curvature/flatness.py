"""Flatness in a ball around the weights: how much the loss, or its gradient, can grow within a radius ρ.

The two maxima have no closed form. A maximiser finds a *lower bound*, which is reported with the spread over several
starts: along the gradient, along the top eigenvector in both directions, and random.

With ``adaptive=True`` each weight is measured relative to its own size: the ball is {w + T⊙s : ‖s‖ ≤ ρ} with
T = |w| + η (Kwon et al. 2021). With η = 0 the result does not change when layers are rescaled against each other. The
default of 0.01 lets weights near zero move too.

>>> model = torch.nn.Linear(2, 1, bias=False).double()
>>> _ = model.weight.data.zero_()
>>> x, y = 2 * torch.eye(2, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
>>> objective = Objective(model, torch.nn.functional.mse_loss, (x, y))      # H = 4 I
>>> round(zeroth_order(objective, rho=0.1).value, 6), round(first_order(objective, rho=0.1).value, 6)
(0.02, 0.04)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..methods.gam import transformation
from ..vector import Vector
from .eigen import eigenvalues
from .objective import Objective
from .operator import Hessian, Scaled, Way
from .progress import Progress
from .random_rows import gaussian


@dataclass(frozen=True)
class Flatness:
    """A lower bound on a maximum over the ball, and the value that each start reached."""

    value: float  # the best of all starts
    starts: dict[str, float]
    curvature: float  # λ_max, if the loss were quadratic with its minimum at the weights
    rho: float
    adaptive: bool
    gradients: int  # gradient evaluations over all data; a Hessian product counts as two
    seconds: float
    offset: Vector | None = field(default=None, repr=False, compare=False)  # where the maximum was found

    @property
    def spread(self) -> float:
        """The best start minus the worst. A large spread means that the maximiser is not reliable here."""
        return self.value - min(self.starts.values())


@dataclass(frozen=True)
class SurrogateGap:
    """h = L(w + e) − L(w) after one step along the gradient, e = ρg/‖g‖ (Zhuang et al. 2022)."""

    gap: float
    sharpness: float  # 2h/ρ²: λ_max where the gradient points along the top eigenvector
    cosine: float  # between the gradients at w and at w + e
    loss: float
    perturbed_loss: float
    gradient_norm: float
    rho: float
    adaptive: bool


def surrogate_gap(objective: Objective, rho: float, *, adaptive: bool = False, eta: float = 0.01) -> SurrogateGap:
    """The surrogate gap h, 2h/ρ², and cos θ, from two gradients."""
    _check_rho(rho)
    scale = _scale(objective, adaptive, eta)
    loss, gradient = objective.gradient()
    climb = _scaled(_unit(_scaled(gradient, scale))[0], scale)
    there, gradient_there = objective.gradient(rho * climb)
    towards, norm = _unit(gradient)
    cosine = towards @ _unit(gradient_there)[0]
    gap = float(there - loss)
    return SurrogateGap(gap, 2 * gap / rho**2, float(cosine), float(loss), float(there), norm, rho, adaptive)


def zeroth_order(
    objective: Objective, rho: float, *, adaptive: bool = False, eta: float = 0.01, **options: Any
) -> Flatness:
    """A lower bound on R⁽⁰⁾ = max over the ball of L(w') − L(w). At a minimum 2R⁽⁰⁾/ρ² is near λ_max.

    Options: ``restarts`` (random starts, 2), ``steps`` (most steps per start, 50), ``seed`` (0), ``progress``.
    """
    _check_rho(rho)
    here = float(objective.loss())

    def climb(offset: Vector) -> tuple[float, Vector]:
        loss, gradient = objective.gradient(offset)
        return float(loss) - here, gradient

    scale = _scale(objective, adaptive, eta)
    return _maximise(Hessian(objective), rho, scale, climb, cost=1, power=lambda value: 2 * value / rho**2, **options)


def first_order(
    objective: Objective, rho: float, *, adaptive: bool = False, eta: float = 0.01, **options: Any
) -> Flatness:
    """A lower bound on R⁽¹⁾ = ρ · max over the ball of ‖∇L(w')‖ (Zhang et al. 2023).

    At a minimum R⁽¹⁾/ρ² is near λ_max. R⁽¹⁾ is never below R⁽⁰⁾. If adaptive, the gradient is also measured in the
    ball's coordinates, ‖T⊙∇L‖. Options: as in `zeroth_order`.
    """
    _check_rho(rho)
    scale, here = _scale(objective, adaptive, eta), Hessian(objective)

    def climb(offset: Vector) -> tuple[float, Vector]:
        there = objective.at(offset)
        way: Way = "fresh" if here.way == "auto" else here.way  # the search for starts has found one that works
        direction, norm = _unit(_scaled(there.gradient()[1], scale))
        return rho * norm, rho * (Hessian(there, way=way) @ _scaled(direction, scale))

    return _maximise(here, rho, scale, climb, cost=3, power=lambda value: value / rho**2, **options)


def _maximise(
    operator: Hessian,
    rho: float,
    scale: Vector | None,
    climb: Callable[[Vector], tuple[float, Vector]],
    *,
    cost: int,
    power: Callable[[float], float],
    restarts: int = 2,
    steps: int = 50,
    seed: int = 0,
    progress: bool | None = None,
) -> Flatness:
    """Ascend from every start. `climb` gives a value and its gradient at an offset; it costs `cost` gradients."""
    begun = time.monotonic()
    starts, spent = _starts(operator, rho, scale, restarts, seed)
    found: dict[str, float] = {}
    best: tuple[float, Vector] | None = None
    with Progress("flatness", progress) as bar:
        for done, (name, start) in enumerate(starts.items()):
            value, where, evaluations = _ascend(climb, start, rho, scale, steps)
            spent += cost * evaluations
            found[name] = value
            if best is None or value > best[0]:
                best = value, where
            bar((done + 1) / len(starts), f"best {best[0]:.4g}")
    assert best is not None
    offset = _scaled(best[1], scale)
    seconds = time.monotonic() - begun
    return Flatness(best[0], found, power(best[0]), rho, scale is not None, spent, seconds, offset)


def _starts(
    operator: Hessian, rho: float, scale: Vector | None, restarts: int, seed: int
) -> tuple[dict[str, Vector], int]:
    """Start points in the coordinates s: along the gradient, along ± the top eigenvector, random."""
    objective = operator.objective
    stretched = operator if scale is None else Scaled(operator, objective.flat(scale))
    top = eigenvalues(stretched, rtol=1e-2, max_matvecs=40, seed=seed, progress=False)
    operator.forget()  # no more products at these weights
    vector = rho * objective.vector(top.vectors[:, 0])
    uphill = rho * _unit(_scaled(objective.gradient()[1], scale))[0]
    starts = {"gradient": uphill, "top eigenvector": vector, "top eigenvector, other way": -vector}
    generator = torch.Generator().manual_seed(seed)
    for index in range(restarts):
        starts[f"random {index + 1}"] = rho * _random_unit(objective, generator)
    return starts, 2 * top.matvecs + 1


def _ascend(
    climb: Callable[[Vector], tuple[float, Vector]], at: Vector, rho: float, scale: Vector | None, steps: int
) -> tuple[float, Vector, int]:
    """Ascend in the ball; return the value reached, where, and the number of evaluations.

    Each step goes towards the point of the sphere in the direction of the gradient. If the value there is lower, the
    step is shortened. So every step raises the value; for a convex function the full step always does.
    """
    value, slope = climb(_scaled(at, scale))
    evaluations = 1
    for _ in range(steps):
        towards = rho * _unit(_scaled(slope, scale))[0] - at
        share, gained = 1.0, 0.0
        while share > 1e-3 and not gained:
            candidate = at + share * towards
            new_value, new_slope = climb(_scaled(candidate, scale))
            evaluations += 1
            if new_value > value:
                gained, value = new_value - value, new_value
                at, slope = candidate, new_slope
            share /= 4
        if not gained or gained <= 1e-7 * abs(value):
            break
    return value, at, evaluations


def _scale(objective: Objective, adaptive: bool, eta: float) -> Vector | None:
    """T = |w| + η if adaptive, else None."""
    if eta < 0:
        raise ValueError(f"eta must not be negative, got {eta}")
    return objective.weights_vector().abs() + eta if adaptive else None


def _scaled(vector: Vector, scale: Vector | None) -> Vector:
    return vector if scale is None else vector * scale


def _unit(vector: Vector) -> tuple[Vector, float]:
    """v/‖v‖ and ‖v‖, for any scale; the zero vector stays zero.

    `steppe.vector.unit` adds a constant to the norm, which training needs and which shortens small vectors.
    """
    largest = max((float(t.abs().max()) for t in vector.tensors if t.numel()), default=0.0)
    if largest == 0:
        return vector, 0.0
    scaled = vector.map(lambda t: t / largest)  # else the squares of small entries would be zero
    norm = scaled.norm()
    return scaled / norm, largest * float(norm)


def _random_unit(objective: Objective, generator: torch.Generator) -> Vector:
    (flat,) = gaussian(1, objective.size, generator)
    return _unit(objective.vector(flat.to(objective.device, objective.dtype)))[0]


def _check_rho(rho: float) -> None:
    if not rho > 0:
        raise ValueError(f"rho must be positive, got {rho}: it is the radius of the searched ball")


# Local minima and maxima along random directions


@dataclass(frozen=True)
class Extrema:
    """How many local minima and maxima lie along each direction, within the radius."""

    minima: Tensor  # one count per direction
    maxima: Tensor
    losses: Tensor = field(repr=False)  # directions by steps + 1, the first column at the weights
    step: float = 0.0
    resolution: float = 0.0  # smaller rises and falls count as rounding
    seed: int = 0

    def __str__(self) -> str:
        return f"minima {self.minima.double().mean():.3g}, maxima {self.maxima.double().mean():.3g} per direction"


def extrema(
    objective: Objective,
    *,
    directions: int = 100,
    steps: int = 10,
    step: float = 0.01,
    resolution: float | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Extrema:
    """Count local minima and maxima of the loss along random directions from the weights (Zhang et al. 2023, 5.1).

    `resolution` is the smallest change of the loss that counts. Default: 8 units of rounding of its value.
    """
    _check_rho(step)
    generator = torch.Generator().manual_seed(seed)
    here = float(objective.loss())
    if resolution is None:
        resolution = 8 * torch.finfo(objective.dtype).eps * max(abs(here), torch.finfo(objective.dtype).tiny)
    rows = []
    with Progress("local minima", progress) as bar:
        for index in range(directions):
            direction = _random_unit(objective, generator)
            walk = [float(objective.loss((k * step) * direction, finite=False)) for k in range(1, steps + 1)]
            rows.append([here, *walk])
            bar((index + 1) / directions)
    losses = torch.tensor(rows, dtype=torch.float64)
    turns = [_count_turns(row, resolution) for row in rows]
    minima, maxima = (torch.tensor([t[i] for t in turns]) for i in range(2))
    return Extrema(minima, maxima, losses, step, resolution, seed)


def _count_turns(values: list[float], resolution: float) -> tuple[int, int]:
    """How many local minima and maxima a sequence has. Changes that are not larger than the resolution do not count.

    >>> _count_turns([0.0, -1.0, 0.0, 2.0, 1.0, 1.0 + 1e-12, 0.5], 1e-9)
    (1, 1)
    """
    minima = maxima = 0
    heading, extreme = 0, values[0]
    for value in values[1:]:
        if (heading >= 0 and value > extreme) or (heading <= 0 and value < extreme):
            heading = heading or (0 if abs(value - extreme) <= resolution else 1 if value > extreme else -1)
            extreme = value if heading else extreme
        elif abs(value - extreme) > resolution:
            maxima += heading > 0
            minima += heading < 0
            heading, extreme = -heading, value
    return minima, maxima


def transformed(eigenvalues: Tensor, gamma: Tensor) -> Tensor:
    """P(λ) = λ + Σ γ_t λ^(t+1): the eigenvalue that generalization-aware minimization with coefficients γ sees.

    >>> transformed(torch.tensor([1.0, 2.0]), torch.tensor([0.5, -0.1]))
    tensor([1.4000, 3.2000])
    """
    return transformation(gamma.to(eigenvalues), eigenvalues)
