"""How long the steps of smoothness-adaptive SAM (S4) are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import steppe
from helpers import problems
from helpers.worlds import DOUBLE, Quadratic, randn, spread
from steppe import SASAM, SASGD


def learning_rates(method: steppe.Method, loss, w: Tensor, lr: float, steps: int) -> list[float]:
    param = nn.Parameter(w.clone())
    opt = steppe.SharpnessAware(SGD([param], lr=lr), method)
    rates = []
    for step in range(steps):
        opt.step(lambda step=step: loss(param, step))
        rates.append(float(opt.metrics["eta"]))
        torch.testing.assert_close(opt.param_groups[0]["lr"], rates[-1], rtol=0, atol=0, equal_nan=True)
    return rates


@pytest.mark.parametrize("method", [SASAM(), SASAM(delta=1.0), SASGD(delta=1.0)], ids=["sam", "delta-1", "sgd"])
@pytest.mark.parametrize("lr", [1e-4, 0.3])
def test_s4_the_step_is_never_shorter_than_half_the_inverse_smoothness(method, lr):
    """η_t >= 1/2β for t >= 1: on a quadratic, and on softmax regression of digits with a new batch each step.

    (The document says 1/β; its eq. 5 has a factor 2.) β is a bound for every batch: for softmax, ½λ_max(XᵀX)/n.
    """
    problem = Quadratic(spread(0.05, 4.0, 8))
    rates = learning_rates(method, lambda w, step: problem.loss(w), problem.minimum + 5 * randn(8, seed=3), lr, 25)
    assert min(rates[1:]) >= (1 - 1e-9) / (2 * 4.0)

    stream = list(problems.batches(60))[:25]
    beta = max(0.5 * torch.linalg.matrix_norm(x, 2) ** 2 / len(x) for x, _ in stream)
    w = 0.1 * randn(640, seed=4)
    loss = lambda w, step: nn.functional.cross_entropy(stream[step][0] @ w.view(64, 10), stream[step][1])  # noqa: E731
    rates = learning_rates(method, loss, w, lr, 25)
    assert min(rates[1:]) >= float((1 - 1e-9) / (2 * beta))


@pytest.mark.parametrize("method", [SASAM(delta=1.0), SASGD(delta=1.0)], ids=["sam", "sgd"])
def test_s4_the_step_can_exceed_the_inverse_smoothness(method):
    """It follows the smoothness along the path, here that of the flattest direction: η = 1/2λ_min > 2/β."""
    problem = Quadratic(torch.tensor([0.1, 1.0, 1.0], dtype=DOUBLE))
    start = problem.minimum + 10 * problem.basis[:, 0]
    rates = learning_rates(method, lambda w, step: problem.loss(w), start, 0.01, 4)
    assert rates[1:] == pytest.approx([1 / (2 * 0.1)] * 3, rel=1e-6)


@pytest.mark.parametrize("method", [SASAM(), SASGD()], ids=["sam", "sgd"])
def test_s4_a_batch_without_a_gradient_does_not_end_the_training(method):
    """Where neither weights nor gradient changed, local smoothness is unknown: the second bound of eq. 5 counts."""
    problem = Quadratic(spread(0.5, 2.0, 3))
    start = problem.minimum + randn(3, seed=8)
    rates = learning_rates(method, lambda w, step: problem.loss(w) * (step != 3), start, 0.01, 8)
    assert min(rates[1:]) >= (1 - 1e-9) / (2 * 2.0)
