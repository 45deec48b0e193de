"""Slices of the loss: along lines and planes through the weights.

Directions are Gaussian and, by default, filter-normalised (Li et al. 2018): every filter of the direction gets the norm
of the same filter of the weights, so that slices of different models can be compared. Grids are symmetric and contain
0. The weights of the model are never changed. A loss that is not finite is stored as it is.

>>> model = torch.nn.Linear(2, 1).double()
>>> x, y = torch.eye(2, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
>>> objective = Objective(model, torch.nn.functional.mse_loss, (x, y))
>>> slice = line(objective, random_direction(objective), points=5)
>>> slice.steps.tolist()
[-1.0, -0.5, 0.0, 0.5, 1.0]
>>> bool(slice.losses["model"][2] == objective.loss())
True
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ..vector import Vector
from .objective import Objective
from .parameters import normalisation
from .progress import Progress

Normalise: TypeAlias = Literal["filter", "layer", "model", "none"]


@dataclass(frozen=True)
class Line:
    """Losses along a line through the weights; one curve per model, all at the same steps."""

    steps: Tensor
    losses: dict[str, Tensor]
    axis: str = "step"


@dataclass(frozen=True)
class Plane:
    """Losses on a plane through the weights: ``losses[i, j]`` at ``across[j]`` and ``up[i]``."""

    across: Tensor
    up: Tensor
    losses: Tensor
    axes: tuple[str, str] = ("first direction", "second direction")
    path: Tensor = field(default_factory=lambda: torch.empty(0, 2))  # an optimizer's path, if there is one


def random_direction(
    objective: Objective, *, normalise: Normalise = "filter", orthogonal_to: Vector | None = None, seed: int = 0
) -> Vector:
    """A Gaussian direction.

    With ``"filter"`` and ``"layer"`` normalisation, parameters of one dimension (biases) and normalisation layers are
    not moved: a small step in them would dominate the loss. The direction is made orthogonal inside each filter, so
    that normalisation preserves orthogonality. A filter of one weight has no second direction and is not moved. If
    nothing remains, the direction is made orthogonal inside each layer, or at last over the whole model. If nothing has
    a norm to normalise to (only such parameters are measured, or all weights are zero), there is no direction, and this
    is an error.
    """
    if normalise not in ("filter", "layer", "model", "none"):
        raise ValueError(f'normalise must be "filter", "layer", "model" or "none", not {normalise!r}')
    generator = torch.Generator().manual_seed(seed)
    others = [None] * len(objective.names) if orthogonal_to is None else orthogonal_to.tensors
    pieces, fixed = [], normalisation(objective.model)
    for name, weight, other in zip(objective.names, objective.weights(), others, strict=True):
        piece = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight)
        if normalise in ("filter", "layer") and (weight.dim() < 2 or name in fixed):
            pieces.append(torch.zeros_like(weight))
            continue
        rows = _rows(piece, normalise)
        if other is not None and normalise in ("filter", "layer"):
            rows = _orthogonalised(rows, _rows(other, normalise))
        if normalise in ("filter", "layer"):
            sizes = _rows(weight, normalise).norm(dim=1, keepdim=True)
            rows = rows * sizes / rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
        pieces.append(rows.reshape(weight.shape))
    direction = objective.space.vector(pieces)
    if orthogonal_to is not None and normalise in ("model", "none"):
        if objective.size == 1:
            raise ValueError("a single weight has no second direction: use line instead of plane")
        direction = direction - (direction @ orthogonal_to / (orthogonal_to @ orthogonal_to)) * orthogonal_to
    if orthogonal_to is not None and normalise in ("filter", "layer") and not float(direction.norm()):
        coarser: Normalise = "layer" if normalise == "filter" else "model"
        return random_direction(objective, normalise=coarser, orthogonal_to=orthogonal_to, seed=seed)
    if normalise == "model":
        direction = direction * (objective.weights_vector().norm() / direction.norm())
    if not float(direction.norm()):
        raise ValueError(
            f"{normalise} normalisation leaves no direction: only biases, normalisation layers and zero weights are "
            'measured; use normalise="none", or an eigenvector'
        )
    return direction


def line(
    objective: Objective | Mapping[str, Objective],
    direction: Vector | Mapping[str, Vector] | None = None,
    *,
    reach: float = 1.0,
    points: int = 51,
    axis: str = "filter-normalised direction",
    seed: int = 0,
    progress: bool | None = None,
) -> Line:
    """The loss at w + a·direction for a from −reach to reach. Several models by name give several curves.

    Without a direction, each model gets a filter-normalised random one, from the same random numbers.
    """
    steps = grid(reach, points)
    objectives = objective if isinstance(objective, Mapping) else {"model": objective}
    losses = {}
    with Progress("landscape", progress) as bar:
        for index, (name, one) in enumerate(objectives.items()):
            along = direction[name] if isinstance(direction, Mapping) else direction
            along = random_direction(one, seed=seed) if along is None else along
            found = []
            for k, a in enumerate(steps.tolist()):
                found.append(float(one.loss(a * along, finite=False)))
                bar((index + (k + 1) / len(steps)) / len(objectives))
            losses[name] = torch.tensor(found, dtype=torch.float64)
    return Line(steps, losses, axis)


def plane(
    objective: Objective,
    directions: tuple[Vector, Vector] | None = None,
    *,
    reach: float = 1.0,
    points: int = 25,
    axes: tuple[str, str] = ("first direction", "second direction"),
    seed: int = 0,
    progress: bool | None = None,
) -> Plane:
    """The loss on a grid of w + a·first + b·second. Without directions: two random ones, orthogonal in each filter."""
    if directions is None:
        first = random_direction(objective, seed=seed)
        directions = first, random_direction(objective, orthogonal_to=first, seed=seed + 1)
    steps = grid(reach, points)
    return _plane(objective, directions, steps, steps, axes, progress)


def along_trajectory(
    objective: Objective,
    snapshots: Sequence[Any],
    *,
    points: int = 25,
    margin: float = 0.25,
    progress: bool | None = None,
) -> Plane:
    """The plane that contains most of an optimizer's path, with the path in it.

    It is spanned by the two main axes (PCA) of the snapshots' differences from the objective's weights. A snapshot is a
    state dict, a `Vector` or a flat tensor. The grid contains the path, a margin around it, and the weights at the
    origin.
    """
    here = objective.flat(objective.weights_vector())
    rows = torch.stack([_flat_snapshot(objective, s) - here for s in snapshots]).double()
    if len(rows) < 2:
        raise ValueError("a path needs at least two snapshots")
    _, singular, axes = torch.linalg.svd(rows, full_matrices=False)
    total = singular.square().sum().clamp_min(torch.finfo(torch.float64).tiny)
    shares = [*(singular.square() / total)[:2].tolist(), 0.0]
    basis = axes[:2] if len(axes) > 1 else torch.cat([axes, torch.zeros_like(axes)])
    path = rows @ basis.T
    reaches = (path.abs().amax(0) * (1 + margin)).tolist()
    longest = max(reaches) or 1.0
    # The second axis of a straight path is rounding error: the grid is then as high as it is wide.
    grids = [grid(reach if reach > 1e-6 * longest else longest, points) for reach in reaches]
    first, second = (objective.vector(b.to(here)) for b in basis)
    names = (f"first axis of the path ({shares[0]:.0%})", f"second axis ({shares[1]:.0%})")
    found = _plane(objective, (first, second), grids[0], grids[1], names, progress)
    return Plane(found.across, found.up, found.losses, found.axes, path.cpu())


def grid(reach: float, points: int) -> Tensor:
    """Evenly spaced values from −reach to reach, including 0."""
    if not 0 < reach < math.inf:
        raise ValueError(f"reach must be positive and finite, got {reach}")
    if points < 3 or points % 2 == 0:
        raise ValueError(f"points must be odd and at least 3, so that 0 is one of them, got {points}")
    half = torch.linspace(0, reach, points // 2 + 1, dtype=torch.float64)
    return torch.cat([-half[1:].flip(0), half])


def _plane(
    objective: Objective, directions: tuple[Vector, Vector], across: Tensor, up: Tensor, axes: tuple[str, str],
    progress: bool | None,
) -> Plane:  # fmt: skip
    first, second = directions
    losses = torch.empty(len(up), len(across), dtype=torch.float64)
    with Progress("landscape", progress) as bar:
        for i, b in enumerate(up.tolist()):
            for j, a in enumerate(across.tolist()):
                losses[i, j] = float(objective.loss(a * first + b * second, finite=False))
            bar((i + 1) / len(up))
    return Plane(across, up, losses, axes)


def _rows(tensor: Tensor, normalise: Normalise) -> Tensor:
    return tensor.reshape(tensor.shape[0] if normalise == "filter" and tensor.dim() else 1, -1)


def _orthogonalised(rows: Tensor, other: Tensor) -> Tensor:
    """Each row, made orthogonal to the same row of `other`; zero where only rounding errors remain."""
    sizes = other.square().sum(1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    rest = rows
    for _ in range(2):  # after one pass, a small remainder is mostly rounding error
        rest = rest - (rest * other).sum(1, keepdim=True) / sizes * other
    least = 100 * torch.finfo(rows.dtype).eps * rows.norm(dim=1, keepdim=True)
    return torch.where(rest.norm(dim=1, keepdim=True) > least, rest, 0.0)


def _flat_snapshot(objective: Objective, snapshot: Any) -> Tensor:
    if isinstance(snapshot, Tensor):
        return snapshot.to(objective.device, objective.dtype)
    if isinstance(snapshot, Vector):
        return objective.flat(snapshot)
    missing = [name for name in objective.names if name not in snapshot]
    if missing:
        raise ValueError(f"a snapshot lacks the parameters {', '.join(missing)}")
    return objective.flat([snapshot[name] for name in objective.names])
