"""norm_only: the looks move the normalisation layers, the base trains everything."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import steppe
from helpers import problems
from steppe import ASAM, GAM, MSAM, SAM, TraceSAM, norm_only


class ScaleNorm(nn.Module):
    """A user's own normalisation layer."""

    def __init__(self, size: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.scale * x / (x.norm(dim=-1, keepdim=True) + 1e-6)


class NormedBlock(nn.Module):
    """Contains a normalisation layer, but is not one."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(16))
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.linear(self.norm(x)) + self.shift


def net():
    return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), NormedBlock(), ScaleNorm(16), nn.Linear(16, 10))


NORMS = {"1.weight", "1.bias", "2.norm.weight", "2.norm.bias", "3.scale"}


@pytest.mark.parametrize("method", [SAM(rho=0.5), ASAM(), MSAM(), GAM(), TraceSAM()], ids=lambda m: m.name)
def test_looks_move_normalisation_layers_only(method):
    model = problems.seeded(net)
    groups = norm_only(model)
    opt = steppe.SharpnessAware(torch.optim.SGD(groups, lr=0.1), method, model)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    moved: set[str] = set()
    for data in problems.steps(3):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for look in opt.passes():
            moved |= {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
            loss = problems.loss(model, data.of(look.batch, look.sample))
            loss.backward()
            look.report(loss)
        opt.step()
    assert moved == NORMS
    assert not any(torch.equal(p, start[name]) for name, p in model.named_parameters())  # all are trained


def test_every_parameter_is_in_one_group():
    model = net()
    norms, rest = norm_only(model)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in norms["params"]} == NORMS
    assert {names[id(p)] for p in rest["params"]} == set(names.values()) - NORMS
    assert len(norms["params"]) + len(rest["params"]) == len(names) and rest["perturb"] is False


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(4), nn.InstanceNorm1d(4, affine=True), nn.GroupNorm(2, 4)])
def test_normalisation_layers_of_torch_are_recognised(layer):
    model = nn.ModuleList([nn.Linear(2, 2), layer])
    assert [id(p) for p in norm_only(model)[0]["params"]] == [id(p) for p in layer.parameters()]


def test_a_model_without_normalisation_layers_is_refused():
    with pytest.raises(ValueError, match="no normalisation layer with parameters"):
        norm_only(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False)))
