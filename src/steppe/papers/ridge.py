"""S1's toy problem: a ridge that leads down to a flat minimum, with sharp minima on both sides of it.

The paper describes its surface in words only. Here the ridge is the line y = 0. Narrow wells lie beside it, left and
right in turn, so that the loss is smoother along the ridge than in them; a wide well is at its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..method import Method
from ..optimizer import SharpnessAware

STARTS = 41  # points across the beginning of the ridge
WELLS = 5  # sharp ones
WALL = 0.04  # times y⁴: keeps paths near the ridge


@dataclass(frozen=True)
class Ridge:
    """One surface, or many: each number is a tensor with one value per surface.

    `far` is where the last of the sharp wells is, along the ridge; the first is at x = −1.4.
    """

    depth: Tensor
    width: Tensor
    distance: Tensor  # of the sharp wells from the ridge
    far: Tensor
    flat_at: Tensor
    flat_depth: Tensor
    flat_width: Tensor

    def __call__(self, w: Tensor) -> Tensor:
        """The heights at points of shape (..., 2).

        >>> PAPER(torch.tensor([2.13, 0.0]))
        tensor(-1.6200)
        """
        x, y = w[..., 0], w[..., 1]
        height = WALL * y**4 - _well(x - self.flat_at, y, self.flat_depth, self.flat_width)
        for sharp_x, sharp_y in self.sharp():
            height = height - _well(x - sharp_x, y - sharp_y, self.depth, self.width)
        return height

    def sharp(self) -> list[tuple[Tensor, Tensor]]:
        """The centres of the sharp wells, left and right of the ridge in turn."""
        step = (self.far + 1.4) / (WELLS - 1)
        return [(-1.4 + i * step, self.distance * (1 - 2 * (i % 2))) for i in range(WELLS)]

    def reached(self, w: Tensor) -> Tensor:
        """Whether points are near the flat minimum."""
        return (w[..., 0] - self.flat_at).hypot(w[..., 1]) < 0.6

    def repeated(self, times: int) -> Ridge:
        """Each surface so many times in turn, for as many points on it."""
        return Ridge(**{name: value.repeat_interleave(times) for name, value in vars(self).items()})


def _well(x: Tensor, y: Tensor, depth: Tensor, width: Tensor) -> Tensor:
    return depth * torch.exp(-(x**2 + y**2) / (2 * width**2))


PAPER = Ridge(*torch.tensor([0.92, 0.21, 0.73, 0.3, 2.13, 1.62, 1.72]))  # found by a search: see `s1/fig3`


def random_ridges(number: int) -> Ridge:
    """Surfaces of this kind, drawn from wide ranges."""
    low = torch.tensor([0.4, 0.2, 0.3, 0.2, 1.5, 0.8, 1.0])
    high = torch.tensor([1.5, 0.5, 0.9, 1.2, 2.5, 2.5, 1.8])
    drawn = torch.rand(number, 7, generator=torch.Generator().manual_seed(0))
    return Ridge(*(low + (high - low) * drawn).unbind(1))


def starts(number: int = STARTS) -> Tensor:
    """Points across the beginning of the ridge."""
    return torch.stack([torch.full((number,), -2.0), torch.linspace(-0.4, 0.4, number)], 1)


def paths(ridge: Ridge, method: Method, begin: Tensor, steps: int) -> Tensor:
    """The points after every step of SGD with a method, from many starts at once: steps + 1 x starts x 2."""
    w = begin.clone().requires_grad_()
    optimizer = SharpnessAware(torch.optim.SGD([w], lr=0.05), method, members=len(w))
    points = [w.detach().clone()]
    for _ in range(steps):
        optimizer.step(lambda: ridge(w))
        points.append(w.detach().clone())
    return torch.stack(points)


def describe(ridge: Ridge, end: Tensor) -> str:
    """Where on a surface a path has ended."""
    if bool(ridge.reached(end)):
        return "the flat minimum"
    near = [float((end - torch.stack(centre)).norm()) for centre in ridge.sharp()]
    number = near.index(min(near)) + 1
    return f"{'sharp minimum' if min(near) < ridge.width else 'a place beside sharp minimum'} {number}"
