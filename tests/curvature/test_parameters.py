"""Which parameters are selected."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from steppe.curvature.parameters import normalisation, select


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def test_parts_of_a_selection_may_be_of_different_kinds(model):
    first, last = model[0], model[2]
    names: list[tuple[Any, list[str]]] = [
        (None, ["0.weight", "0.bias", "2.weight", "2.bias"]),
        (first, ["0.weight", "0.bias"]),
        ([first], ["0.weight", "0.bias"]),
        ([first, "2.weight"], ["0.weight", "0.bias", "2.weight"]),
        ([last.bias, first], ["0.weight", "0.bias", "2.bias"]),
        (first.weight, ["0.weight"]),
        ([first.weight, "*.bias"], ["0.weight", "0.bias", "2.bias"]),
        (iter([model[1], "0.bias"]), ["0.bias"]),
        (lambda name, p: p.dim() > 1, ["0.weight", "2.weight"]),
        ([], []),
    ]
    for params, expected in names:
        assert list(select(model, params)) == expected, params


@pytest.mark.parametrize(
    ("params", "error", "said"),
    [
        (3, TypeError, "params selects by names, modules, parameters or a function, not int"),
        (["0.weight", 3], TypeError, "params may contain names, modules and parameters, not int"),
        ([("0.weight", None)], TypeError, "params may contain names, modules and parameters, not tuple"),
        ("1.*", ValueError, "no parameter is called '1.*'; the model has 0.weight, 0.bias, 2.weight, 2.bias"),
        ([nn.Linear(3, 4)], ValueError, "some of the given params are not parameters of the model"),
        (nn.Parameter(torch.zeros(3)), ValueError, "some of the given params are not parameters of the model"),
    ],
)
def test_mistakes(model, params, error, said):
    with pytest.raises(error, match=f"^{re.escape(said)}$"):
        select(model, params)


def test_a_tied_parameter_has_any_of_its_names(model):
    model.append(nn.Linear(3, 4))
    model[3].weight = model[0].weight
    assert list(select(model, "3.weight")) == list(select(model, [model[3].weight])) == ["0.weight"]


def test_normalisation_layers_are_found_by_their_type(model):
    assert normalisation(model) == set()
    layers = (nn.BatchNorm2d(2), nn.InstanceNorm1d(2, affine=True), nn.GroupNorm(1, 2), nn.LayerNorm([2, 2]))
    found = normalisation(nn.Sequential(*layers, nn.RMSNorm([2, 2]), nn.LocalResponseNorm(2), nn.Linear(2, 2)))
    assert found == {*(f"{i}.{kind}" for i in range(4) for kind in ("weight", "bias")), "4.weight"}
