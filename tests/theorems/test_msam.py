"""MSAM looks ahead, along the move that comes, and Nesterov's momentum is the same look at another distance."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

import steppe
from helpers.worlds import DOUBLE, Quadratic, randn, spread
from steppe import MSAM, Plain
from steppe.engine.random_vectors import Draws
from steppe.method import Context
from steppe.testing import drive
from steppe.vector import Vector


def test_the_sign_on_a_quadratic_with_a_known_v():
    """L = ½λx²: at x = 2 with v = (3, 4)/5 the look is at x − ρv, not at x + ρv."""
    w, v = torch.tensor([2.0, -1.0], dtype=DOUBLE), torch.tensor([3.0, 4.0], dtype=DOUBLE)
    at: list[torch.Tensor] = []

    def gradient(x):
        at.append(x.clone())
        return torch.tensor([1.0, 10.0], dtype=DOUBLE) * x

    weights = Vector([w])
    ctx = Context(1, 0.1, lambda: weights, Draws(weights.space, 0, 1), {"v": Vector([v], weights.space)})
    d = drive(MSAM(rho=0.5), gradient, w, ctx)
    torch.testing.assert_close(at, [torch.tensor([1.7, -1.4], dtype=DOUBLE)])
    torch.testing.assert_close(d, torch.tensor([1.7, -14.0], dtype=DOUBLE))
    remembered = ctx.remembered["v"]
    assert isinstance(remembered, Vector)
    torch.testing.assert_close(remembered.tensors[0], 0.9 * v + d)


def test_the_look_is_ahead_along_the_base_s_last_move():
    """With SGD's own momentum v is its buffer, and the look is ahead of w on the way of the last move."""
    problem = Quadratic(spread(0.1, 2.0, 6))
    w = nn.Parameter(randn(6, seed=3))
    opt = steppe.SharpnessAware(SGD([w], lr=0.1, momentum=0.9), MSAM(rho=0.2))
    last_move = None
    for _ in range(8):
        before, ahead = w.detach().clone(), torch.zeros(6, dtype=DOUBLE)
        for _ in opt.passes():
            ahead = w.detach() - before
            problem.loss(w).backward()
        if last_move is not None:
            assert torch.nn.functional.cosine_similarity(ahead, last_move, dim=0) == pytest.approx(1)
            assert ahead.norm() == pytest.approx(0.2)
        opt.step()
        last_move = w.detach() - before
        torch.testing.assert_close(opt.state[w]["steppe.v"], opt.base.state[w]["momentum_buffer"])


def test_nesterov_s_momentum_is_msam_with_a_distance_of_eta_beta_v():
    """torch's Nesterov keeps the weights at the look: its weights are MSAM's less ηβv."""
    problem, eta, beta = Quadratic(spread(0.1, 2.0, 6)), 0.1, 0.9
    w, other = (nn.Parameter(randn(6, seed=3)) for _ in range(2))
    base, nesterov = SGD([w], lr=eta, momentum=beta), SGD([other], lr=eta, momentum=beta, nesterov=True)
    opt, v = steppe.SharpnessAware(base, Plain()), torch.zeros(6, dtype=DOUBLE)
    for _ in range(12):
        opt.method = MSAM(rho=float(eta * beta * v.norm()), beta=beta)
        opt.step(lambda: problem.loss(w))
        nesterov.zero_grad()
        problem.loss(other).backward()
        nesterov.step()
        v = base.state[w]["momentum_buffer"].clone()
        torch.testing.assert_close(other.detach(), w.detach() - eta * beta * v, rtol=0, atol=1e-10)
