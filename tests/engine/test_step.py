"""The step under way: its phases, and what is known when a framework runs the first look."""

from __future__ import annotations

import copy
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import steppe
from helpers import problems
from helpers.problems import everything, same, seeded, sgd
from steppe.engine.step import Phase


def make(method):
    model = seeded(problems.mlp)
    return model, steppe.SharpnessAware(sgd(model), method, model)


def test_a_step_is_idle_then_looking_then_ready_then_idle():
    model, opt = make(steppe.SAM(rho=0.1))
    data = next(iter(problems.steps(1)))
    phases = [opt.under_way.phase]
    for _ in opt.passes():
        phases.append(opt.under_way.phase)
        problems.loss(model, data.main).backward()
    phases.append(opt.under_way.phase)
    opt.step()
    phases.append(opt.under_way.phase)
    assert phases == [Phase.IDLE, Phase.LOOKING, Phase.LOOKING, Phase.READY, Phase.IDLE]


def test_clearing_the_gradients_drops_a_direction():
    model, opt = make(steppe.SAM(rho=0.1))
    data = next(iter(problems.steps(1)))
    opt.gradient(lambda: problems.loss(model, data.main))
    assert opt.under_way.phase is Phase.READY
    opt.zero_grad()
    assert opt.under_way.phase is Phase.IDLE


def test_a_copy_has_no_step_under_way():
    model, opt = make(steppe.SAM(rho=0.1))
    data = next(iter(problems.steps(1)))
    opt.gradient(lambda: problems.loss(model, data.main))
    twin = copy.deepcopy(opt)
    assert (opt.under_way.phase, twin.under_way.phase) == (Phase.READY, Phase.IDLE)


@pytest.mark.parametrize("looks_seen", [1, 2])
def test_an_abandoned_step_keeps_buffers_and_restores_weights(looks_seen):
    """Buffers and random state are those after one plain pass, weights those of before, no gradient is left."""
    model = seeded(problems.batchnorm_dropout)
    opt = steppe.SharpnessAware(sgd(model), steppe.SAM(rho=0.1), model)
    data = next(iter(problems.steps(1)))
    plain, state = copy.deepcopy(model), torch.get_rng_state()
    problems.loss(plain, data.main)
    after = torch.get_rng_state()

    torch.set_rng_state(state)
    looks = opt.passes()
    for _ in range(looks_seen):
        next(looks)
        problems.loss(model, data.main).backward()
    opt.abandon()
    assert same(everything(model), everything(plain)) and torch.get_rng_state().equal(after)
    assert all(p.grad is None for p in model.parameters())
    assert opt.under_way.phase is Phase.IDLE


@pytest.mark.parametrize("method", [steppe.GNAM(), steppe.GAM(T=1)], ids=["GNAM", "GAM"])
def test_a_framework_s_first_look_tells_its_precision(method, monkeypatch):
    """Between `begin` and `gradient(first_done=True)` autocast is noticed, as it is in a closure's first look."""
    from steppe.engine import looks

    seen: list[str] = []
    by_difference = looks.by_difference

    def noting(asks, w_norm, precision, central=False):
        return by_difference(asks, w_norm, lambda: seen.append(precision()) or seen[-1], central)

    monkeypatch.setattr(looks, "by_difference", noting)
    x, y = torch.randn(20, 4), torch.randint(3, (20,))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Softplus(), torch.nn.Linear(8, 3))
    opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), method, model)

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x), y)

    opt.begin()
    loss().backward()
    opt.gradient(loss, auxiliary=loss, first_done=True)
    told = [cast(Tensor, p.grad).clone() for p in model.parameters()]
    opt.zero_grad()
    opt.gradient(loss, auxiliary=loss)
    assert set(seen) == {"bfloat16"}
    assert same(told, [cast(Tensor, p.grad) for p in model.parameters()])
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_steps_leave_everything_as_plain_training_does():
    """Weights with radius zero, buffers and random state after several steps are those of the base alone."""
    ends = []
    for method in (steppe.Plain(), steppe.SAM(rho=0.0)):
        torch.manual_seed(0)
        model = seeded(problems.batchnorm_dropout)
        opt = steppe.SharpnessAware(sgd(model), method, model)
        for data in problems.steps(3):
            opt.step(lambda model=model, data=data: problems.loss(model, data.main))
        ends.append((everything(model), torch.get_rng_state()))
    assert same(ends[0][0], ends[1][0]) and ends[0][1].equal(ends[1][1])


def test_a_torch_without_distributed_training(monkeypatch):
    """As it is built for some platforms: `torch.distributed` then has nothing but `is_available`."""
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.delattr(torch.distributed, "is_initialized")
    model = torch.nn.Linear(3, 2)
    opt = steppe.SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), steppe.LESAM(), model=model)
    opt.step(lambda: model(torch.ones(4, 3)).square().mean())
    assert opt.metrics["looks"] == 2
