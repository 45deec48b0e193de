"""Schedules: hyperparameters that follow the learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .method import Schedule


def linear_in_lr(rho_max: float, rho_min: float, lr_max: float, lr_min: float = 0.0) -> Schedule:
    """A schedule for ρ (GSAM's ρ_t): linear in the learning rate, ρ_min at lr_min, ρ_max at lr_max, and clamped.

    >>> rho = linear_in_lr(rho_max=0.6, rho_min=0.2, lr_max=1.0, lr_min=0.0)
    >>> rho(0, 1.0), rho(0, 0.5), rho(0, 1e9)
    (0.6, 0.4, 0.6)
    """
    if not (0 <= rho_min <= rho_max and lr_min <= lr_max):
        raise ValueError("linear_in_lr needs 0 <= rho_min <= rho_max and lr_min <= lr_max")
    return LinearInLR(rho_max, rho_min, lr_max, lr_min)


@dataclass(frozen=True)
class LinearInLR:
    """The schedule of `linear_in_lr`. A class, so that a method with such a schedule can be pickled and printed."""

    rho_max: float
    rho_min: float
    lr_max: float
    lr_min: float

    def __call__(self, step: int, lr: Any) -> Any:
        """The value at a learning rate."""
        if self.lr_max == self.lr_min:
            return self.rho_max
        if lr is None:
            raise RuntimeError("linear_in_lr follows the learning rate, but the base optimizer has none: give a number")
        share = (lr - self.lr_min) / (self.lr_max - self.lr_min)
        share = share.clamp(0, 1) if isinstance(share, Tensor) else min(max(float(share), 0.0), 1.0)
        return self.rho_min + (self.rho_max - self.rho_min) * share
