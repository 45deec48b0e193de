"""Random vectors that are the same on every rank and after every resume.

A draw depends only on the seed, the step and how many draws the step has made, so there is no generator state to save.
A shard is cut out of the whole tensor's draw, so sharding changes no number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..vector import Space, Vector, unit
from .shards import local, shard_of

Generators = dict[torch.device, torch.Generator]  # one per device, seeded again in every step


def seed_of(seed: int, step: int) -> int:
    """What a step's generators are seeded with."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + 1) % 2**63


class Draws:
    """Random vectors of one step. Entries of weights that looks must not move are zero."""

    def __init__(self, space: Space, seed: int, step: int, generators: Generators | None = None):
        self._space = space
        self._seed = seed_of(seed, step)
        self._generators = {} if generators is None else generators
        self._seeded: set[torch.device] = set()

    def normal(self) -> Vector:
        """Independent standard normal entries."""
        return self._draw(torch.randn)

    def uniform(self, low: float, high: float) -> Vector:
        """Independent entries, uniform between low and high."""

        def between(shape: torch.Size, **options: Any) -> Tensor:
            return torch.rand(shape, **options).mul_(high - low).add_(low)

        return self._draw(between)

    def sphere(self) -> Vector:
        """A unit vector, uniform over directions."""
        return unit(self.normal())

    def _draw(self, sample: Callable[..., Tensor]) -> Vector:
        return Vector([self._draw_like(p, sample) for p in self._space.params], self._space).perturbed()

    def _draw_like(self, p: Tensor, sample: Callable[..., Tensor]) -> Tensor:
        device = local(p).device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        if device not in self._seeded:
            # Devices of one kind produce the same numbers from one seed: each gets a seed of its own.
            self._generators[device].manual_seed((self._seed + len(self._seeded) * 0xBF58476D1CE4E5B9) % 2**63)
            self._seeded.add(device)
        whole = sample(p.shape, generator=self._generators[device], device=device, dtype=p.dtype)
        return shard_of(whole, p)
