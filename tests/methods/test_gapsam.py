"""GapSAM where training and held-out loss rise together: `times` shrinks, and recovers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from steppe import GapSAM, SharpnessAware


def radii(method: GapSAM, losses: list[tuple[float, float]]) -> list[float]:
    """ρ after each step, where the losses of the batch and of the held-out one are given; the slope is 1."""
    w = nn.Parameter(torch.zeros((), dtype=torch.float64))
    opt = SharpnessAware(torch.optim.SGD([w], lr=0.0), method)
    found = []
    for here, held in losses:
        opt.step(lambda here=here: w + here, auxiliary=lambda held=held: w + held)
        found.append(float(opt.metrics["rho"]))
    return found


def by_hand(retreat: float, losses: list[tuple[float, float]]) -> list[float]:
    """The same, by the equations, with the running means written as sums. The rise of the loss is ρ."""
    rho, c, found, rises = 0.05, 2.0, [], []
    for count in range(1, len(losses) + 1):
        rises.append(rho)

        def mean(values, keep, count=count):
            weights = [keep ** (count - 1 - i) for i in range(count)]
            return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)

        here, held = ([pair[which] for pair in losses[:count]] for which in (0, 1))
        both = mean(here, 0.5) > mean(here, 0.85) and mean(held, 0.5) > mean(held, 0.85)
        c = c * math.exp(-retreat) if both else min(c * math.exp(retreat / 2), 2.0)
        gap = mean(held, 0.5) - mean(here, 0.5)
        target = min(c * gap, 0.8 * (losses[0][1] - mean(here, 0.5)))
        step = max(-1.0, min(1.0, math.log(max(target, 1e-12) / mean(rises, 0.5))))
        rho = rho * math.exp(0.2 * (min(step, 0.0) if both and retreat else step))
        found.append(rho)
    return found


FALLING = [(1.5 - 0.1 * i, 2.0 - 0.05 * i) for i in range(6)]
BOTH_RISE = [(1.0 + 0.05 * i, 1.75 + 0.05 * i) for i in range(8)]
OVERFITTING = [(0.95 - 0.05 * i, 1.8 + 0.1 * i) for i in range(6)]


@pytest.mark.parametrize("retreat", [0.0, 0.1, 0.7])
def test_the_radius_is_that_of_the_equations(retreat):
    losses = FALLING + BOTH_RISE + OVERFITTING
    method = GapSAM(period=1, decay=0.5, least=0.05, retreat=retreat)
    assert radii(method, losses) == pytest.approx([max(r, 0.05) for r in by_hand(retreat, losses)], rel=1e-9)


def test_the_radius_falls_only_where_both_losses_rise():
    plain, careful = (GapSAM(period=1, decay=0.5, least=0.01, retreat=retreat) for retreat in (0.0, 0.7))
    assert radii(plain, FALLING + OVERFITTING) == radii(careful, FALLING + OVERFITTING)
    grown, shrunk = (radii(method, FALLING + BOTH_RISE)[-1] for method in (plain, careful))
    assert shrunk < 0.5 * grown
