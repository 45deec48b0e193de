"""Random vectors that are the same on every rank and after every resume.

A draw depends only on the seed, the step and the number of earlier draws in the step, so there is no generator state to
save. A shard is cut out of the draw for the whole tensor, so that sharding changes no number. Ranks that hold other
parameters of the model (`norm_group`) draw different numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..vector import Space, Vector, unit
from .shards import local, piece_number, shard_of

Source = tuple[torch.device, int]  # the device to draw on, and which piece of the model it is in `norm_group`
Generators = dict[Source, torch.Generator]  # reseeded in every step


def seed_of(seed: int, step: int, place: int = 0, piece: int = 0) -> int:
    """The seed of a generator in a step.

    Devices of the same kind produce the same numbers from the same seed, so each device of a process has its own
    `place`. In the same way each piece of a model that is spread over the ranks of `norm_group` has its own `piece`.
    """
    own = place * 0xBF58476D1CE4E5B9 + piece * 0x94D049BB133111EB
    return (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + 1 + own) % 2**63


class Draws:
    """Draws the random vectors of one step. Entries of weights that looks may not move are zero."""

    def __init__(self, space: Space, seed: int, step: int, generators: Generators | None = None):
        self._space = space
        self._seed, self._step = seed, step
        self._generators = {} if generators is None else generators
        self._seeded: set[Source] = set()

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
        source = device, piece = local(p).device, piece_number(p, self._space.norm_group)
        if source not in self._generators:
            self._generators[source] = torch.Generator(device)
        if source not in self._seeded:
            self._generators[source].manual_seed(seed_of(self._seed, self._step, len(self._seeded), piece))
            self._seeded.add(source)
        whole = sample(p.shape, generator=self._generators[source], device=device, dtype=p.dtype)
        return shard_of(whole, p)
