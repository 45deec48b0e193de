"""GapSAM's radius: where training and held-out loss rise together, and where examples are held out in turns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from helpers.reference_of_gapsam import update
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


def by_hand(backtrack: float, losses: list[tuple[float, float]]) -> list[float]:
    """The same, by the equations, with the running means written as sums. The rise of the loss is ρ."""
    rho, found, rises, best, bounded = 0.05, [], [], (math.inf, 0.0, 0.0), False
    for count in range(1, len(losses) + 1):
        rises.append(rho)

        def mean(values, count=count):
            weights = [0.5 ** (count - 1 - i) for i in range(count)]
            return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)

        here, held = (mean([pair[which] for pair in losses[:count]]) for which in (0, 1))
        if held < best[0]:
            best, bounded = (held, here, rho), False
        elif backtrack and held > (1 + backtrack) * best[0] and here > (1 + backtrack) * best[1]:
            bounded = True
        target = min(2.0 * (held - here), 0.8 * (losses[0][1] - here))
        step = max(-1.0, min(1.0, math.log(max(target, 1e-12) / mean(rises))))
        bound = max(best[2], rho * math.exp(-0.2)) if bounded else math.inf
        rho = max(min(rho * math.exp(0.2 * step), bound), 0.05)
        found.append(rho)
    return found


FALLING = [(1.5 - 0.1 * i, 2.0 - 0.05 * i) for i in range(6)]
BOTH_RISE = [(1.0 + 0.05 * i, 1.75 + 0.05 * i) for i in range(8)]
OVERFITTING = [(0.95 - 0.05 * i, 1.8 + 0.1 * i) for i in range(6)]
BETTER_THAN_EVER = [(0.9, 1.7 - 0.05 * i) for i in range(6)]
EVERYTHING = FALLING + BOTH_RISE + OVERFITTING + BETTER_THAN_EVER


@pytest.mark.parametrize("backtrack", [0.0, 0.03, 0.1])
def test_the_radius_is_that_of_the_equations(backtrack):
    method = GapSAM(period=1, decay=0.5, least=0.05, backtrack=backtrack)
    assert radii(method, EVERYTHING) == pytest.approx(by_hand(backtrack, EVERYTHING), rel=1e-9)


def test_the_radius_goes_back_where_both_losses_rise_stays_there_and_is_free_after_a_new_best_point():
    plain, careful = (GapSAM(period=1, decay=0.5, least=0.01, backtrack=share) for share in (0.0, 0.03))
    assert radii(plain, FALLING + OVERFITTING) == radii(careful, FALLING + OVERFITTING)
    found = radii(careful, EVERYTHING)
    at_best = found[len(FALLING) - 1]  # the radius of the next step, at which the running mean is least
    both, later, last = len(FALLING + BOTH_RISE), len(FALLING + BOTH_RISE + OVERFITTING), len(EVERYTHING)
    assert found[both - 1] == found[later - 1] == pytest.approx(at_best, rel=1e-12)
    assert found[last - 1] > at_best and radii(plain, EVERYTHING)[both - 1] > 2 * at_best


# Two steps an epoch. The fourth turn begins with epoch 8, step 14: the offset is measured in two steps, in two more ρ
# does not fall. The held-out examples are 0.3 harder than others, apart from a gap that opens and closes.
HARDER = [(1.0, 1.3)] * 14
OPENS, CLOSES = [(1.0, 1.3), (0.9, 1.2), (0.9, 1.15), (0.9, 1.5), (0.9, 1.6)], [(0.9, 1.2)] * 4


def test_examples_held_out_in_turns_bring_their_own_zero_with_them():
    method = GapSAM(period=1, decay=0.5, least=0.01, ceiling=10.0, epoch_steps=2)
    losses = HARDER + OPENS + CLOSES
    found, state = radii(method, losses), {"rho": torch.tensor(0.01, dtype=torch.float64)}
    for step, (here, held) in enumerate(losses):
        update(method, step, state, *torch.tensor([here, float(state["rho"]), held], dtype=torch.float64))
        assert found[step] == pytest.approx(float(state["rho"]), rel=1e-9)
    assert set(found[:17]) == {0.01}, "no gap apart from the examples' own hardness"
    assert found[16] < found[17] < found[18] and found[-1] < found[-2]
    without = radii(GapSAM(period=1, decay=0.5, least=0.01, ceiling=10.0), HARDER)
    assert without[-1] > 0.1, "taken for a gap, the hardness makes ρ grow"


def test_in_turns_the_radius_grows_faster_and_at_first_does_not_fall():
    known = {"period": 1, "least": 0.01, "ceiling": 10.0, "rate": 0.5}
    found = radii(GapSAM(**known, decay=0.5, epoch_steps=2), [(1.0, 50.0), *[(1.0, 1.0)] * 6, *[(1.0, 5.0)] * 3])
    assert found[-1] / found[-2] == pytest.approx(math.exp(0.5 * 2.0))
    # The turn of epochs 64 to 127: a gap that is there in its second eighth only.
    losses = [(1.0, 50.0), *[(1.0, 1.0)] * 70, *[(1.0, 3.0)] * 4, *[(1.0, 1.0)] * 20]
    found = radii(GapSAM(**known, decay=0.1, epoch_steps=1), losses)
    assert len(set(found[63:71])) == 1, "the offset is measured"
    assert found[74] > found[70] and len(set(found[75:79])) == 1, "the gap has closed, but ρ does not fall yet"
    assert found[80] < found[79] < found[78]
