"""Quantiles of Student's t distribution: from SciPy if it is installed, else from the closed form."""

from __future__ import annotations

import math
from functools import lru_cache


@lru_cache(maxsize=4096)
def t_quantile(probability: float, degrees: int) -> float:
    """The quantile at a probability of at least 1/2, for whole degrees of freedom; infinite for fewer than one.

    >>> round(t_quantile(0.975, 9), 4)
    2.2622
    """
    if degrees < 1:
        return math.inf
    try:
        from scipy.special import stdtrit
    except ImportError:
        return closed_form(probability, degrees)
    return float(stdtrit(degrees, probability))


def closed_form(probability: float, degrees: int) -> float:
    """The same quantile without SciPy: by bisection of the closed form of the distribution function."""
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _central_probability(middle, degrees) < 2 * probability - 1 else (low, middle)
    return (low + high) / 2


def _central_probability(t: float, degrees: int) -> float:
    """P(|T| < t): a finite sum of powers of cos θ, θ = arctan(t/√ν) (Abramowitz & Stegun 26.7.3-4)."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
