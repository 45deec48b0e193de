"""Random vectors of measurements, as rows of flat tensors.

They are not those of `steppe.engine.random_vectors`, and cannot be. Measurements draw on the CPU, in float64 (or as
signs), one vector for all weights: the same seed gives the same numbers on every device, on every rank and for every
precision, so that results of different models can be compared. Training draws once a step for each parameter, on its
device and in its dtype, because a transfer of the whole model in each step would be slow. The two give different
numbers for the same seed, and each has results that depend on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

# A distribution: how many vectors, of what size, with which generator -> one vector per row
Draw: TypeAlias = Callable[[int, int, torch.Generator], Tensor]


def gaussian(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Standard normal."""
    return torch.randn(count, size, generator=generator, dtype=torch.float64)


def sphere(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Uniform on the unit sphere."""
    vectors = gaussian(count, size, generator)
    return vectors / vectors.norm(dim=1, keepdim=True)


def cube(half_width: float) -> Draw:
    """Uniform on the cube [−c, c]^d."""
    if half_width <= 0:
        raise ValueError(f"half_width must be positive, got {half_width}")

    def draw(count: int, size: int, generator: torch.Generator) -> Tensor:
        return (2 * torch.rand(count, size, generator=generator, dtype=torch.float64) - 1) * half_width

    return draw


def signs(count: int, size: int, generator: torch.Generator, like: Any) -> Tensor:
    """Random signs (Rademacher vectors), on the device and in the dtype of `like`; 64 signs per random number."""
    words = torch.empty(count, -(-size // 64), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    octets = words.view(torch.uint8).to(like.device)
    bits = octets.unsqueeze(-1).bitwise_right_shift(torch.arange(8, dtype=torch.uint8, device=octets.device)) & 1
    return bits.flatten(1)[:, :size].to(like.dtype).mul_(2).sub_(1)
