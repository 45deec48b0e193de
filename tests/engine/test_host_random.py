"""Models that draw from Python's or NumPy's generators, or from a generator of their own: every look sees the same."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import steppe
from steppe.engine.host_random import HostRandomState, may_draw


class Drawing(nn.Module):
    """Adds a random number, of one of several kinds, to its input, and notes which."""

    def __init__(self, kind: str):
        super().__init__()
        self.linear, self.kind, self.drawn = nn.Linear(3, 2).double(), kind, []
        self.own = torch.Generator().manual_seed(1)
        self.listed, self.named = [random.Random(1)], {"noise": np.random.RandomState(1)}
        self.numpy, self.bits = np.random.default_rng(1), np.random.Generator(np.random.MT19937(1))
        self.secret = random.SystemRandom()  # has no state
        self.late: torch.Generator | None = None

    def forward(self, x):
        number = {
            "random": lambda: random.random(),
            "gauss": lambda: random.gauss(0, 1),
            "numpy": lambda: np.random.rand(),
            "numpy normal": lambda: np.random.randn(),  # two at a time: one is kept
            "own": lambda: float(torch.rand((), generator=self.own)),
            "own of numpy": lambda: self.numpy.random(),
            "own of numpy, Mersenne twister": lambda: self.bits.standard_normal(),
            "own of Python, in a list": lambda: self.listed[0].random(),
            "own of numpy, in a dictionary": lambda: self.named["noise"].randn(),
            "made in the forward": self.drawn_late,
        }[self.kind]()
        self.drawn.append(number)
        return self.linear(x + number)

    def drawn_late(self):
        if self.late is None:
            self.late = torch.Generator().manual_seed(1)
        return float(torch.rand((), generator=self.late))


OWN = ["own", "own of numpy", "own of numpy, Mersenne twister", "own of Python, in a list"]
OWN += ["own of numpy, in a dictionary"]
KINDS = ["random", "gauss", "numpy", "numpy normal", *OWN]


@pytest.fixture(autouse=True)
def _same_numbers():
    random.seed(0)
    np.random.seed(0)


def plain(kind, steps):
    model = Drawing(kind)
    for _ in range(steps):
        model(torch.ones(4, 3, dtype=torch.float64))
    return model.drawn


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [True, False], ids=["model", "no model"])
def test_all_looks_of_a_step_draw_the_same_and_the_next_step_draws_anew(kind, given):
    if kind in OWN and not given:
        pytest.skip("a generator of the model's own can only be found on the model")
    expected = plain(kind, 5)
    random.seed(0)
    np.random.seed(0)
    model = Drawing(kind)
    opt = steppe.SharpnessAware(
        torch.optim.SGD(model.parameters(), lr=0.1), steppe.CRSAM(), model=model if given else None
    )
    for _ in range(5):
        opt.step(lambda: model(torch.ones(4, 3, dtype=torch.float64)).square().mean())
    assert model.drawn == [number for number in expected for _ in range(3)]


def test_a_generator_that_a_forward_makes_is_known_in_the_next_step():
    model = Drawing("made in the forward")
    opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), steppe.SAM(), model=model)
    for _ in range(4):
        opt.step(lambda: model(torch.ones(4, 3, dtype=torch.float64)).square().mean())
    steps = [model.drawn[i : i + 2] for i in range(0, 8, 2)]
    assert all(first == second for first, second in steps[1:])
    assert len({first for first, _ in steps}) == 4


@pytest.mark.parametrize("kind", ["random", "numpy"])
def test_a_step_that_is_left_gives_the_numbers_back(kind):
    model = Drawing(kind)
    opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), steppe.SAM(), model=model)
    before = HostRandomState()
    for _ in opt.passes():
        model(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
        break
    assert HostRandomState() == before


def test_which_models_may_draw():
    assert may_draw([Drawing("own")])  # this file imports both
    assert not may_draw(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).modules())


def test_states_differ_after_any_draw():
    state = HostRandomState()
    assert state == HostRandomState()
    for draw in (random.random, np.random.rand, np.random.randn):
        state = HostRandomState()
        draw()
        assert state != HostRandomState()
        state.restore()
        assert state == HostRandomState()
