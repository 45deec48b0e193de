"""Means with standard errors and t intervals.

>>> mean_of([1.0, 2.0, 3.0])
Mean(n=3, value=2.0, error=0.577..., low=-0.484..., high=4.484...)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...support.student import t_quantile

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Mean:
    """A mean of n values. Without a spread (one value, or all values equal) there is no interval."""

    n: int
    value: float
    error: float | None = None  # standard error
    low: float | None = None  # ends of the interval
    high: float | None = None


def mean_of(values: Sequence[float]) -> Mean:
    """Mean, standard error and t interval."""
    n, value = len(values), math.fsum(values) / len(values)
    if n < 2:
        return Mean(n, value)
    spread = math.sqrt(math.fsum((x - value) ** 2 for x in values) / (n - 1))
    if spread <= 1e-12 * max(map(abs, values)):  # equal up to rounding: there is no estimate of the spread
        return Mean(n, value, 0.0)
    error = spread / math.sqrt(n)
    half = t_quantile(0.5 + CONFIDENCE / 2, n - 1) * error
    return Mean(n, value, error, value - half, value + half)
