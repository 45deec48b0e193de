"""Late and Random beside Every: on which steps the method runs, at which of its own steps, and how it is recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest
import torch
from torch import nn
from torch.optim import SGD

import steppe
from steppe import GAM, HERE, SAM, Every, Late, LookSAM, Method, Plain, Random
from steppe.methods.late import for_steps
from steppe.methods.random_steps import chosen, chosen_before


@dataclass(frozen=True)
class Noted(Method):
    """Notes its own count of steps."""

    turns: tuple[list[int]] = ([],)

    def looks(self, ctx):
        self.turns[0].append(ctx.step)
        return (yield HERE).grad

    def phase(self, step):
        return min(step, 3)


def turns_of(make, steps=12):
    """At which steps the method runs, and its own counts there; the phases agree with both."""
    noted = Noted(turns=([],))
    method, w = make(noted), nn.Parameter(torch.ones(2))
    opt = steppe.SharpnessAware(SGD([w], lr=0.1), method)
    ran = []
    for step in range(steps):
        before = len(noted.turns[0])
        opt.step(lambda: w.sum())
        if len(noted.turns[0]) > before:
            ran.append(step)
            assert method.phase(step) == 2 * min(len(ran) - 1, 3) + 1
        else:
            assert method.phase(step) == 0
    assert noted.turns[0] == list(range(len(ran)))
    return ran


def test_late_is_plain_before_its_start():
    assert turns_of(lambda m: Late(m, start=5)) == [5, 6, 7, 8, 9, 10, 11]
    assert turns_of(lambda m: Late(m, start=0)) == list(range(12))
    assert turns_of(lambda m: Late(m, start=12)) == []


def test_every_runs_on_every_kth_step():
    assert turns_of(lambda m: Every(3, m)) == [0, 3, 6, 9]
    assert turns_of(lambda m: Every(2.5, m)) == [0, 3, 5, 8, 10]


def test_random_runs_on_the_chosen_steps():
    assert turns_of(lambda m: Random(m, p=0.5, seed=3)) == [s for s in range(12) if chosen(s, 0.5, 3)]
    assert turns_of(lambda m: Random(m, p=0.0)) == []
    assert turns_of(lambda m: Random(m, p=1.0)) == list(range(12))


def test_a_choice_depends_on_seed_and_step_alone():
    """These numbers must not change in any version: a resumed run depends on them."""
    first = [s for s in range(30) if chosen(s, 0.3, 0)]
    assert first == [0, 1, 2, 6, 9, 10, 14, 21, 23, 26, 28]
    assert [chosen_before(s, 0.3, 0) for s in (30, 0, 12)] == [len(first), 0, sum(s < 12 for s in first)]
    assert set(first) < {s for s in range(30) if chosen(s, 0.6, 0)}  # a larger share has those of a smaller one


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_the_share_is_p_and_steps_are_independent(p, seed):
    n = 4000
    runs = torch.tensor([chosen(s, p, seed) for s in range(n)], dtype=torch.float64)
    assert abs(runs.mean() - p) < 4 * (p * (1 - p) / n) ** 0.5
    pairs = (runs[1:] * runs[:-1]).mean()
    assert abs(pairs - p**2) < 4 * (p**2 * (1 - p**2) / n * 3) ** 0.5


def test_cost_and_needs():
    assert Late(SAM(), start=100).cost == 2 and Late(SAM(), start=0.75).cost == 1.25
    assert Random(SAM(), p=0.3).cost == pytest.approx(1.3) and Random(SAM(), p=0.0).cost == 1
    assert Late(GAM(), start=3).needs == GAM().needs
    assert Random(LookSAM()).copies == LookSAM().copies


def test_a_share_of_training_becomes_a_step():
    inner = Late(SAM(rho=0.2), start=0.75)
    assert for_steps(inner, 200) == Late(SAM(rho=0.2), start=150)
    assert for_steps(Every(2, inner), 200) == Every(2, Late(SAM(rho=0.2), start=150))
    assert for_steps(Plain(), 200) == Plain() and cast(Late, for_steps(Late(SAM(), start=7), 200)).start == 7
    w = nn.Parameter(torch.ones(2))
    opt = steppe.SharpnessAware(SGD([w], lr=0.1), inner)
    with pytest.raises(RuntimeError, match=r"start=0.75 is a share of training.*give a whole number of steps"):
        opt.step(lambda: w.sum())


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Late(SAM(), start=-1), "start must be"),
        (lambda: Late(SAM(), start=1.5), "start must be"),
        (lambda: Late("sam", start=1), "needs a method"),  # pyright: ignore[reportArgumentType]
        (lambda: Random(SAM(), p=1.5), "p is a probability"),
        (lambda: Random(SAM(), p=lambda step, lr: 0.5), "p is a probability"),
        (lambda: Random(SAM(), seed=0.5), "seed must be"),  # pyright: ignore[reportArgumentType]
        (lambda: Every(2, SAM(), between=None), "between must be"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_wrong_settings_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()
