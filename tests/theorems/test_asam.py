"""ASAM is invariant to the scale of layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

import steppe
from helpers import problems
from helpers.worlds import DOUBLE, still
from steppe import ASAM, SAM


@pytest.mark.parametrize("c", [0.01, 3.0, 100.0])
def test_asam_is_invariant_to_the_scale_of_layers(c):
    """Kwon et al., Theorem 1: all through training, a rescaled ReLU net has the same perturbed loss; SAM's differs."""
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)).to(DOUBLE)
    torch.manual_seed(0)
    for layer in (model[0], model[2]):
        assert isinstance(layer, nn.Linear)
        layer.reset_parameters()
    opt = steppe.SharpnessAware(SGD(model.parameters(), lr=0.5), ASAM(rho=0.5, eta=0.0), model)
    gaps: dict[str, list] = {"asam": [], "asam rescaled": [], "sam": [], "sam rescaled": []}
    for data in problems.steps(8):
        rescaled = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)).to(DOUBLE)
        with torch.no_grad():
            for name, factor in (("0.weight", c), ("0.bias", c), ("2.weight", 1 / c), ("2.bias", 1.0)):
                rescaled.get_parameter(name).copy_(factor * model.get_parameter(name))
            torch.testing.assert_close(rescaled(data.main[0]), model(data.main[0]))
        for net, name in ((model, ""), (rescaled, " rescaled")):
            for key, method in (("asam", ASAM(rho=0.5, eta=0.0)), ("sam", SAM(rho=0.05))):
                look = still(net, method)
                look.step(**data.closures(net))
                gaps[key + name].append(look.metrics["surrogate_gap"])
        model.zero_grad()
        opt.step(**data.closures(model))
    values = {key: torch.stack(value) for key, value in gaps.items()}
    torch.testing.assert_close(values["asam rescaled"], values["asam"], rtol=1e-6, atol=0)
    assert ((values["sam rescaled"] / values["sam"] - 1).abs() > 0.1).all()
